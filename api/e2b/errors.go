package e2b

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// failure is the body of every error response of the control plane.
type failure struct {
	Code      int    `json:"code"`
	Message   string `json:"message"`
	ErrorCode string `json:"error_code,omitempty"`
}

// failureOf turns an error into what the caller may see of it.
func failureOf(err error) failure {
	p := api.ProblemOf(err, "")
	f := failure{Code: p.Status, Message: p.Detail, ErrorCode: p.Code}
	if p.Code == api.CodeInternal {
		f.Message = "the daemon met an error of its own: look in its log"
	}
	return f
}

// fail answers with an error.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	f := failureOf(err)
	if f.ErrorCode == api.CodeInternal {
		s.log.Error("a request of the E2B dialect failed", "method", r.Method, "path", r.URL.Path, "err", err)
	}
	if f.Code == http.StatusTooManyRequests || f.Code == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", strconv.Itoa(1))
	}
	answer(w, f.Code, f)
}

// answer writes a body as JSON.
func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		slog.Debug("write an answer of the E2B dialect", "err", err) // the client is gone
	}
}

// maxBody bounds what a request of the control plane brings.
const maxBody = 1 << 20

// read decodes a request's body. None leaves into as it is; fields that are
// not known here are left out, as clients are newer than servers.
func read(w http.ResponseWriter, r *http.Request, into any) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		err = api.CheckUTF8(b)
	}
	if err == nil {
		err = json.NewDecoder(bytes.NewReader(b)).Decode(into)
	}
	var big *http.MaxBytesError
	switch {
	case err == nil, errors.Is(err, io.EOF):
		return nil
	case errors.As(err, &big):
		return sandbox.Errorf(sandbox.ErrTooLarge, "body_too_large", "the body has more than %d bytes", maxBody)
	}
	return sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", "the body is not what this call takes: %w", err)
}
