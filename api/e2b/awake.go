package e2b

import (
	"context"
	"net"

	"github.com/sandboxd/sandboxd/sandbox"
)

// awake is the manager for requests that were let in while their sandbox ran.
// Where its deadline put it to rest since, it is woken as by a request that
// comes now, and asked once more. Signals wake nothing: the daemon sends some.
type awake struct {
	Manager
	s *Server
}

// DialPort implements Manager.
func (a awake) DialPort(ctx context.Context, ref string, port int) (net.Conn, error) {
	return again(ctx, a.s, ref, func() (net.Conn, error) { return a.Manager.DialPort(ctx, ref, port) })
}

// Exec implements Manager.
func (a awake) Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	return again(ctx, a.s, ref, func() (sandbox.ProcessIO, error) { return a.Manager.Exec(ctx, ref, spec) })
}

// Attach implements Manager.
func (a awake) Attach(ctx context.Context, ref string, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error) {
	return again(ctx, a.s, ref, func() (sandbox.ProcessIO, error) { return a.Manager.Attach(ctx, ref, id, offset) })
}

// Files implements Manager.
func (a awake) Files(ctx context.Context, ref string) (sandbox.Files, error) {
	return again(ctx, a.s, ref, func() (sandbox.Files, error) { return a.Manager.Files(ctx, ref) })
}

// again does f, and once more where the sandbox rested and is woken.
func again[T any](ctx context.Context, s *Server, ref string, f func() (T, error)) (T, error) {
	v, err := f()
	switch sandbox.CodeOf(err) {
	case "sandbox_paused", "sandbox_not_running":
	default:
		return v, err
	}
	if to, ok := ctx.Value(targetKey{}).(target); ok && to.held.Err() != nil { // who is cut wakes nothing
		return v, err
	}
	box, rests := s.lookUp(ctx, ref)
	if rests == nil {
		_, rests = s.rouse(ctx, box)
	}
	if rests != nil {
		return v, err
	}
	return f()
}
