package sandbox

import "time"

// DeadlineAction is what becomes of a sandbox when its lifetime is over.
type DeadlineAction string

// The actions of a deadline. Empty means end.
const (
	DeadlineEnd   DeadlineAction = "end"   // it ends, and its files go
	DeadlinePause DeadlineAction = "pause" // it is paused: memory is kept, and held
	DeadlineStop  DeadlineAction = "stop"  // it is stopped: files are kept
)

// Rests reports whether a sandbox outlives its deadline. One that does has no
// deadline while it rests, and its whole lifetime again once it goes on.
func (a DeadlineAction) Rests() bool { return a == DeadlinePause || a == DeadlineStop }

func (a DeadlineAction) validate() error {
	switch a {
	case "", DeadlineEnd, DeadlinePause, DeadlineStop:
		return nil
	}
	return Errorf(ErrInvalid, "invalid_deadline", "on_deadline %.40q: use end, pause or stop", a)
}

// DeadlineRequest changes when a living sandbox's time is up, or what becomes
// of it then. What is left out stays as it is.
type DeadlineRequest struct {
	TTLSeconds *int64         `json:"ttl_seconds,omitempty" minimum:"0" maximum:"31536000" doc:"Lifetime from now on; 0 takes the deadline away."`
	AtLeast    bool           `json:"at_least,omitempty" doc:"A later deadline, or none, stays as it is."`
	OnDeadline DeadlineAction `json:"on_deadline,omitempty" enum:"end,pause,stop" doc:"What becomes of it then."`

	// Hold takes the deadline away until the sandbox is resumed or started: then
	// it has its whole lifetime again.
	Hold  bool   `json:"-"`
	Actor string `json:"-"`
}

// Validate checks what can be judged without the sandbox. Class ErrInvalid.
func (r DeadlineRequest) Validate() error {
	if t := r.TTLSeconds; t != nil && (*t < 0 || *t > int64(maxTTL/time.Second)) {
		return Errorf(ErrInvalid, "invalid_timeout", "ttl_seconds %d: use 0 to %d", *t, int64(maxTTL/time.Second))
	}
	if r.TTLSeconds == nil && r.OnDeadline == "" && !r.Hold {
		return Errorf(ErrInvalid, "invalid_deadline", "nothing to change: give ttl_seconds, on_deadline or both")
	}
	return r.OnDeadline.validate()
}
