package initproto

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Error is the payload of an Error frame.
type Error struct {
	Class  string `json:"class"`
	Code   string `json:"code"`
	Detail string `json:"detail"`
}

const (
	maxDetail = 4 << 10
	maxCode   = 64
)

// FromError makes the wire form of err. An error without a class travels as
// code internal.
func FromError(err error) Error {
	e := Error{Code: sandbox.CodeOf(err), Detail: clip(err.Error(), maxDetail)}
	if class := sandbox.ClassOf(err); class != nil {
		e.Class = class.Error()
	}
	return e
}

// Err turns the wire form back into an error of package sandbox. What PID 1
// sends is not trusted: an unknown class becomes an unavailable sandbox, a
// malformed code guest_error, and the text loses its control characters.
func (e Error) Err() error {
	detail := sandbox.PlainText(clip(e.Detail, maxDetail))
	code := e.Code
	if !codeOK(code) {
		code = "guest_error"
	}
	for _, class := range sandbox.Classes() {
		if class.Error() == e.Class {
			return &sandbox.Error{Class: class, Code: code, Detail: detail}
		}
	}
	return &sandbox.Error{
		Class: sandbox.ErrUnavailable, Code: "guest_error", Detail: "the sandbox's init: " + detail,
		Cause: errors.New("error frame without a known class"),
	}
}

// CheckVersion refuses any version but ours; who is "daemon" or "init".
func CheckVersion(who string, v int) error {
	if v == Version {
		return nil
	}
	return sandbox.Errorf(sandbox.ErrUnsupported, "protocol_version",
		"the %s speaks version %d of the init protocol, this side %d: recreate the sandbox with this build", who, v, Version)
}

func codeOK(s string) bool {
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return s != "" && len(s) <= maxCode
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + fmt.Sprintf("… (%d bytes more)", len(s)-n)
}
