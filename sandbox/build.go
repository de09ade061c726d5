package sandbox

import (
	"strings"
	"time"
)

// BuildRequest asks for an image made by a Dockerfile. The files it copies
// come beside it, as a tar archive.
type BuildRequest struct {
	Names          []string          `json:"names,omitempty" maxItems:"16" doc:"Names of the image; none: only the cache of its steps remains."`
	Dockerfile     string            `json:"dockerfile" maxLength:"1048576" doc:"The Dockerfile's text."`
	Args           map[string]string `json:"args,omitempty" doc:"Values of ARG instructions."`
	Target         string            `json:"target,omitempty" maxLength:"128" doc:"Stage to build, by name or number; empty means the last."`
	Platform       string            `json:"platform,omitempty" maxLength:"64" doc:"os/arch; only the host's own can be built."`
	NoCache        bool              `json:"no_cache,omitempty" doc:"Run every step, whatever the cache has."`
	Network        NetworkPolicy     `json:"network,omitempty" doc:"Of the RUN steps."`
	Limits         Limits            `json:"limits,omitempty" doc:"Of each step; zero values mean the daemon's defaults."`
	TimeoutSeconds int64             `json:"timeout_seconds,omitempty" minimum:"0" maximum:"86400" doc:"Of the whole build; 0 means the daemon's limit."`
	Actor          string            `json:"-"`
}

// Bounds of a build request.
const (
	MaxDockerfile = 1 << 20
	maxBuildNames = 16
	maxBuildTime  = 24 * time.Hour
)

// Validate checks what can be judged without reading the Dockerfile.
func (r BuildRequest) Validate() error {
	if len(r.Names) > maxBuildNames {
		return Errorf(ErrInvalid, "invalid_build", "%d names for one image: at most %d", len(r.Names), maxBuildNames)
	}
	for _, n := range r.Names {
		if err := ValidateImageName(n); err != nil {
			return err
		}
	}
	switch {
	case strings.TrimSpace(r.Dockerfile) == "":
		return Errorf(ErrInvalid, "dockerfile_invalid", "the Dockerfile is empty: begin with FROM")
	case len(r.Dockerfile) > MaxDockerfile:
		return Errorf(ErrTooLarge, "dockerfile_too_large", "a Dockerfile of %d bytes: at most %d", len(r.Dockerfile), MaxDockerfile)
	case r.TimeoutSeconds < 0 || r.TimeoutSeconds > int64(maxBuildTime/time.Second):
		return Errorf(ErrInvalid, "invalid_timeout", "timeout_seconds %d: use 0 to %d", r.TimeoutSeconds, int64(maxBuildTime/time.Second))
	case len(r.Target) > 128 || strings.ContainsRune(r.Target, 0):
		return Errorf(ErrInvalid, "invalid_build", "target %.40q: use a stage's name or number", r.Target)
	}
	if err := ValidateEnv(r.Args); err != nil {
		return Errorf(ErrInvalid, "invalid_build_arg", "build arguments: %w", err)
	}
	if err := (Spec{Network: r.Network}).Validate(); err != nil {
		return err
	}
	return r.Limits.Validate()
}

// BuildEventType says what a BuildEvent tells.
type BuildEventType string

// The types of build events.
const (
	BuildNote   BuildEventType = "note"   // something to know that stops nothing
	BuildStep   BuildEventType = "step"   // a step begins, or is found in the cache
	BuildOutput BuildEventType = "output" // of the RUN under way
	BuildDone   BuildEventType = "done"   // of a step that ran
	BuildImage  BuildEventType = "image"  // the image stands; the last event
)

// BuildEvent is one piece of news of a build under way.
type BuildEvent struct {
	Type    BuildEventType `json:"type" enum:"note,step,output,done,image,error"`
	Stage   string         `json:"stage,omitempty" doc:"Name or number of the stage."`
	Step    int            `json:"step,omitempty" doc:"Number of the step in its stage, from 1."`
	Steps   int            `json:"steps,omitempty" doc:"Steps of the stage."`
	Line    int            `json:"line,omitempty" doc:"Line of the Dockerfile."`
	Text    string         `json:"text,omitempty" doc:"The instruction, or the note."`
	Cached  bool           `json:"cached,omitempty" doc:"Of a step: nothing is run, the cache has it."`
	Seconds float64        `json:"seconds,omitempty" doc:"Of a step that ran."`
	Stream  string         `json:"stream,omitempty" enum:"stdout,stderr"`
	Data    []byte         `json:"data,omitempty" doc:"Of output: base64."`
	Image   *Image         `json:"image,omitempty"`
}

// BuildCache tells what the cache of build steps holds.
type BuildCache struct {
	Steps int `json:"steps"`
}

// BuildCachePrune says which steps to forget: those not used since, and of
// the others the least lately used beyond Keep.
type BuildCachePrune struct {
	OlderThanSeconds int64 `json:"older_than_seconds,omitempty" minimum:"0" doc:"Not used for this long; 0: any."`
	Keep             int   `json:"keep,omitempty" minimum:"0" doc:"How many of the rest to keep at most; 0 with no age: none."`
}
