package e2b

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The Connect protocol, as much of it as the dialect needs: unary calls and
// server streams with the JSON codec over HTTP/1.1. The two services have
// eighteen methods and no schema of ours, so this file is shorter than the
// generated code a library would want.
//
//	unary    POST /pkg.Service/Method  application/json          {…}
//	         200 {…}, or a status and {"code":"not_found","message":"…"}
//	stream   POST /pkg.Service/Method  application/connect+json  one frame
//	         200 frames, the last with flag 2 and {} or {"error":{…}}
//
//	frame    ┌───────┬─────────────────┬─────────┐
//	         │ flags │ length          │ JSON    │
//	         │ 1 B   │ 4 B, big endian │ length  │
//	         └───────┴─────────────────┴─────────┘

const (
	flagCompressed = 1
	flagEnd        = 2
	frameHead      = 5
	// maxMessage bounds one request: input for a process comes whole.
	maxMessage = 8 << 20
	// frameWrite is how long a client may leave one frame unread before its
	// stream is given up. The process goes on.
	frameWrite = 5 * time.Minute
	// bodyPatience is how long a request's body may take.
	bodyPatience = 2 * time.Minute

	typeUnary  = "application/json"
	typeStream = "application/connect+json"
)

// code is a Connect error code.
type code string

// The codes in use, and the statuses unary calls answer them with.
const (
	codeInvalidArgument    code = "invalid_argument"
	codeDeadlineExceeded   code = "deadline_exceeded"
	codeNotFound           code = "not_found"
	codeAlreadyExists      code = "already_exists"
	codePermissionDenied   code = "permission_denied"
	codeResourceExhausted  code = "resource_exhausted"
	codeFailedPrecondition code = "failed_precondition"
	codeUnimplemented      code = "unimplemented"
	codeInternal           code = "internal"
	codeUnavailable        code = "unavailable"
	codeDataLoss           code = "data_loss"
	codeUnauthenticated    code = "unauthenticated"
)

var codeStatus = map[code]int{
	codeInvalidArgument: http.StatusBadRequest, codeDeadlineExceeded: http.StatusGatewayTimeout, codeNotFound: http.StatusNotFound,
	codeAlreadyExists: http.StatusConflict, codePermissionDenied: http.StatusForbidden, codeResourceExhausted: http.StatusTooManyRequests,
	codeFailedPrecondition: http.StatusBadRequest, codeUnimplemented: http.StatusNotImplemented, codeInternal: http.StatusInternalServerError,
	codeUnavailable: http.StatusServiceUnavailable, codeDataLoss: http.StatusInternalServerError, codeUnauthenticated: http.StatusUnauthorized,
}

// rpcError is an error as a client sees it.
type rpcError struct {
	Code    code   `json:"code"`
	Message string `json:"message,omitempty"`
}

func (e *rpcError) Error() string { return string(e.Code) + ": " + e.Message }

func rpcErrorf(c code, format string, args ...any) *rpcError {
	return &rpcError{Code: c, Message: fmt.Sprintf(format, args...)}
}

// codeOf translates an error of ours. Unavailable is kept for sandboxes that
// are gone or paused: clients take it for that.
func codeOf(err error) code {
	switch sandbox.CodeOf(err) {
	case "file_exists":
		return codeAlreadyExists
	case sandbox.CodeEnded, sandbox.CodeStopped, sandbox.CodeReset, "sandbox_not_running", "sandbox_paused", "sandbox_unreachable", "sandbox_not_found":
		return codeUnavailable
	}
	switch class := sandbox.ClassOf(err); {
	case class == nil:
		return codeInternal
	case errors.Is(class, sandbox.ErrInvalid):
		return codeInvalidArgument
	case errors.Is(class, sandbox.ErrForbidden):
		return codePermissionDenied
	case errors.Is(class, sandbox.ErrNotFound):
		return codeNotFound
	case errors.Is(class, sandbox.ErrConflict):
		return codeFailedPrecondition
	case errors.Is(class, sandbox.ErrExhausted), errors.Is(class, sandbox.ErrTooLarge):
		return codeResourceExhausted
	case errors.Is(class, sandbox.ErrUnsupported):
		return codeUnimplemented
	case errors.Is(class, sandbox.ErrDeadline):
		return codeDeadlineExceeded
	}
	return codeInternal
}

// asRPC makes any error one for a client. What has no class says nothing of
// its cause.
func asRPC(err error) *rpcError {
	if e, ok := errors.AsType[*rpcError](err); ok {
		return e
	}
	if sandbox.ClassOf(err) == nil {
		return rpcErrorf(codeInternal, "the daemon is in trouble: its log says more")
	}
	return &rpcError{Code: codeOf(err), Message: err.Error()}
}

// unary is one method with one answer.
type unary func(c *call, body []byte) (any, error)

// streaming is one method that answers with a stream. An error it returns
// ends the stream, with it; errAbort breaks the connection.
type streaming func(c *call, body []byte, out *stream) error

// errAbort ends a stream by breaking its connection: the sandbox is gone, and
// clients look at its health then.
var errAbort = errors.New("abort the connection")

// method makes a method of a function over its decoded request.
func method[T any](f func(c *call, req T) (any, error)) unary {
	return func(c *call, body []byte) (any, error) {
		req, err := decode[T](body)
		if err != nil {
			return nil, err
		}
		return f(c, req)
	}
}

// streamMethod is method for streams.
func streamMethod[T any](f func(c *call, req T, out *stream) error) streaming {
	return func(c *call, body []byte, out *stream) error {
		req, err := decode[T](body)
		if err != nil {
			return err
		}
		return f(c, req, out)
	}
}

// decode reads a message; unknown fields are ignored, an empty one is {}.
func decode[T any](body []byte) (T, error) {
	var req T
	if len(body) == 0 {
		return req, nil
	}
	if err := api.CheckUTF8(body); err != nil {
		return req, err
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return req, rpcErrorf(codeInvalidArgument, "the request is not the JSON of this method: %v", err)
	}
	return req, nil
}

// serveUnary answers one unary call.
func serveUnary(c *call, m unary) {
	if !contentType(c.r, typeUnary) {
		refuseType(c.w, typeUnary)
		return
	}
	body, err := readMessage(c)
	var reply any
	if err == nil {
		reply, err = m(c, body)
	}
	if err != nil {
		writeRPCError(c.w, asRPC(err))
		return
	}
	if _, done := reply.(answered); !done {
		answer(c.w, http.StatusOK, reply)
	}
}

// answered is the reply of a method that has written its answer.
type answered struct{}

// serveStream answers one streaming call.
func serveStream(c *call, m streaming) {
	if !contentType(c.r, typeStream) {
		refuseType(c.w, typeStream)
		return
	}
	body, err := readMessage(c)
	if err == nil {
		body, err = unwrap(body)
	}
	c.w.Header().Set("Content-Type", typeStream)
	out := &stream{w: c.w, rc: http.NewResponseController(c.w), last: time.Now()}
	if err == nil {
		err = m(c, body, out)
	}
	if errors.Is(err, errAbort) {
		panic(http.ErrAbortHandler) // what net/http breaks a connection by
	}
	if cause := context.Cause(c.ctx()); errors.Is(cause, errCut) {
		err = cause
	}
	out.end(err)
}

func contentType(r *http.Request, want string) bool {
	t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && t == want
}

func refuseType(w http.ResponseWriter, want string) {
	w.Header().Set("Accept-Post", want)
	w.WriteHeader(http.StatusUnsupportedMediaType)
}

// readMessage reads the whole body, up to the bound and not for ever.
func readMessage(c *call) ([]byte, error) {
	if enc := c.r.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
		return nil, rpcErrorf(codeUnimplemented, "content encoding %.20q: send it plain", enc)
	}
	_ = http.NewResponseController(c.w).SetReadDeadline(time.Now().Add(bodyPatience))
	body, err := io.ReadAll(io.LimitReader(c.r.Body, maxMessage+frameHead+1))
	switch {
	case err != nil:
		return nil, rpcErrorf(codeInvalidArgument, "reading the request: %v", err)
	case len(body) > maxMessage+frameHead:
		return nil, rpcErrorf(codeResourceExhausted, "a request has at most %d bytes", maxMessage)
	}
	_ = http.NewResponseController(c.w).SetReadDeadline(time.Time{})
	return body, nil
}

// unwrap takes the one message out of a stream request's body.
func unwrap(body []byte) ([]byte, error) {
	if len(body) < frameHead {
		return nil, rpcErrorf(codeInvalidArgument, "a stream begins with a frame of at least %d bytes", frameHead)
	}
	flags, n := body[0], int64(binary.BigEndian.Uint32(body[1:]))
	switch {
	case flags&flagCompressed != 0:
		return nil, rpcErrorf(codeUnimplemented, "the frame is compressed: send it plain")
	case flags != 0:
		return nil, rpcErrorf(codeInvalidArgument, "frame with flags %d in place of the request", flags)
	case n != int64(len(body)-frameHead):
		return nil, rpcErrorf(codeInvalidArgument, "the frame announces %d bytes and brings %d", n, len(body)-frameHead)
	}
	return body[frameHead:], nil
}

// deadline is what the client gave the call; false if nothing.
func deadline(r *http.Request) (time.Duration, bool, error) {
	text := r.Header.Get("Connect-Timeout-Ms")
	if text == "" {
		return 0, false, nil
	}
	ms, err := strconv.ParseInt(text, 10, 64)
	const digits = 10 // of the protocol's grammar
	if err != nil || ms < 0 || len(text) > digits {
		return 0, false, rpcErrorf(codeInvalidArgument, "Connect-Timeout-Ms %.20q: use at most %d digits", text, digits)
	}
	return time.Duration(ms) * time.Millisecond, ms > 0, nil
}

// keepaliveEvery is how often the client wants to hear something.
func keepaliveEvery(r *http.Request) time.Duration {
	const usual, least, most = 90 * time.Second, time.Second, 10 * time.Minute
	n, err := strconv.ParseInt(r.Header.Get("Keepalive-Ping-Interval"), 10, 32)
	if err != nil || n <= 0 {
		return usual
	}
	return min(max(time.Duration(n)*time.Second, least), most)
}

// stream sends messages. Its methods may be called from several goroutines.
type stream struct {
	rc *http.ResponseController

	mu    sync.Mutex
	w     http.ResponseWriter
	buf   []byte
	last  time.Time // of the last message
	ended bool
}

// errStreamEnded is returned to a keepalive that comes too late.
var errStreamEnded = errors.New("the stream has ended")

// send sends one message, at once.
func (s *stream) send(msg any) error {
	b, err := json.Marshal(msg)
	if err != nil {
		return fmt.Errorf("encoding a message: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.frame(0, func(p []byte) []byte { return append(p, b...) })
}

// frame sends what fill appends as one frame. The caller holds s.mu.
func (s *stream) frame(flags byte, fill func([]byte) []byte) error {
	if s.ended {
		return errStreamEnded
	}
	p := fill(append(s.buf[:0], flags, 0, 0, 0, 0))
	binary.BigEndian.PutUint32(p[1:], uint32(len(p)-frameHead))
	if cap(p) <= 1<<20 {
		s.buf = p[:0]
	}
	s.last = time.Now()
	_ = s.rc.SetWriteDeadline(s.last.Add(frameWrite))
	if _, err := s.w.Write(p); err != nil {
		return err
	}
	return s.rc.Flush()
}

// end sends the last frame, once.
func (s *stream) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := []byte("{}")
	if err != nil {
		var merr error
		b, merr = json.Marshal(struct {
			Error *rpcError `json:"error"`
		}{asRPC(err)})
		if merr != nil {
			b = []byte(`{"error":{"code":"internal"}}`)
		}
	}
	_ = s.frame(flagEnd, func(p []byte) []byte { return append(p, b...) })
	s.ended = true
	_ = s.rc.SetWriteDeadline(time.Time{})
}

// keepAlive sends msg whenever nothing was sent for as long as the client
// wants, until ctx ends.
func (s *stream) keepAlive(ctx context.Context, every time.Duration, msg any) {
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		s.mu.Lock()
		quiet := time.Since(s.last)
		s.mu.Unlock()
		if quiet >= every {
			if s.send(msg) != nil {
				return
			}
			quiet = 0
		}
		timer.Reset(every - quiet)
	}
}

func writeRPCError(w http.ResponseWriter, e *rpcError) {
	status := codeStatus[e.Code]
	if status == 0 {
		status = http.StatusInternalServerError
	}
	answer(w, status, e)
}

// The forms of proto3 JSON that encoding/json does not read by itself.

// number is an integer, written as such or as a string.
type number int64

// UnmarshalJSON reads both forms.
func (n *number) UnmarshalJSON(b []byte) error {
	text := strings.Trim(string(b), `"`)
	if text == "null" || text == "" {
		return nil
	}
	v, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		// 1e3 and 7.0 are integers, too.
		f, ferr := strconv.ParseFloat(text, 64)
		if ferr != nil || f != float64(int64(f)) || f > 1<<53 || f < -1<<53 {
			return fmt.Errorf("%.40q is no integer", text)
		}
		v = int64(f)
	}
	*n = number(v)
	return nil
}

// octets are bytes in base64, of either alphabet, padded or not.
type octets []byte

// UnmarshalJSON reads all four forms.
func (o *octets) UnmarshalJSON(b []byte) error {
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	text = strings.TrimRight(strings.NewReplacer("-", "+", "_", "/").Replace(text), "=")
	v, err := base64.RawStdEncoding.DecodeString(text)
	if err != nil {
		return err
	}
	*o = v
	return nil
}

// String writes it in digits.
func (n number) String() string { return strconv.FormatInt(int64(n), 10) }
