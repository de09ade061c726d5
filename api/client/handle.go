package client

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Handle is one sandbox to work with. Its methods may be called from several
// goroutines at once; the record is the one of when it was made.
type Handle struct {
	sandbox.Sandbox
	c *Client
}

// Make creates a sandbox and returns a handle of it; it runs then.
func (c *Client) Make(ctx context.Context, spec sandbox.Spec) (*Handle, error) {
	sb, err := c.Create(ctx, spec, "")
	if err != nil {
		return nil, err
	}
	return &Handle{sb, c}, nil
}

// Connect returns a handle of a sandbox there is, by id, name or unique
// beginning of an id.
func (c *Client) Connect(ctx context.Context, ref string) (*Handle, error) {
	sb, err := c.Sandbox(ctx, ref)
	if err != nil {
		return nil, err
	}
	return &Handle{sb, c}, nil
}

// Files returns its file work.
func (h *Handle) Files() sandbox.Files { return h.c.Files(string(h.ID)) }

// Remove ends it and deletes its files; repeating it is fine.
func (h *Handle) Remove(ctx context.Context) error {
	_, err := h.c.Remove(ctx, string(h.ID))
	return err
}

// Snapshot freezes its files.
func (h *Handle) Snapshot(ctx context.Context, name string) (sandbox.Snapshot, error) {
	return h.c.Snapshot(ctx, string(h.ID), sandbox.SnapshotRequest{Name: name})
}

// Rollback puts it back on a snapshot's files, in place.
func (h *Handle) Rollback(ctx context.Context, snapshot string) error {
	_, err := h.c.Rollback(ctx, string(h.ID), snapshot)
	return err
}

// Command prepares a command, which Run runs.
func (h *Handle) Command(argv ...string) *Command {
	return &Command{ProcessSpec: sandbox.ProcessSpec{Argv: argv}, h: h}
}

// Command is a command of a sandbox, as exec.Cmd is one of this machine.
type Command struct {
	sandbox.ProcessSpec
	Stdin          io.Reader // nil: none
	Stdout, Stderr io.Writer // nil: thrown away

	h *Handle
}

// ExitError is the error of a command that ended with another code than 0.
type ExitError struct{ sandbox.ExitStatus }

// Error says how it ended.
func (e *ExitError) Error() string {
	switch {
	case e.TimedOut:
		return "the command took too long"
	case e.OOM:
		return "the command was killed for memory"
	case e.Signal != "":
		return "the command was ended by " + e.Signal
	}
	return fmt.Sprintf("the command ended with exit code %d", e.Code)
}

// Run runs the command to its end. A code other than 0 is an *ExitError,
// for errors.As. When ctx ends the command is killed.
func (c *Command) Run(ctx context.Context) error {
	spec := c.ProcessSpec
	spec.Stdin = c.Stdin != nil
	p, err := c.h.c.Exec(context.WithoutCancel(ctx), string(c.h.ID), spec)
	if err != nil {
		return err
	}
	defer func() { _ = p.Close() }() // it has ended, or was killed
	stop := context.AfterFunc(ctx, func() {
		_ = p.Signal("SIGKILL") // its own timeout ends it otherwise
		_ = p.Close()
	})
	defer stop()
	if c.Stdin != nil {
		go func() {
			if _, err := io.Copy(stdinOf{p}, c.Stdin); err == nil {
				_ = p.CloseStdin() // it may have ended
			}
		}()
	}
	for {
		out, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return errors.Join(ctx.Err(), err)
		}
		to := c.Stdout
		if out.Stream == sandbox.Stderr {
			to = c.Stderr
		}
		if to == nil {
			continue
		}
		if _, err := to.Write(out.Data); err != nil {
			return fmt.Errorf("passing output of process %s on: %w", p.Process().ID, err)
		}
	}
	exit, ok := p.Exit()
	switch {
	case !ok:
		return errors.Join(ctx.Err(), sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the output of process %s ended before the process did", p.Process().ID))
	case exit.Code != 0:
		return errors.Join(ctx.Err(), &ExitError{exit})
	}
	return nil
}

// stdinOf makes standard input a writer.
type stdinOf struct{ sandbox.ProcessIO }

func (s stdinOf) Write(p []byte) (int, error) { return s.WriteStdin(p) }
