package sandbox

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Plain returns a text from outside as people may be shown it on one line:
// what could steer a terminal, end the line, or turn or hide what stands
// around it is written as its code, as \u202e.
func Plain(s string) string { return plain(s, "") }

// PlainText is Plain for several lines: their ends and tabs stay.
func PlainText(s string) string { return plain(s, "\n\t") }

// PlainJSON is the same JSON with Plain's characters as \u codes. Beyond ASCII
// they stand within strings alone, and so does U+007F.
func PlainJSON(b []byte) []byte {
	var out []byte
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		switch {
		case r < 0x7f || r == utf8.RuneError || !steers(r):
			out = append(out, b[:n]...)
		case r > 0xffff:
			hi, lo := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, hi, lo)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		b = b[n:]
	}
	return out
}

func plain(s, keep string) string {
	if !strings.ContainsFunc(s, func(r rune) bool { return steers(r) && !strings.ContainsRune(keep, r) }) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			b.WriteString(`\x` + strconv.FormatUint(uint64(s[0])|0x100, 16)[1:])
		case steers(r) && !strings.ContainsRune(keep, r):
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		default:
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

// steers tells of control and format characters, those of writing direction
// among them, of separators of lines, and of what is no text at all.
func steers(r rune) bool {
	return r == utf8.RuneError || unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp)
}
