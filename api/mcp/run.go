package mcp

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of a run, in seconds and bytes.
const (
	defaultTimeout = 60
	maxTimeout     = 3600
	maxWait        = 60
	maxCode        = 96 << 10 // an argument of a program holds less than 128 KiB (execve(2))
	cleanUp        = 30 * time.Second
)

// languages are the programs that run code given as an argument.
var languages = map[string][]string{
	"python": {"python3", "-c"}, "bash": {"bash", "-c"}, "sh": {"sh", "-c"}, "node": {"node", "-e"}, "perl": {"perl", "-e"}, "ruby": {"ruby", "-e"}, "php": {"php", "-r"},
}

var aliases = map[string]string{"python3": "python", "py": "python", "javascript": "node", "js": "node", "shell": "sh"}

type (
	codeArgs struct {
		Sandbox        string  `json:"sandbox,omitempty" jsonschema:"where to run it; when empty a new sandbox is made for it and removed afterwards"`
		Language       string  `json:"language" jsonschema:"python, bash, sh, node, perl, ruby or php: its program must be in the image"`
		Code           string  `json:"code" jsonschema:"the program, at most 96 KiB"`
		TimeoutSeconds float64 `json:"timeout_seconds,omitempty" jsonschema:"it is killed after this long: 60 when absent, at most 3600"`
		MaxBytes       int     `json:"max_bytes,omitempty" jsonschema:"of the output in the answer: 32768 when absent, at most 262144"`
	}
	execArgs struct {
		Sandbox        string            `json:"sandbox" jsonschema:"id, name, or unique beginning of an id"`
		Command        string            `json:"command,omitempty" jsonschema:"a line for sh; or give argv"`
		Argv           []string          `json:"argv,omitempty" jsonschema:"program and arguments, run without a shell"`
		WorkDir        string            `json:"workdir,omitempty"`
		User           string            `json:"user,omitempty"`
		Env            map[string]string `json:"env,omitempty"`
		Stdin          string            `json:"stdin,omitempty" jsonschema:"all of its standard input"`
		Background     bool              `json:"background,omitempty" jsonschema:"answer at once with the process id; read_output tells the rest. There is no timeout then unless one is given"`
		TimeoutSeconds float64           `json:"timeout_seconds,omitempty" jsonschema:"it is killed after this long: 60 when absent, at most 3600"`
		MaxBytes       int               `json:"max_bytes,omitempty" jsonschema:"of the output in the answer: 32768 when absent, at most 262144"`
	}
	ran struct {
		Sandbox  string `json:"sandbox"`
		Process  string `json:"process" jsonschema:"for read_output"`
		Running  bool   `json:"running,omitempty" jsonschema:"it has not ended yet"`
		ExitCode *int   `json:"exit_code,omitempty"`
		Signal   string `json:"signal,omitempty" jsonschema:"which ended it"`
		TimedOut bool   `json:"timed_out,omitempty"`
		OOM      bool   `json:"oom,omitempty" jsonschema:"it was killed for memory"`
		Stdout   string `json:"stdout"`
		Stderr   string `json:"stderr"`
		Cut      string `json:"cut,omitempty" jsonschema:"what was left out, and how to get it"`
	}
	outputArgs struct {
		Sandbox     string  `json:"sandbox" jsonschema:"id, name, or unique beginning of an id"`
		Process     string  `json:"process" jsonschema:"as exec told it"`
		Offset      int64   `json:"offset,omitempty" jsonschema:"from this byte of the output on; of what is no longer kept, the oldest that is"`
		MaxBytes    int     `json:"max_bytes,omitempty" jsonschema:"32768 when absent, at most 262144"`
		WaitSeconds float64 `json:"wait_seconds,omitempty" jsonschema:"wait so long for more, or for its end: at most 60"`
	}
	outputPart struct {
		Text       string `json:"text" jsonschema:"both streams, as written"`
		Offset     int64  `json:"offset" jsonschema:"of the first byte of the text"`
		NextOffset int64  `json:"next_offset" jsonschema:"ask from here on for the rest"`
		More       bool   `json:"more" jsonschema:"there is more already"`
		Running    bool   `json:"running"`
		ExitCode   *int   `json:"exit_code,omitempty"`
	}
)

func (t *tools) runTools(s *sdk.Server) {
	add(t, s, tool{
		"run_code", "Run code",
		"Run a short program in a sandbox and answer with its output and exit code. Without a sandbox a new one is made, and removed afterwards with all it wrote.", runs,
	}, t.runCode)
	add(t, s, tool{
		"exec", "Run a command",
		"Run a command in a sandbox, and answer with its output and exit code when it has ended; or start it in the background.", runs,
	}, t.exec)
	add(t, s, tool{
		"read_output", "Read a command's output",
		"Output of a command from an offset on: of one in the background, or what another answer left out.", looks,
	}, t.readOutput)
}

func (t *tools) runCode(ctx context.Context, in codeArgs) (_ ran, _ string, err error) {
	lang := strings.ToLower(in.Language)
	if a := aliases[lang]; a != "" {
		lang = a
	}
	program, ok := languages[lang]
	switch {
	case !ok:
		return ran{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_language", "language %.40q: use python, bash, sh, node, perl, ruby or php, or exec for another program", in.Language)
	case in.Code == "":
		return ran{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_code", "code is empty")
	case len(in.Code) > maxCode:
		return ran{}, "", sandbox.Errorf(sandbox.ErrTooLarge, "code_too_large", "code of %d bytes: at most %d; write it with write_file and run that with exec", len(in.Code), maxCode)
	}
	args := execArgs{Sandbox: in.Sandbox, Argv: append(slices.Clone(program), in.Code), TimeoutSeconds: in.TimeoutSeconds, MaxBytes: in.MaxBytes}
	spec, most, err := args.spec()
	if err != nil {
		return ran{}, "", err
	}
	ref, brief := in.Sandbox, in.Sandbox == ""
	if brief {
		// Should removing it fail, its time ends it.
		sb, err := t.d.Create(ctx, sandbox.Spec{TTLSeconds: int64(spec.TimeoutSeconds) + 300}, "mcp-"+rand.Text())
		if err != nil {
			return ran{}, "", err
		}
		ref = string(sb.ID)
		defer func() {
			rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUp)
			defer cancel()
			if _, rerr := t.d.Remove(rctx, ref); rerr != nil {
				err = errors.Join(err, fmt.Errorf("removing the sandbox made for it: %w", rerr))
			}
		}()
	}
	out, err := t.run(ctx, ref, spec, "", most, brief)
	if err != nil {
		return ran{}, "", err
	}
	return out, out.text(), nil
}

// spec makes what is to be run of the arguments, and tells how much of its
// output is wanted.
func (in execArgs) spec() (sandbox.ProcessSpec, int, error) {
	p := sandbox.ProcessSpec{Argv: in.Argv, WorkDir: in.WorkDir, User: in.User, Env: in.Env, Stdin: in.Stdin != "", TimeoutSeconds: in.TimeoutSeconds}
	switch {
	case (in.Command == "") == (len(in.Argv) == 0):
		return p, 0, sandbox.Errorf(sandbox.ErrInvalid, "invalid_argv", "give either command, a line for sh, or argv")
	case in.Command != "":
		p.Argv = []string{"sh", "-c", in.Command}
	}
	if !(in.TimeoutSeconds >= 0 && in.TimeoutSeconds <= maxTimeout) {
		return p, 0, sandbox.Errorf(sandbox.ErrInvalid, "invalid_timeout", "timeout_seconds %v: use 1 to %d; what takes longer runs in the background", in.TimeoutSeconds, maxTimeout)
	}
	if p.TimeoutSeconds == 0 && !in.Background {
		p.TimeoutSeconds = defaultTimeout
	}
	most, err := bounded("max_bytes", in.MaxBytes, defaultBytes, maxBytes)
	if err == nil {
		err = p.Validate()
	}
	return p, most, err
}

func (t *tools) exec(ctx context.Context, in execArgs) (ran, string, error) {
	spec, most, err := in.spec()
	if err != nil {
		return ran{}, "", err
	}
	if !in.Background {
		out, err := t.run(ctx, in.Sandbox, spec, in.Stdin, most, false)
		return out, out.text(), err
	}
	if in.Stdin != "" {
		return ran{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_stdin", "stdin: a command in the background gets none; write a file and let it read that")
	}
	p, err := t.d.StartProcess(ctx, in.Sandbox, spec)
	if err != nil {
		return ran{}, "", err
	}
	out := ran{Sandbox: in.Sandbox, Process: string(p.ID), Running: true}
	return out, out.text(), nil
}

// run runs a command to its end. One whose caller goes away is killed: nobody
// would look at it any more.
func (t *tools) run(ctx context.Context, ref string, spec sandbox.ProcessSpec, input string, most int, brief bool) (ran, error) {
	// A connection may end with its context; this one must outlive ctx by a signal.
	p, err := t.d.Exec(context.WithoutCancel(ctx), ref, spec)
	if err != nil {
		return ran{}, err
	}
	defer func() { _ = p.Close() }() // the process has ended, or was told to
	stop := context.AfterFunc(ctx, func() {
		_ = p.Signal("SIGKILL") // its timeout ends it otherwise
		_ = p.Close()
	})
	defer stop()
	if input != "" {
		go func() {
			if _, err := p.WriteStdin([]byte(input)); err == nil {
				_ = p.CloseStdin() // it may have ended
			}
		}()
	}
	c := &collector{max: most}
	for {
		out, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return ran{}, err
		}
		c.add(out)
	}
	r := ran{Sandbox: ref, Process: string(p.Process().ID), Stdout: c.text(sandbox.Stdout), Stderr: c.text(sandbox.Stderr)}
	exit, ok := p.Exit()
	if !ok {
		return ran{}, sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the output of process %s ended before the process did: read_output tells more", r.Process)
	}
	r.ExitCode, r.Signal, r.TimedOut, r.OOM = &exit.Code, exit.Signal, exit.TimedOut, exit.OOM
	if from, to, ok := c.gap(); ok {
		r.Cut = fmt.Sprintf("bytes %d to %d of %d of the output are left out", from, to, c.end)
		if brief {
			r.Cut += ": print less, or run it in a sandbox of your own, where read_output returns the rest"
		} else {
			r.Cut += fmt.Sprintf(": read_output with process %s and offset %d returns them, as long as they are kept (the newest %d bytes)", r.Process, from, sandbox.DefaultOutput)
		}
	}
	return r, nil
}

// text is what a model reads.
func (r ran) text() string {
	if r.Running {
		return fmt.Sprintf("process %s of sandbox %s runs; read_output tells its output and its end", r.Process, r.Sandbox)
	}
	var b strings.Builder
	b.WriteString(r.Stdout)
	line := func() {
		if b.Len() > 0 && !strings.HasSuffix(b.String(), "\n") {
			b.WriteByte('\n')
		}
	}
	if r.Stderr != "" {
		line()
		b.WriteString("[stderr]\n" + r.Stderr)
	}
	line()
	switch {
	case r.TimedOut:
		b.WriteString("[killed: it took too long; timeout_seconds permits more]")
	case r.OOM:
		b.WriteString("[killed: out of memory]")
	case r.Signal != "":
		fmt.Fprintf(&b, "[ended by %s]", r.Signal)
	case r.ExitCode != nil:
		fmt.Fprintf(&b, "[exit code %d]", *r.ExitCode)
	}
	if r.Cut != "" {
		b.WriteString("\n[" + r.Cut + "]")
	}
	return b.String()
}

func (t *tools) readOutput(ctx context.Context, in outputArgs) (outputPart, string, error) {
	most, err := bounded("max_bytes", in.MaxBytes, defaultBytes, maxBytes)
	if err != nil {
		return outputPart{}, "", err
	}
	if in.Offset < 0 || !(in.WaitSeconds >= 0 && in.WaitSeconds <= maxWait) {
		return outputPart{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", "offset %d, wait_seconds %v: use 0 or more, and 0 to %d", in.Offset, in.WaitSeconds, maxWait)
	}
	out, err := t.part(ctx, in.Sandbox, sandbox.ProcessID(in.Process), in.Offset, most, time.Duration(in.WaitSeconds*float64(time.Second)))
	return out, "", err
}

// part reads at most so many bytes of a process's output: what there is or,
// with a wait, what comes meanwhile.
func (t *tools) part(ctx context.Context, ref string, id sandbox.ProcessID, offset int64, most int, wait time.Duration) (outputPart, error) {
	p, err := t.d.Attach(ctx, ref, id, offset)
	if err != nil {
		return outputPart{}, err
	}
	proc := p.Process()
	from := max(offset, proc.Output.Start)
	out := outputPart{Offset: from, NextOffset: from, Running: proc.Exit == nil}
	if proc.Exit != nil {
		out.ExitCode = &proc.Exit.Code
	}
	until := proc.Output.End
	leave := func() { _ = p.Close() } // wakes Next
	defer leave()
	defer context.AfterFunc(ctx, leave)()
	var over atomic.Bool // the wait
	if wait > 0 && out.Running {
		until = 1<<63 - 1
		timer := time.AfterFunc(wait, func() { over.Store(true); leave() })
		defer timer.Stop()
	}
	var b []byte
	for len(b) < most && (from+int64(len(b)) < until) {
		piece, err := p.Next()
		if errors.Is(err, io.EOF) {
			out.Running = false
			if exit, ok := p.Exit(); ok {
				out.ExitCode = &exit.Code
			}
			break
		}
		if err != nil {
			if over.Load() && ctx.Err() == nil {
				break
			}
			return outputPart{}, err
		}
		if len(b) > 0 && piece.Dropped > 0 {
			break // what comes does not join on; the next call begins with it
		}
		if len(b) == 0 {
			from = piece.Offset
			out.Offset = from
		}
		b = append(b, piece.Data...)
	}
	seen := from + int64(len(b))
	b = b[:min(len(b), most)]
	if seen > from+int64(len(b)) || out.Running {
		b = whole(b)
	}
	out.NextOffset = from + int64(len(b))
	out.Text = strings.ToValidUTF8(string(b), "\uFFFD")
	out.More = out.NextOffset < max(seen, proc.Output.End)
	return out, nil
}
