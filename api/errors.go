package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ErrInternal is the class of an error that has none in package sandbox: a
// fault of the daemon's own. Callers get a request id to look for in its log.
var ErrInternal = errors.New("internal")

// CodeInternal is the code of every error without a class.
const CodeInternal = "internal"

// table is the one place where error classes meet HTTP statuses (RFC 9110
// section 15, RFC 6585 for 429). It is read forwards by the server and
// backwards by the client, so no status stands twice.
var table = []struct {
	class  error
	status int
	code   string // of an error that wraps the class and brings no code
}{
	{sandbox.ErrInvalid, http.StatusBadRequest, "invalid_request"},
	{sandbox.ErrUnauthenticated, http.StatusUnauthorized, "unauthenticated"},
	{sandbox.ErrForbidden, http.StatusForbidden, "forbidden"},
	{sandbox.ErrNotFound, http.StatusNotFound, "not_found"},
	{sandbox.ErrConflict, http.StatusConflict, "conflict"},
	{sandbox.ErrTooLarge, http.StatusRequestEntityTooLarge, "too_large"},
	{sandbox.ErrExhausted, http.StatusTooManyRequests, "exhausted"},
	{ErrInternal, http.StatusInternalServerError, CodeInternal},
	{sandbox.ErrUnsupported, http.StatusNotImplemented, "unsupported"},
	{sandbox.ErrUnavailable, http.StatusServiceUnavailable, "unavailable"},
	{sandbox.ErrDeadline, http.StatusGatewayTimeout, "deadline_exceeded"},
}

// StatusOf returns the HTTP status of a class; 500 for one not in the table.
func StatusOf(class error) int {
	for _, row := range table {
		if row.class == class { //nolint:errorlint // classes are compared as values, wrapping is ClassOf's work
			return row.status
		}
	}
	return http.StatusInternalServerError
}

// ClassOf returns the class of an HTTP status. Statuses the server never
// sends (a proxy's) count as invalid when 4xx and as unavailable when 5xx.
func ClassOf(status int) error {
	for _, row := range table {
		if row.status == status {
			return row.class
		}
	}
	if status >= 400 && status < 500 {
		return sandbox.ErrInvalid
	}
	return sandbox.ErrUnavailable
}

// Problem is the body of every error response (RFC 9457).
type Problem struct {
	Type      string `json:"type" doc:"urn:sandboxd:problem: and the code."`
	Title     string `json:"title" doc:"The status in words."`
	Status    int    `json:"status" doc:"The HTTP status."`
	Detail    string `json:"detail" doc:"What went wrong with which object, and what to do next."`
	Code      string `json:"code" doc:"Stable word for programs."`
	Reason    string `json:"reason,omitempty" doc:"Of sandbox_ended and sandbox_stopped: the sandbox's end reason, where it has one."`
	RequestID string `json:"request_id,omitempty" doc:"Names this request in the daemon's log."`
}

// ProblemContentType is the content type of a Problem.
const ProblemContentType = "application/problem+json"

// NewProblem describes a problem of the given class.
func NewProblem(class error, code, detail, requestID string) *Problem {
	status := StatusOf(class)
	return &Problem{
		Type: "urn:sandboxd:problem:" + code, Title: http.StatusText(status), Status: status,
		Detail: detail, Code: code, RequestID: requestID,
	}
}

// ProblemOf turns an error into what the caller may see of it. An error
// without a class shows only the request id; the server logs the rest.
func ProblemOf(err error, requestID string) *Problem {
	if e, ok := errors.AsType[*sandbox.Error](err); ok && inTable(e.Class) {
		detail := err.Error() // with what was wrapped around it
		p := NewProblem(e.Class, e.Code, detail, requestID)
		p.Reason = string(e.Reason)
		return p
	}
	if class := sandbox.ClassOf(err); class != nil && inTable(class) {
		return NewProblem(class, codeOfClass(class), err.Error(), requestID)
	}
	switch big := (*http.MaxBytesError)(nil); {
	case errors.As(err, &big):
		return NewProblem(sandbox.ErrTooLarge, "body_too_large", fmt.Sprintf("request body: at most %d bytes", big.Limit), requestID)
	case errors.Is(err, context.DeadlineExceeded):
		return NewProblem(sandbox.ErrDeadline, "deadline_exceeded", "the request took too long: try again, or ask for less at once", requestID)
	case errors.Is(err, context.Canceled):
		return NewProblem(sandbox.ErrUnavailable, "cancelled", "the request was given up before it was done: try again", requestID)
	}
	return NewProblem(ErrInternal, CodeInternal,
		fmt.Sprintf("the daemon met an error of its own: look for request %s in its log", requestID), requestID)
}

func inTable(class error) bool {
	for _, row := range table {
		if row.class == class { //nolint:errorlint // see StatusOf
			return class != ErrInternal //nolint:errorlint // see StatusOf
		}
	}
	return false
}

// codeOfClass is the code of an error that wraps a class without one.
func codeOfClass(class error) string {
	for _, row := range table {
		if row.class == class { //nolint:errorlint // see StatusOf
			return row.code
		}
	}
	return CodeInternal
}

// Err turns a problem back into the error it was made of: an *sandbox.Error
// with the class the status stands for, the code, the detail, and the problem itself as the cause.
func (p *Problem) Err() error {
	code := p.Code
	if code == "" {
		code = codeOfClass(ClassOf(p.Status))
	}
	detail := p.Detail
	if detail == "" {
		detail = fmt.Sprintf("the server answered %d %s", p.Status, http.StatusText(p.Status))
	}
	return &sandbox.Error{Class: ClassOf(p.Status), Code: code, Detail: detail, Cause: p, Reason: sandbox.Reason(p.Reason)}
}

// Error makes a Problem an error as it stands, for the server's framework.
func (p *Problem) Error() string { return p.Detail }

// GetStatus returns the HTTP status.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType returns the content type of the body.
func (p *Problem) ContentType(string) string { return ProblemContentType }
