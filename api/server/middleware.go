package server

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// request is what the handlers know of the request besides its fields.
type request struct {
	id        string
	operation string // empty until it is known
	code      string // of the problem that was found last
	note      *note  // what the audit is still to say of it
	w         http.ResponseWriter
	r         *http.Request
}

type requestKey struct{}

// requestOf returns the request a context belongs to; an empty one for a
// context that did not come through the middleware.
func requestOf(ctx context.Context) *request {
	if r, ok := ctx.Value(requestKey{}).(*request); ok {
		return r
	}
	return &request{}
}

// RequestID returns what the answer calls the request a context belongs to;
// empty for one that came through no server.
func RequestID(ctx context.Context) string { return requestOf(ctx).id }

// bodyRead lifts the deadline on reading the body.
func (r *request) bodyRead() {
	if r.w != nil {
		// Recorders of tests have no deadline, and nothing hangs on it.
		_ = http.NewResponseController(r.w).SetReadDeadline(time.Time{})
	}
}

// middleware names each request, logs it, and keeps a panic from being more
// than one failed request.
func (s *server) middleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req := &request{id: requestID(r.Header.Get(api.HeaderRequestID))}
		rec := &recorder{ResponseWriter: w, req: req, begin: s.holdBack}
		if s.audit != nil {
			rec.begin = func(req *request, status int) {
				s.answered(req, status)
				s.holdBack(req, status)
			}
			defer func() { s.answered(req, rec.status) }() // where no answer came
		}
		req.w = rec
		ctx := r.Context()
		if s.watcher != nil {
			ctx = s.watcher.Begin(ctx, r, req.id)
			defer func() { s.watcher.End(ctx, req.operation, rec.status) }()
		}
		ctx, end := sandbox.WithEnd(ctx)
		defer end()
		req.r = r.WithContext(context.WithValue(ctx, requestKey{}, req))
		w.Header().Set(api.HeaderRequestID, req.id)
		begin := time.Now()
		defer func() {
			p := recover()
			if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // net/http compares the panic value so, too
				s.log.ErrorContext(r.Context(), "panic in a handler", "request", req.id, "method", r.Method,
					"path", r.URL.Path, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			}
			if s.log.Enabled(r.Context(), slog.LevelDebug) { // spares every request the arguments
				s.log.DebugContext(r.Context(), "request", "request", req.id, "method", r.Method, "path", r.URL.Path,
					"status", rec.status, "actor", actorOf(r.Context()), "took", time.Since(begin))
			}
			if p == nil {
				return
			}
			if rec.status != 0 {
				panic(http.ErrAbortHandler) // the answer has begun: only a broken connection can tell
			}
			writeProblem(rec, api.ProblemOf(fmt.Errorf("panic: %v", p), req.id))
		}()
		if q, err := url.QueryUnescape(r.URL.RawQuery); err != nil || !utf8.ValidString(q) {
			writeProblem(rec, s.problemOf(req.r.Context(), sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", "the query is not UTF-8 or wrongly escaped: %.200q", r.URL.RawQuery)))
			return
		}
		next.ServeHTTP(rec, req.r)
	})
}

// requestID keeps a caller's own id when it is short and plain.
func requestID(given string) string {
	if given != "" && len(given) <= 64 && strings.Trim(given, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") == "" {
		return given
	}
	return "rq" + strings.ToLower(rand.Text()[:16])
}

// recorder remembers whether an answer has begun. It deliberately hides
// io.ReaderFrom: copies go through our own, larger buffers.
type recorder struct {
	http.ResponseWriter
	req    *request
	begin  func(req *request, status int) // called as the answer begins; may be nil
	status int
}

// begins notes the status of an answer, before its first byte.
func (r *recorder) begins(status int) {
	if r.status != 0 {
		return
	}
	r.status = status
	if r.begin != nil {
		r.begin(r.req, status)
	}
}

func (r *recorder) WriteHeader(status int) {
	if status >= 200 {
		r.begins(status)
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(b []byte) (int, error) {
	r.begins(http.StatusOK)
	return r.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController find deadlines and flushing.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// Hijack notes that the connection is no longer HTTP's.
func (r *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := http.NewResponseController(r.ResponseWriter).Hijack()
	if err == nil {
		r.begins(http.StatusSwitchingProtocols)
	}
	return c, rw, err
}

// problem turns a handler's error into what the caller sees, and logs what
// the caller must not see.
func (s *server) problem(ctx context.Context, err error) error {
	if _, ok := errors.AsType[huma.StatusError](err); ok {
		return err
	}
	p := s.problemOf(ctx, err)
	if p.Status == http.StatusTooManyRequests || p.Status == http.StatusServiceUnavailable {
		return huma.ErrorWithHeaders(p, http.Header{"Retry-After": {strconv.Itoa(max(1, retryAfter(err)))}})
	}
	return p
}

// problemOf describes what ended a request: of one that was cut, why.
func (s *server) problemOf(ctx context.Context, err error) *api.Problem {
	if why := cutFor(ctx); why != nil {
		err = why
	}
	req := requestOf(ctx)
	p := api.ProblemOf(err, req.id)
	req.code = p.Code
	if p.Code == api.CodeInternal {
		attrs := []any{"request", req.id, "error", err}
		if req.r != nil {
			attrs = append(attrs, "method", req.r.Method, "path", req.r.URL.Path)
		}
		s.log.Log(ctx, slog.LevelError, "request failed", attrs...)
	}
	return p
}

// retryAfter is how many seconds an error says it lasts; 0 where it does not.
func retryAfter(err error) int {
	if later, ok := errors.AsType[*access.Later](err); ok {
		return later.Seconds()
	}
	return 0
}

// writeProblem writes a problem outside the framework.
func writeProblem(w http.ResponseWriter, p *api.Problem) {
	if rec, ok := w.(*recorder); ok {
		rec.req.code = p.Code
	}
	w.Header().Set("Content-Type", api.ProblemContentType)
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p) // the client may be gone
}
