package api

import (
	"bytes"
	"encoding/json"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/sandbox"
)

// CheckUTF8 refuses JSON that encoding/json would read as something else: what
// is no UTF-8, and escaped halves of surrogate pairs, all become U+FFFD
// there. A path with one would name another file. ErrInvalid invalid_request.
func CheckUTF8(b []byte) error {
	if at := notUTF8(b); at >= 0 {
		return replaced(b, at)
	}
	return checkEscapes(b, false)
}

// MarshalUTF8 is json.Marshal that refuses strings which are not UTF-8,
// where json.Marshal writes U+FFFD. ErrInvalid invalid_request.
func MarshalUTF8(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", "request: %w", err)
	}
	return b, checkEscapes(b, true)
}

// checkEscapes looks for halves of surrogate pairs and, in what json.Marshal
// wrote, for \ufffd: it writes a true U+FFFD as it is, and bytes that are no
// UTF-8 so.
func checkEscapes(b []byte, marshaled bool) error {
	for i := 0; i < len(b); i += 2 {
		next := bytes.IndexByte(b[i:], '\\')
		if next < 0 {
			return nil
		}
		i += next
		switch r := escaped(b[i:]); {
		case marshaled && r == utf8.RuneError:
			return replaced(b, i)
		case !utf16.IsSurrogate(r):
		case utf16.DecodeRune(r, escaped(b[i+6:])) == utf8.RuneError:
			return replaced(b, i)
		default:
			i += 10
		}
	}
	return nil
}

// escaped is the rune of the escape \uXXXX that b begins with; -1: none.
func escaped(b []byte) rune {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return -1
	}
	r, err := strconv.ParseUint(string(b[2:6]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(r)
}

func notUTF8(b []byte) int {
	if utf8.Valid(b) {
		return -1
	}
	at := 0
	for {
		r, n := utf8.DecodeRune(b[at:])
		if r == utf8.RuneError && n == 1 {
			return at
		}
		at += n
	}
}

// replaced names the field whose value has the fault: what stands before the
// last colon that follows a quote.
func replaced(b []byte, at int) error {
	field := "the body"
	if end := bytes.LastIndex(b[:at], []byte(`":`)); end >= 0 {
		field = string(b[bytes.LastIndexByte(b[:end], '"')+1 : end])
	}
	return sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", "%.100q (byte %d of the JSON) is not UTF-8: paths, arguments, environment and all other text must be; "+
		"reach files of other names by their directory ('sandbox cp', the archive), or by a pattern in a shell inside", field, at)
}
