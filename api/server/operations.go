package server

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The kinds of operations.
const (
	operationPull  = "pull-image"
	operationPush  = "push-image"
	operationBuild = "build-image"
)

// Bounds of what is remembered of an owner's operations that have ended, and of
// those an owner may have under way in the background.
const (
	operationsKept   = 250 // of one owner
	operationsKeptOf = 24 * time.Hour
	operationsAtOnce = 32
)

// What operations are cancelled with: by a request, or because the right to
// begin them is gone.
var (
	errOperationCancelled = errors.New("the operation was cancelled")
	errRightGone          = errors.New("the key was revoked or its owner's rights were changed")
)

// operation is one that the board knows.
type operation struct {
	cancel context.CancelCauseFunc
	ended  chan struct{} // closed when it has ended

	mu   sync.Mutex
	seen api.Operation
}

// board knows the operations of this daemon, oldest first.
type board struct {
	mu  sync.Mutex
	all []*operation
}

// PreferInput is the header that asks for an answer at once.
type PreferInput struct {
	Prefer string `header:"Prefer" maxLength:"200" doc:"respond-async: answer 202 with the operation at once, and go on without the caller (RFC 7240)."`
}

func (in PreferInput) async() bool {
	for word := range strings.SplitSeq(in.Prefer, ",") {
		if strings.EqualFold(strings.TrimSpace(word), api.PreferAsync) {
			return true
		}
	}
	return false
}

// OperationTarget is the path of one operation.
type OperationTarget struct {
	ID string `path:"operation" maxLength:"14" pattern:"^op[a-z0-9]{12}$" patternDescription:"the id of an operation"`
}

type (
	operationInput struct {
		OperationTarget
		Wait int `query:"wait_seconds" minimum:"0" maximum:"60" doc:"Answer when it has ended, or after this long."`
	}
	operationsInput struct {
		PageInput
		Status string `query:"status" enum:"running,succeeded,failed,cancelled" doc:"Only these."`
	}
)

func (s *server) operationRoutes() {
	register(s, huma.Operation{
		OperationID: "list-operations", Method: http.MethodGet, Path: "/v1/operations", Tags: []string{"operations"},
		Summary: "List work that takes long: what is under way, and what ended in the last day",
	}, func(ctx context.Context, in *operationsInput) (*result[api.OperationList], error) {
		items, next, err := pageOf(in.PageInput, s.ops.list(ctx, api.OperationStatus(in.Status)), func(o api.Operation) string { return o.ID })
		return wrap(api.OperationList{Items: items, Next: next}, err)
	})
	register(s, huma.Operation{
		OperationID: "get-operation", Method: http.MethodGet, Path: "/v1/operations/{operation}", Tags: []string{"operations"},
		Summary: "One operation: how far it is, and what came of it",
	}, func(ctx context.Context, in *operationInput) (*result[api.Operation], error) {
		o, err := s.ops.find(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		if err := o.wait(ctx, time.Duration(in.Wait)*time.Second); err != nil {
			return nil, err
		}
		return wrap(o.now(), nil)
	})
	register(s, huma.Operation{
		OperationID: "cancel-operation", Method: http.MethodDelete, Path: "/v1/operations/{operation}", Tags: []string{"operations"},
		Summary: "Cancel an operation; the answer has how it ended. One that has ended stays as it is",
	}, func(ctx context.Context, in *OperationTarget) (*result[api.Operation], error) {
		o, err := s.ops.find(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		o.cancel(errOperationCancelled)
		if err := o.wait(ctx, api.MaxOperationWait*time.Second); err != nil {
			return nil, err
		}
		return wrap(o.now(), nil)
	})
}

// now returns the operation as it is.
func (o *operation) now() api.Operation {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.seen
}

// wait returns when the operation has ended, or after a while.
func (o *operation) wait(ctx context.Context, most time.Duration) error {
	t := time.NewTimer(most)
	defer t.Stop()
	select {
	case <-o.ended:
	case <-t.C:
	case <-draining(ctx):
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// tell notes how far it is.
func (o *operation) tell(progress any) {
	b, err := json.Marshal(progress)
	if err != nil {
		return // our own types; the next one tells more
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.seen.Ended() {
		o.seen.Progress = b
	}
}

// begin notes an operation, whose work takes the context that it returns.
func (b *board) begin(ctx context.Context, kind, subject string, background bool) (context.Context, *operation, error) {
	owner := actorOf(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	running, kept := 0, 0 // of the owner
	b.all = slices.DeleteFunc(b.all, func(o *operation) bool {
		seen := o.now()
		if seen.Ended() && time.Since(*seen.EndedAt) > operationsKeptOf {
			return true
		}
		if seen.Owner == owner {
			kept++
		}
		if !seen.Ended() && seen.Owner == owner {
			running++
		}
		return false
	})
	if background && running >= operationsAtOnce {
		return nil, nil, sandbox.Errorf(sandbox.ErrExhausted, "too_many_operations",
			"%d operations are under way for %s: wait for one, or cancel one (GET /v1/operations)", running, owner)
	}
	// One owner's pushes out that owner's: a flood erases nobody else's.
	if excess := kept + 1 - operationsKept; excess > 0 {
		b.all = slices.DeleteFunc(b.all, func(o *operation) bool {
			if seen := o.now(); excess > 0 && seen.Owner == owner && seen.Ended() {
				excess--
				return true
			}
			return false
		})
	}
	ctx, cancel := context.WithCancelCause(ctx)
	o := &operation{cancel: cancel, ended: make(chan struct{}), seen: api.Operation{
		ID: "op" + strings.ToLower(rand.Text()[:12]), Kind: kind, Subject: subject, Owner: owner,
		Status: api.OperationRunning, CreatedAt: time.Now().UTC(),
	}}
	b.all = append(b.all, o)
	return ctx, o, nil
}

// find returns an operation that exists for the caller.
func (b *board) find(ctx context.Context, id string) (*operation, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, o := range b.all {
		if seen := o.now(); seen.ID == id && sees(ctx, seen.Owner) {
			return o, nil
		}
	}
	return nil, sandbox.Errorf(sandbox.ErrNotFound, "operation_not_found",
		"no operation %s: operations are forgotten a day after their end, and with a restart of the daemon; look whether its image is there", id)
}

func (b *board) list(ctx context.Context, status api.OperationStatus) (out []api.Operation) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, o := range slices.Backward(b.all) {
		if seen := o.now(); sees(ctx, seen.Owner) && (status == "" || status == seen.Status) {
			out = append(out, seen)
		}
	}
	return out
}

// sees reports whether an owner's operations exist for the caller.
func sees(ctx context.Context, owner string) bool {
	c, ok := access.Of(ctx)
	return !ok || c.Sees(owner)
}

// end notes what came of an operation, and returns what to answer.
func (s *server) end(ctx context.Context, o *operation, v any, err error) error {
	var result json.RawMessage
	if err == nil {
		result, err = json.Marshal(v)
	} else {
		switch context.Cause(ctx) {
		case errOperationCancelled: //nolint:errorlint // the very values that cancel was given
			err = sandbox.Errorf(sandbox.ErrConflict, "operation_cancelled", "operation %s was cancelled before its end", o.now().ID)
		case errRightGone:
			err = sandbox.Errorf(sandbox.ErrConflict, "operation_cancelled", "operation %s was cancelled before its end: %w", o.now().ID, errRightGone)
		default:
			if c, known := access.Of(ctx); known && s.office != nil {
				s.office.HoldBack(ctx, c) // it keeps its place until then
			}
		}
	}
	now := time.Now().UTC()
	o.mu.Lock()
	o.seen.EndedAt, o.seen.Result = &now, result
	switch {
	case err == nil:
		o.seen.Status = api.OperationSucceeded
	case sandbox.CodeOf(err) == "operation_cancelled":
		o.seen.Status = api.OperationCancelled
	default:
		o.seen.Status, o.seen.Problem = api.OperationFailed, s.problemOf(ctx, err)
	}
	o.mu.Unlock()
	close(o.ended)
	o.cancel(nil)
	return err
}

// operate does work whose progress others can see, for as long as ctx lasts.
func operate[T, P any](ctx context.Context, s *server, kind, subject string, report func(P), work func(context.Context, func(P)) (T, error)) (v T, err error) {
	ctx, o, err := s.ops.begin(ctx, kind, subject, false)
	if err != nil {
		return v, err
	}
	defer func() {
		if p := recover(); p != nil {
			_ = s.end(ctx, o, nil, fmt.Errorf("panic: %v", p))
			panic(p)
		}
	}()
	v, err = work(ctx, func(p P) {
		o.tell(p)
		if report != nil {
			report(p)
		}
	})
	return v, s.end(ctx, o, v, err)
}

// background has work go on by itself and answers with the operation. Where the
// work needs the request, it returns when work has told something or ended: its
// first word is that it needs it no more.
func background[T, P any](ctx context.Context, s *server, kind, subject string, needsRequest bool, work func(context.Context, func(P)) (T, error)) (*huma.StreamResponse, error) {
	l, err := streaming(ctx)
	if err != nil {
		return nil, err
	}
	request := ctx
	ctx, o, err := s.ops.begin(context.WithoutCancel(ctx), kind, subject, true)
	if err != nil {
		l.end()
		return nil, err
	}
	l.onDrain(func() { o.cancel(context.Canceled) })
	release := func() {}
	if c, ok := access.Of(ctx); ok && s.office != nil {
		release = s.office.Hold(c, func(error) { o.cancel(errRightGone) })
	}
	told := make(chan struct{})
	go func() {
		defer l.end()
		defer release()
		var v T
		err := errors.New("the work ended with a panic") // unless it returns
		first := sync.OnceFunc(func() { close(told) })
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("panic: %v", p)
			}
			_ = s.end(ctx, o, v, err) // the operation has it
			first()
		}()
		v, err = work(ctx, func(p P) {
			o.tell(p)
			first()
		})
	}()
	if needsRequest {
		select {
		case <-told:
		case <-request.Done():
			o.cancel(context.Canceled)
			<-told // it must not read from a request that has ended
		}
	}
	seen := o.now()
	if needsRequest && seen.Status == api.OperationFailed && seen.Progress == nil {
		return nil, seen.Problem // of the request
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		hc.SetHeader("Content-Type", "application/json")
		hc.SetHeader("Location", "/v1/operations/"+seen.ID)
		hc.SetHeader("Preference-Applied", api.PreferAsync)
		hc.SetStatus(http.StatusAccepted)
		_ = json.NewEncoder(hc.BodyWriter()).Encode(seen) // the client may be gone
	}}, nil
}

// accepted documents the answer of what goes on by itself.
func (s *server) accepted(all map[string]*huma.Response) map[string]*huma.Response {
	all["202"] = &huma.Response{
		Description: "With Prefer: respond-async: the operation, which Location names, too",
		Content:     map[string]*huma.MediaType{"application/json": {Schema: s.schemaOf(api.Operation{}, "Operation")}},
	}
	return all
}
