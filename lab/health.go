package lab

import (
	"bytes"
	"context"
	"errors"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

func newReader(b []byte) io.Reader { return bytes.NewReader(b) }

// health runs an active agent's check when it is due. Too many failures in a
// row count as its end.
func (k *keeper) health(ctx context.Context, a project.Agent, id sandbox.ID) (time.Duration, error) {
	h := a.Spec.Health
	if h == nil {
		return lookEvery, nil
	}
	if d := h.Every() - time.Since(k.checked); d > 0 {
		return d, nil
	}
	k.checked = time.Now()
	err := k.check(ctx, a, *h, id)
	if ctx.Err() != nil {
		return 0, err
	}
	switch {
	case err == nil && a.Unhealthy == 0 && !a.HealthyAt.Before(a.StartedAt):
	case err == nil:
		return h.Every(), k.change(ctx, a, "", func(a *project.Agent) { a.Unhealthy, a.HealthyAt = 0, time.Now().UTC() })
	case time.Since(a.StartedAt) < h.GraceTime():
	case a.Unhealthy+1 < h.Limit():
		return h.Every(), k.change(ctx, a, "", func(a *project.Agent) { a.Unhealthy++ })
	default:
		return 0, k.unwell(ctx, a, id, err)
	}
	return h.Every(), nil
}

// unwell ends an agent whose check failed too often: it is started again as
// after any end.
func (k *keeper) unwell(ctx context.Context, a project.Agent, id sandbox.ID, cause error) error {
	if err := k.s.update(ctx, func(t project.Tx) error { return tellAgent(t, a, eventUnhealthy, "daemon") }); err != nil {
		return err
	}
	err := k.s.world.Sandboxes.SignalProcess(ctx, string(id), a.Process, "SIGKILL")
	if err != nil && !is(err, sandbox.ErrNotFound) && !is(err, sandbox.ErrConflict) {
		return err
	}
	return k.fell(ctx, a, false, "its health check failed: "+cause.Error())
}

// check runs the command of a health check once.
func (k *keeper) check(ctx context.Context, a project.Agent, h project.HealthCheck, id sandbox.ID) error {
	ctx, cancel := context.WithTimeout(ctx, h.Within()+sandbox.TerminationGrace+time.Second)
	defer cancel()
	spec := sandbox.ProcessSpec{
		Argv: h.Command, User: a.Spec.User, WorkDir: a.ProcessSpec().WorkDir, Tag: "health", OutputBytes: 4 << 10,
		TimeoutSeconds: h.Within().Seconds(),
	}
	p, err := k.s.world.Sandboxes.Exec(ctx, string(id), spec)
	if err != nil {
		return err
	}
	defer p.Close()
	stop := context.AfterFunc(ctx, func() { _ = p.Close() }) // wakes Next
	defer stop()
	for {
		if _, err := p.Next(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
	}
	x, ok := p.Exit()
	switch {
	case !ok:
		return errors.New("it did not end")
	case x.TimedOut:
		return errors.New("it took too long")
	case x.Code != 0:
		return errors.New(exitWords(x))
	}
	return nil
}
