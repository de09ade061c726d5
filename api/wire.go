package api

import "github.com/sandboxd/sandboxd/sandbox"

// Header names.
const (
	HeaderRequestID      = "X-Request-Id"    // on every response; a caller's own is kept when it is plain
	HeaderIdempotencyKey = "Idempotency-Key" // on create and run
	HeaderFileInfo       = "X-File-Info"     // on a file read: base64 of FileInfo as JSON
	HeaderLastEventID    = "Last-Event-ID"   // on an event stream: go on after it
)

// MaxJSONBody is the largest JSON body the server reads, in bytes.
const MaxJSONBody = 1 << 20

// Bounds of a request that brings a command's whole standard input, in bytes.
const (
	MaxInput    = 1 << 20                        // decoded
	MaxExecBody = MaxJSONBody + MaxInput/3*4 + 4 // with it, in base64
)

// ExecRequest asks for a command, with all of its standard input.
type ExecRequest struct {
	sandbox.ProcessSpec
	Input []byte `json:"input,omitempty" doc:"All of the command's standard input, at most 1 MiB; then comes its end. Not with stdin."`
}

// Validate checks what can be judged without the sandbox.
func (r ExecRequest) Validate() error {
	switch {
	case len(r.Input) > MaxInput:
		return sandbox.Errorf(sandbox.ErrTooLarge, "input_too_large", "input of %d bytes: at most %d; write a file, or use the WebSocket", len(r.Input), MaxInput)
	case r.Stdin:
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_stdin", "stdin: this request cannot send more later: give all of it as input, or use the WebSocket")
	}
	return r.ProcessSpec.Validate()
}

// RunRequest asks for a new sandbox and a command in it.
type RunRequest struct {
	Sandbox sandbox.Spec `json:"sandbox,omitempty"`
	Process ExecRequest  `json:"process"`
}

// Validate checks what can be judged without the daemon.
func (r RunRequest) Validate() error {
	if err := r.Sandbox.ValidateAsked(); err != nil {
		return err
	}
	return r.Process.Validate()
}

// SandboxList is one page of sandboxes, newest first.
type SandboxList struct {
	Items []sandbox.Sandbox `json:"items"`
	Next  string            `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// ProcessList lists the processes of a sandbox, oldest first.
type ProcessList struct {
	Items []sandbox.Process `json:"items"`
	Next  string            `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// EventList is one page of events, oldest first.
type EventList struct {
	Items []sandbox.Event `json:"items"`
	Next  int64           `json:"next" doc:"Ask again with after=this."`
}

// ImageList lists the images.
type ImageList struct {
	Items []sandbox.Image `json:"items"`
	Next  string          `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// VolumeList lists the volumes, by name.
type VolumeList struct {
	Items []sandbox.Volume `json:"items"`
	Next  string           `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// SandboxTemplateList lists templates of sandboxes by name.
type SandboxTemplateList struct {
	Items []sandbox.BaseTemplate `json:"items"`
}

// SecretList lists the secrets by name, without their values.
type SecretList struct {
	Items []sandbox.Secret `json:"items"`
}

// TagRequest asks for another name of an image.
type TagRequest struct {
	Source string `json:"source" minLength:"1" maxLength:"512" doc:"A name it has."`
	Name   string `json:"name" minLength:"1" maxLength:"512" doc:"The new one; an image that has it is replaced."`
}

// FileList lists the entries of a directory.
type FileList struct {
	Items []sandbox.FileInfo `json:"items"`
}

// DoctorReport is what the daemon finds of its own host.
type DoctorReport struct {
	Checks []sandbox.Check `json:"checks"`
}

// Version names the daemon that answers.
type Version struct {
	Version string `json:"version" doc:"Of the daemon."`
	API     string `json:"api" doc:"Of this API: v1."`
}

// SignalRequest names a signal.
type SignalRequest struct {
	Signal string `json:"signal" minLength:"1" maxLength:"16" doc:"As SIGTERM."`
}

// MkdirRequest asks for a directory.
type MkdirRequest struct {
	Path string `json:"path" minLength:"1" maxLength:"4096"`
	Mode string `json:"mode,omitempty" pattern:"^[0-7]{3,4}$" doc:"Octal; 0755 when absent."`
	User string `json:"user,omitempty" maxLength:"64"`
}

// MoveRequest asks to rename a file or tree.
type MoveRequest struct {
	From string `json:"from" minLength:"1" maxLength:"4096"`
	To   string `json:"to" minLength:"1" maxLength:"4096"`
	User string `json:"user,omitempty" maxLength:"64"`
}

// ChmodRequest asks for other permission bits.
type ChmodRequest struct {
	Path string `json:"path" minLength:"1" maxLength:"4096"`
	Mode string `json:"mode" pattern:"^[0-7]{3,4}$" doc:"Octal."`
	User string `json:"user,omitempty" maxLength:"64"`
}

// OutputLine is one line of a process's output as application/x-ndjson.
type OutputLine struct {
	Stream  string              `json:"stream,omitempty" enum:"stdout,stderr"`
	Offset  int64               `json:"offset"`
	Dropped int64               `json:"dropped,omitempty" doc:"Bytes missing just before offset."`
	Data    []byte              `json:"data,omitempty" doc:"base64."`
	Exit    *sandbox.ExitStatus `json:"exit,omitempty" doc:"On the last line of an ended process."`
	Problem *Problem            `json:"problem,omitempty" doc:"On the last line, where the output ends for another reason than the process's end."`
}

// WebhookList lists webhooks, the oldest first, without their secrets.
type WebhookList struct {
	Items []sandbox.Webhook `json:"items"`
}

// DeadLetterList lists events whose delivery was given up, the oldest first.
type DeadLetterList struct {
	Items []sandbox.DeadLetter `json:"items"`
}

// DeliveryList tells what became of attempts.
type DeliveryList struct {
	Items []sandbox.Delivery `json:"items"`
}

// RetryRequest names dead letters.
type RetryRequest struct {
	Seqs []int64 `json:"seqs,omitempty" maxItems:"100" doc:"Numbers of events; without any, the oldest hundred."`
}
