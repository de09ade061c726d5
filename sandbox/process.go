package sandbox

import (
	"strings"
	"time"
)

// ProcessSpec is one command to run in a sandbox.
type ProcessSpec struct {
	Argv           []string          `json:"argv" minItems:"1" maxItems:"4096" doc:"Program and arguments; the program is looked up in PATH inside."`
	Env            map[string]string `json:"env,omitempty" doc:"Added to the sandbox's environment."`
	WorkDir        string            `json:"workdir,omitempty" maxLength:"4096"`
	User           string            `json:"user,omitempty" maxLength:"64" doc:"A name or uid[:gid]; empty means the sandbox's."`
	Stdin          bool              `json:"stdin,omitempty" doc:"Keep a standard input open for the client; otherwise /dev/null."`
	TTY            *WindowSize       `json:"tty,omitempty" doc:"Run on a pseudo terminal of this size; output is then one stream."`
	TimeoutSeconds float64           `json:"timeout_seconds,omitempty" minimum:"0" doc:"After this long the whole tree gets TERM and, 5 s later, KILL; 0 means none."`
	OutputBytes    int               `json:"output_bytes,omitempty" minimum:"0" maximum:"67108864" doc:"Output kept for replay; 0 means 1 MiB. Beyond 192 MiB over all running processes a new one keeps 32 KiB."`
	Tag            string            `json:"tag,omitempty" maxLength:"63" doc:"A word of the caller's to find it by."`
	ImageCommand   bool              `json:"image_command,omitempty" doc:"Run as the image says: argv are arguments of its entrypoint and stand in place of its cmd; null argv means the image's own."`
	Main           bool              `json:"main,omitempty" doc:"When this process ends the sandbox ends with it: reason exited, oom or timeout."`

	// IdempotencyKey, when not empty, makes a repeated request return the
	// process the first one started, or say that it has run: ErrConflict with
	// code already_run. The same key with another command is
	// idempotency_mismatch. The wire has it as a header.
	IdempotencyKey string `json:"-"`
}

// WindowSize is the size of a terminal in characters.
type WindowSize struct {
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// Bounds of a process spec.
const (
	maxArgvBytes     = 512 << 10
	maxTimeout       = 365 * 24 * 3600
	DefaultOutput    = 1 << 20  // bytes of output kept for a process
	MaxOutput        = 64 << 20 // most a caller may ask for
	TerminationGrace = 5 * time.Second
)

// Validate checks what can be judged without the sandbox.
func (p ProcessSpec) Validate() error {
	total := 0
	for _, a := range p.Argv {
		total += len(a) + 1
		if strings.ContainsRune(a, 0) {
			return Errorf(ErrInvalid, "invalid_argv", "argv: arguments must not hold a zero byte")
		}
	}
	switch {
	case (len(p.Argv) == 0 || p.Argv[0] == "") && !p.ImageCommand:
		return Errorf(ErrInvalid, "invalid_argv", "argv is empty: name a command, as in sandbox exec NAME -- ls /")
	case len(p.Argv) > 4096 || total > maxArgvBytes:
		return Errorf(ErrInvalid, "invalid_argv", "argv of %d arguments and %d bytes: at most 4096 and %d; send large input by stdin or a file", len(p.Argv), total, maxArgvBytes)
	case !(p.TimeoutSeconds >= 0 && p.TimeoutSeconds <= maxTimeout):
		return Errorf(ErrInvalid, "invalid_timeout", "timeout_seconds %v: use 0 to %d", p.TimeoutSeconds, maxTimeout)
	case p.OutputBytes < 0 || p.OutputBytes > MaxOutput:
		return Errorf(ErrInvalid, "invalid_output", "output_bytes %d: use 0 to %d", p.OutputBytes, MaxOutput)
	case len(p.Tag) > 63:
		return Errorf(ErrInvalid, "invalid_tag", "tag of %d bytes: at most 63", len(p.Tag))
	}
	if err := ValidateEnv(p.Env); err != nil {
		return err
	}
	if err := ValidateWorkDir(p.WorkDir); err != nil {
		return err
	}
	return ValidateUser(p.User)
}

// Process is the record of one command in a sandbox, as PID 1 tells it.
type Process struct {
	ID        ProcessID   `json:"id"`
	PID       int         `json:"pid" doc:"Inside the sandbox."`
	Argv      []string    `json:"argv"`
	User      string      `json:"user,omitempty"`
	Tag       string      `json:"tag,omitempty"`
	TTY       bool        `json:"tty,omitempty"`
	Main      bool        `json:"main,omitempty" doc:"The sandbox ends with it."`
	StartedAt time.Time   `json:"started_at"`
	Exit      *ExitStatus `json:"exit,omitempty" doc:"Present once it has ended."`
	Output    OutputState `json:"output"`

	StdinBytes int64 `json:"stdin_bytes,omitempty" doc:"Bytes of standard input it was given so far, by all clients."`
}

// OutputState tells which part of a process's output can still be read.
// Offsets count bytes over both streams in the order they were written.
type OutputState struct {
	Start   int64 `json:"start" doc:"Oldest offset still kept."`
	End     int64 `json:"end" doc:"Offset after the newest byte."`
	Dropped int64 `json:"dropped" doc:"Bytes that left the ring before they were ever sent to a reader."`
}

// ExitStatus says how a process ended.
type ExitStatus struct {
	Code     int       `json:"code" doc:"Exit code; 128+N after signal N."`
	Signal   string    `json:"signal,omitempty" doc:"As SIGKILL, where a signal ended it."`
	TimedOut bool      `json:"timed_out,omitempty"`
	OOM      bool      `json:"oom,omitempty" doc:"The kernel killed it for memory."`
	At       time.Time `json:"at"`
}

// Stream tells one output stream of a process from another.
type Stream uint8

// The streams. A terminal's output is Stdout.
const (
	Stdout Stream = 1
	Stderr Stream = 2
)

// Output is one piece of a process's output.
type Output struct {
	Stream  Stream
	Offset  int64  // of Data's first byte
	Dropped int64  // bytes missing just before Offset
	Data    []byte // valid until the next read
}

// FileInfo describes one file inside a sandbox.
type FileInfo struct {
	Name    string    `json:"name"`
	Path    string    `json:"path"`
	Type    FileType  `json:"type" enum:"file,dir,symlink,other"`
	Size    int64     `json:"size"`
	Mode    uint32    `json:"mode" doc:"Permission bits, 07777."`
	UID     uint32    `json:"uid"`
	GID     uint32    `json:"gid"`
	User    string    `json:"user,omitempty"`
	Group   string    `json:"group,omitempty"`
	ModTime time.Time `json:"mod_time"`
	Target  string    `json:"target,omitempty" doc:"Of a symbolic link."`

	Leads *LinkEnd          `json:"leads,omitempty" doc:"What a symbolic link leads to in the end, where that was asked for."`
	Attrs map[string]string `json:"attrs,omitempty" doc:"Extended attributes of the user, where they were asked for."`
}

// LinkEnd is what stands at the end of a symbolic link.
type LinkEnd struct {
	Path string   `json:"path"`
	Type FileType `json:"type" enum:"file,dir,symlink,other"`
	Mode uint32   `json:"mode"`
}

// FileType is the kind of a file.
type FileType string

// The file types.
const (
	FileRegular FileType = "file"
	FileDir     FileType = "dir"
	FileSymlink FileType = "symlink"
	FileOther   FileType = "other"
)

// FileEvent is one change seen by a watch.
type FileEvent struct {
	Path string `json:"path"`
	Op   string `json:"op" enum:"create,write,remove,rename,chmod,overflow"`
}
