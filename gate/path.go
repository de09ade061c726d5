package gate

import (
	"errors"
	"net/url"
	"strings"
	"unicode/utf8"
)

// The complaints about paths. Servers read such paths in different ways, so
// what was judged might not be what is served.
var (
	errPathSlash    = errors.New("its path holds an escaped slash, a backslash or an empty segment")
	errPathDots     = errors.New("its path holds . or .. as a segment")
	errPathTwice    = errors.New("its path is escaped twice")
	errPathControl  = errors.New("its path holds a control character or is not UTF-8")
	errPathRelative = errors.New("its path does not begin with a slash")
)

// plainPath returns the path of a request without escapes, as rules are
// written, if every server must read it so.
func plainPath(escaped string) (string, error) {
	if !strings.HasPrefix(escaped, "/") {
		return "", errPathRelative
	}
	path, err := url.PathUnescape(escaped)
	if err != nil || !utf8.ValidString(path) || strings.ContainsFunc(path, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
		return "", errPathControl
	}
	// After one round no escape of a character that matters may be left.
	for _, word := range []string{"%2e", "%2f", "%5c", "%25", "%00"} {
		if strings.Contains(strings.ToLower(path), word) {
			return "", errPathTwice
		}
	}
	if strings.Contains(path, `\`) || strings.Count(path, "/") != strings.Count(escaped, "/") {
		return "", errPathSlash
	}
	segments := strings.Split(path[1:], "/")
	for i, s := range segments {
		// Some servers cut what follows a semicolon: "..;" is "..".
		switch name, _, _ := strings.Cut(s, ";"); {
		case name == "." || name == "..":
			return "", errPathDots
		case name == "" && (s != "" || i < len(segments)-1):
			return "", errPathSlash
		}
	}
	return path, nil
}
