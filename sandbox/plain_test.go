package sandbox

import "testing"

func TestPlain(t *testing.T) {
	for in, want := range map[string]string{
		"plain":              "plain",
		"naïve 文字 👍":         "naïve 文字 👍",
		"invoice\u202efdp.x": `invoice\u202efdp.x`,
		"\u2066a\u2069":      `\u2066a\u2069`,
		"a\x1b[2Jb":          `a\x1b[2Jb`,
		"a\nb\tc\rd":         `a\nb\tc\rd`,
		"a\u009b31m":         `a\u009b31m`,
		"a\x9bb":             `a\x9bb`,
		"zero\u200bwidth":    `zero\u200bwidth`,
		"l\u2028s":           `l\u2028s`,
	} {
		if got := Plain(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	if got := PlainText("a\n\tb\u202e"); got != "a\n\tb\\u202e" {
		t.Errorf("%q", got)
	}
}
