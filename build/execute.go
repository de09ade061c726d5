package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// stage executes a stage's operations, one on what the other made.
func (x *execution) stage(ctx context.Context, s *stage) (sandbox.Image, error) {
	at, err := x.begin(ctx, s)
	if err != nil {
		return at, err
	}
	from := sandbox.BuildEvent{Type: sandbox.BuildStep, Stage: s.name, Step: 1, Steps: len(s.ops) + 1, Line: lineOf(x.file.stages[s.index].Location)}
	from.Text = x.file.quote(from.Line)
	if err := x.tell(from); err != nil {
		return at, err
	}
	for i, o := range s.ops {
		st := &step{x: x, op: o, event: sandbox.BuildEvent{Type: sandbox.BuildStep, Stage: s.name, Step: i + 2, Steps: len(s.ops) + 1, Line: o.line, Text: o.text}}
		if at, err = st.do(ctx, at); err != nil {
			return at, err
		}
	}
	return at, nil
}

// begin returns what a stage begins with, as an image without a name.
func (x *execution) begin(ctx context.Context, s *stage) (sandbox.Image, error) {
	img := s.image
	var err error
	switch {
	case s.base.stage >= 0:
		img, err = x.wait(ctx, s.base.stage)
	case s.base.image == scratch:
		img, err = x.b.cfg.Images.Scratch(ctx)
	}
	return nameless(img), err
}

// nameless is an image as the cache keeps it: layers, and how large they are.
func nameless(img sandbox.Image) sandbox.Image {
	return sandbox.Image{Kind: baseKind(img), Layers: img.Layers, SizeBytes: img.SizeBytes, Files: img.Files}
}

// step is one operation under way.
type step struct {
	x     *execution
	op    op
	event sandbox.BuildEvent
}

// do makes what the operation makes of base, or finds it in the cache.
func (s *step) do(ctx context.Context, base sandbox.Image) (sandbox.Image, error) {
	if err := ctx.Err(); err != nil {
		return base, err
	}
	switch {
	case s.op.run != nil:
		return s.cached(ctx, base, []string{s.op.run.key(base, s.x.req.Network)}, s.run)
	case s.op.dir != nil:
		return s.cached(ctx, base, []string{s.op.dir.key(base)}, s.mkdir)
	}
	return s.copy(ctx, base)
}

// work changes the files of a sandbox.
type work func(ctx context.Context, sb sandbox.ID) error

// cached returns what the cache has under the first of the keys it knows, or
// does the work and remembers it under all of them.
func (s *step) cached(ctx context.Context, base sandbox.Image, keys []string, w work) (sandbox.Image, error) {
	for i, k := range keys {
		made, ok, err := s.lookup(ctx, k)
		if err != nil {
			return base, err
		}
		if !ok {
			continue
		}
		for _, earlier := range keys[:i] {
			if err := s.remember(ctx, earlier, made); err != nil {
				return base, err
			}
		}
		return made, s.hit()
	}
	if err := s.x.tell(s.event); err != nil {
		return base, err
	}
	began := time.Now()
	made, err := s.make(ctx, base, keys, w)
	if err != nil {
		return base, s.failed(err)
	}
	done := s.event
	done.Type, done.Seconds = sandbox.BuildDone, time.Since(began).Seconds()
	return made, s.x.tell(done)
}

func (s *step) hit() error {
	e := s.event
	e.Cached = true
	return s.x.tell(e)
}

// lookup asks the cache.
func (s *step) lookup(ctx context.Context, key string) (sandbox.Image, bool, error) {
	if s.x.req.NoCache {
		return sandbox.Image{}, false, nil
	}
	made, err := s.x.b.cfg.Cache.BuildStep(ctx, key)
	if errors.Is(err, sandbox.ErrNotFound) {
		return made, false, nil
	}
	return made, err == nil, err
}

// remember puts what was made into the cache.
func (s *step) remember(ctx context.Context, key string, made sandbox.Image) error {
	return s.x.b.cfg.Cache.PutBuildStep(context.WithoutCancel(ctx), key, made)
}

// make does the work in a sandbox of its own. The layer is in the cache
// before the sandbox, and with it the snapshot, goes: a crash between the two
// leaves a layer that has a name.
func (s *step) make(ctx context.Context, base sandbox.Image, keys []string, w work) (made sandbox.Image, err error) {
	network := sandbox.NetworkPolicy{Mode: sandbox.NetworkOff}
	if s.op.run != nil && !s.op.run.offline {
		network = s.x.req.Network
	}
	err = s.x.sandbox(ctx, base, network, func(id sandbox.ID) error {
		if err := w(ctx, id); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		var err error
		if made, err = s.x.b.cfg.Sandboxes.FreezeStep(context.WithoutCancel(ctx), string(id), base); err != nil {
			return err
		}
		for _, k := range keys {
			if err := s.remember(ctx, k, made); err != nil {
				return err
			}
		}
		return nil
	})
	return made, err
}

// sandbox gives f a sandbox of base, which is gone afterwards.
func (x *execution) sandbox(ctx context.Context, base sandbox.Image, network sandbox.NetworkPolicy, f func(sandbox.ID) error) (err error) {
	actor := ActorPrefix + x.req.Actor
	spec := sandbox.Spec{Limits: x.req.Limits, Network: network, Hostname: "build", Labels: map[string]string{LabelBuild: x.id}}
	if limit, ok := ctx.Deadline(); ok { // should we ever forget it
		spec.TTLSeconds = int64(time.Until(limit).Seconds()) + 300
	}
	// Nobody else knows the sandbox: it is for us to see it through.
	work := context.WithoutCancel(ctx)
	sb, err := x.b.cfg.Sandboxes.CreateOn(work, sandbox.CreateRequest{Spec: spec, Actor: actor}, base)
	if err != nil {
		return fmt.Errorf("make a sandbox for the step: %w", err)
	}
	defer func() {
		clean, cancel := context.WithTimeout(work, cleanUpTime)
		defer cancel()
		if _, rerr := x.b.cfg.Sandboxes.Remove(clean, string(sb.ID), actor); rerr != nil { // it is tried again by itself
			x.b.cfg.Log.Warn("remove the sandbox of a build step", "sandbox", sb.ID, "err", rerr)
		}
	}()
	if err := ctx.Err(); err != nil {
		return err
	}
	return f(sb.ID)
}

// failed makes the error of a step one that tells its line.
func (s *step) failed(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	e, ok := errors.AsType[*sandbox.Error](err)
	if !ok {
		return fmt.Errorf("line %d of the Dockerfile: %w", s.op.line, err)
	}
	if e.Code == codeFailed || e.Code == codeInvalid || e.Code == codeUnsupported {
		return err
	}
	return s.x.at(e.Class, e.Code, s.op.line, err)
}

// codeFailed is the code of the error of a command that fails.
const codeFailed = "build_step_failed"

// scriptDir is where a RUN's own script lies: in no layer.
const scriptDir = "/dev/shm"

// run runs a command and tells what it prints.
func (s *step) run(ctx context.Context, id sandbox.ID) error {
	r := s.op.run
	env := maps.Clone(map[string]string(r.env))
	maps.Copy(env, r.proxies)
	spec := sandbox.ProcessSpec{Argv: r.argv, Env: env, WorkDir: r.workdir, User: r.user}
	if r.script != nil {
		files, err := s.x.b.cfg.Sandboxes.Files(ctx, string(id))
		if err != nil {
			return err
		}
		script := path.Join(scriptDir, "run-"+path.Base(r.script.name))
		if _, err := files.Write(ctx, "0", script, 0o755, strings.NewReader(r.script.data)); err != nil {
			return err
		}
		spec.Argv = interpreted(r.script.data, script)
	}
	p, err := s.x.b.cfg.Sandboxes.Exec(ctx, string(id), spec)
	if err != nil {
		if errors.Is(err, sandbox.ErrInvalid) || errors.Is(err, sandbox.ErrForbidden) || errors.Is(err, sandbox.ErrNotFound) {
			return s.x.at(sandbox.ErrInvalid, codeFailed, s.op.line, fmt.Errorf("RUN cannot start: %w", err))
		}
		return err
	}
	defer func() { _ = p.Close() }()                         // the sandbox goes with it
	defer context.AfterFunc(ctx, func() { _ = p.Close() })() // wakes Next
	var tail tail
	for {
		out, err := p.Next()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("reading what the step prints: %w", err)
		}
		if err := s.output(out, &tail); err != nil {
			return err
		}
	}
	exit, ok := p.Exit()
	switch {
	case !ok:
		return sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "Dockerfile line %d: the step's sandbox ended before the step did", s.op.line)
	case exit.Code == 0:
		return nil
	}
	return s.x.ended(s.op.line, fate(exit), tail.String())
}

// ended is the error of a command that failed, with the end of what it said.
func (x *execution) ended(line int, how, last string) error {
	if last = strings.TrimSpace(last); last != "" {
		last = "\nIts last output:\n" + last
	}
	return sandbox.Errorf(sandbox.ErrInvalid, codeFailed, "Dockerfile line %d: %s\n  %d | %s%s", line, how, line, x.file.quote(line), last)
}

// interpreted is the command of a script, as the kernel reads its first line
// (execve(2)): an interpreter, and the rest as one argument. The script itself
// need not be executable then, and lies where nothing is.
func interpreted(script, file string) []string {
	first, _, _ := strings.Cut(strings.TrimPrefix(script, "#!"), "\n")
	program, arg, _ := strings.Cut(strings.TrimSpace(first), " ")
	argv := []string{program}
	if arg = strings.TrimSpace(arg); arg != "" {
		argv = append(argv, arg)
	}
	return append(argv, file)
}

// fate says how a command ended.
func fate(exit sandbox.ExitStatus) string {
	how := fmt.Sprintf("RUN failed with exit status %d", exit.Code)
	switch {
	case exit.OOM:
		how = "RUN was killed for its memory: give the build more with --memory"
	case exit.TimedOut:
		how = "RUN took too long"
	case exit.Signal != "":
		how = "RUN was ended by " + exit.Signal
	}
	return how
}

// maxPiece is the most output of one event, in bytes.
const maxPiece = 32 << 10

// output tells a piece of output.
func (s *step) output(out sandbox.Output, t *tail) error {
	stream := "stdout"
	if out.Stream == sandbox.Stderr {
		stream = "stderr"
	}
	if out.Dropped > 0 { // whoever listens is slower than what speaks
		out.Data = append(fmt.Appendf(nil, "[%d bytes of output are lost]\n", out.Dropped), out.Data...)
	}
	for data := out.Data; len(data) > 0; {
		n := min(len(data), maxPiece)
		t.add(data[:n])
		e := s.event
		e.Type, e.Text, e.Stream, e.Data = sandbox.BuildOutput, "", stream, data[:n]
		if err := s.x.tell(e); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// tail keeps the end of what it is given.
type tail struct{ b []byte }

const maxTail = 2 << 10

func (t *tail) add(p []byte) {
	t.b = append(t.b, p...)
	if over := len(t.b) - maxTail; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
}

func (t *tail) String() string { return strings.ToValidUTF8(string(t.b), "") }
