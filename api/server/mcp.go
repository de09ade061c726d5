package server

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/mcp"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of a message to the tools.
const (
	mcpPath        = "/mcp"
	mcpBodyTimeout = 30 * time.Second
	maxMCPBody     = 4 << 20
)

// mcp serves the tools of agents as streamable HTTP. They call the same
// manager as every route, with the request's context.
func (s *server) mcp() http.Handler {
	tools := mcp.Handler(mcp.Config{Daemon: local{s.m}, Version: s.version, Problem: s.problemOf})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l, err := streaming(r.Context())
		if err != nil {
			writeProblem(w, s.problemOf(r.Context(), err))
			return
		}
		defer l.end()
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		l.onDrain(cancel)
		rc := http.NewResponseController(w)
		_ = rc.SetReadDeadline(time.Now().Add(mcpBodyTimeout)) // a recorder of tests has none
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxMCPBody))
		_ = rc.SetReadDeadline(time.Time{})
		if err != nil {
			p := s.problemOf(ctx, err)
			if p.Code == api.CodeInternal { // the client broke off, or was too slow
				p = api.NewProblem(sandbox.ErrDeadline, "body_timeout", "the body did not come in time", requestOf(ctx).id)
			}
			writeProblem(w, p)
			return
		}
		if tool, calls := toolOf(body); calls {
			s.audited(ctx, servedMCP, tool, false)
			if s.audit != nil {
				if err := s.audit.Ready(); err != nil {
					writeProblem(w, s.problemOf(ctx, err))
					return
				}
			}
		}
		r = r.WithContext(ctx)
		r.Body = io.NopCloser(bytes.NewReader(body))
		tools.ServeHTTP(w, r)
	})
}

// local is the manager as the tools see it: who asks is in the context.
type local struct{ Manager }

func (l local) Create(ctx context.Context, spec sandbox.Spec, key string) (sandbox.Sandbox, error) {
	return l.Manager.Create(ctx, sandbox.CreateRequest{Spec: spec, IdempotencyKey: key, Actor: actorOf(ctx)})
}

func (l local) Start(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return l.Manager.Start(ctx, ref, actorOf(ctx))
}

func (l local) Stop(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return l.Manager.Stop(ctx, ref, actorOf(ctx))
}

func (l local) Remove(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return l.Manager.Remove(ctx, ref, actorOf(ctx))
}

func (l local) LastOutput(ctx context.Context, ref string) ([]byte, error) {
	return l.KeptOutput(ctx, ref, "")
}

func (l local) Snapshot(ctx context.Context, ref string, req sandbox.SnapshotRequest) (sandbox.Snapshot, error) {
	req.Actor = actorOf(ctx)
	return l.Manager.Snapshot(ctx, ref, req)
}

func (l local) Fork(ctx context.Context, ref string, req sandbox.ForkRequest) ([]sandbox.Fork, error) {
	req.Actor = actorOf(ctx)
	return l.Manager.Fork(ctx, ref, req)
}

func (l local) Rollback(ctx context.Context, ref, snapshot string) (sandbox.Sandbox, error) {
	return l.Manager.Rollback(ctx, ref, snapshot, actorOf(ctx))
}

func (l local) Statement(ctx context.Context, q cost.StatementQuery) (cost.Statement, error) {
	return l.Manager.Statement(ctx, q)
}
