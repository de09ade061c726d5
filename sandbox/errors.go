package sandbox

import (
	"errors"
	"fmt"
)

// The error classes. Every error that reaches a caller of the daemon wraps
// exactly one of them; the API maps each to one HTTP status, both ways.
var (
	ErrInvalid   = errors.New("invalid")   // the request can never work as it is
	ErrNotFound  = errors.New("not found") // no such object, or not yours
	ErrConflict  = errors.New("conflict")  // the object's state or name forbids it
	ErrExhausted = errors.New("exhausted") // a quota or pool has nothing left; later it may
	ErrForbidden = errors.New("forbidden") // the caller may not
	// ErrUnauthenticated: nobody knows who calls.
	ErrUnauthenticated = errors.New("unauthenticated")
	ErrUnsupported     = errors.New("unsupported")       // this host or build cannot
	ErrUnavailable     = errors.New("unavailable")       // the other side does not answer; try again
	ErrTooLarge        = errors.New("too large")         // over a fixed bound
	ErrDeadline        = errors.New("deadline exceeded") // did not end in the time given
)

// Error is an error with a class, a stable code for programs and a message
// for people that says what to do next.
type Error struct {
	Class  error  // one of the classes above
	Code   string // stable, snake_case: part of the API
	Detail string // for people
	Cause  error  // may be nil; for errors.Is and the log
	Reason Reason // of a sandbox that ended or stopped; part of the API
}

// Error returns the message for people.
func (e *Error) Error() string { return e.Detail }

// Unwrap returns the class and the cause.
func (e *Error) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Class}
	}
	return []error{e.Class, e.Cause}
}

// Errorf makes an *Error. A %w operand's text becomes part of the message
// and the operand itself the cause.
func Errorf(class error, code, format string, args ...any) error {
	e := fmt.Errorf(format, args...)
	return &Error{Class: class, Code: code, Detail: e.Error(), Cause: errors.Unwrap(e)}
}

// The codes of errors about a sandbox that no longer runs what it ran. Each is
// ErrConflict; the first two carry the sandbox's Reason.
const (
	CodeEnded   = "sandbox_ended"   // gone: its record stays
	CodeStopped = "sandbox_stopped" // no process, filesystem kept
	CodeReset   = "sandbox_reset"   // a reset, rollback or undo killed its processes
)

// CodeKeyGone is the code of a repeated create whose sandbox has ended: a key
// means one sandbox for ever. It carries the sandbox's Reason.
const CodeKeyGone = "idempotency_gone"

// ReasonOf returns why the sandbox that err is about ended or stopped.
func ReasonOf(err error) Reason {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Reason
	}
	return ReasonNone
}

// CodeOf returns the stable code of err, or "internal".
func CodeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return "internal"
}

// ClassOf returns the class err wraps, or nil.
func ClassOf(err error) error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Class
	}
	for _, c := range Classes() {
		if errors.Is(err, c) {
			return c
		}
	}
	return nil
}

// Classes lists every error class once.
func Classes() []error {
	return []error{
		ErrInvalid, ErrNotFound, ErrConflict, ErrExhausted, ErrForbidden, ErrUnauthenticated,
		ErrUnsupported, ErrUnavailable, ErrTooLarge, ErrDeadline,
	}
}
