package sandbox

import "time"

// NetworkFault disturbs the link of a running sandbox, so that people can see
// how their programs bear it. It ends when cleared, when its time is over, when
// the sandbox stops, and with the daemon. Zero fields disturb nothing.
type NetworkFault struct {
	LatencyMS   int64      `json:"latency_ms,omitempty" minimum:"0" maximum:"60000" doc:"Milliseconds added to the round trip: half of them each way."`
	JitterMS    int64      `json:"jitter_ms,omitempty" minimum:"0" maximum:"60000" doc:"The latency varies by up to so much; packets may overtake each other."`
	LossPercent float64    `json:"loss_percent,omitempty" minimum:"0" maximum:"100" doc:"Share of packets lost, each way."`
	RateBPS     uint64     `json:"rate_bps,omitempty" doc:"Bits per second each way; the sandbox's own limits hold too."`
	Partition   bool       `json:"partition,omitempty" doc:"Nothing passes, and nobody is told."`
	Seconds     int64      `json:"seconds,omitempty" minimum:"0" maximum:"31536000" doc:"How long it lasts; 0 means until it is cleared."`
	Until       *time.Time `json:"until,omitempty" doc:"When it ends by itself; set by the daemon."`
}

// Zero reports whether the fault disturbs nothing.
func (f NetworkFault) Zero() bool {
	return f.LatencyMS == 0 && f.JitterMS == 0 && f.LossPercent == 0 && f.RateBPS == 0 && !f.Partition
}

// Validate checks what can be judged without a host. Errors are of class
// ErrInvalid, code invalid_fault.
func (f NetworkFault) Validate() error {
	const longest = 60_000
	bad := func(format string, args ...any) error { return Errorf(ErrInvalid, "invalid_fault", format, args...) }
	switch {
	case f.Zero():
		return bad("network fault: name at least one of latency, jitter, loss, rate and partition")
	case f.LatencyMS < 0 || f.LatencyMS > longest:
		return bad("network fault: latency %d ms: use 0 to %d", f.LatencyMS, longest)
	case f.JitterMS < 0 || f.JitterMS > f.LatencyMS:
		return bad("network fault: jitter %d ms: use at most the latency (%d ms), around which it varies", f.JitterMS, f.LatencyMS)
	case !(f.LossPercent >= 0 && f.LossPercent <= 100): // nor NaN
		return bad("network fault: loss %v%%: use 0 to 100", f.LossPercent)
	case f.RateBPS != 0 && f.RateBPS < minRateBPS:
		return bad("network fault: rate %d: use at least %d bits per second", f.RateBPS, minRateBPS)
	case f.Seconds < 0 || f.Seconds > int64(maxTTL/time.Second):
		return bad("network fault: %d seconds: use 0 to %d", f.Seconds, int64(maxTTL/time.Second))
	}
	return nil
}
