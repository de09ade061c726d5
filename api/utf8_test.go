package api

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestCheckUTF8: what encoding/json would read as U+FFFD and was none is
// refused; a U+FFFD that was sent, and whole pairs, are not.
func TestCheckUTF8(t *testing.T) {
	for in, bad := range map[string]bool{
		`{"path":"/root/c`:                     false,
		`{"path":"/root/c�","x":"\ufffd"}`:     false,
		`{"path":"\ud83d\ude00 \uD83D\uDE00"}`: false,
		`{"path":"\\ud800"}`:                   false,
		`{"path":"\\\\ud800\\"}`:               false,
		`{"path":"x\`:                          false, // no JSON: the decoder says so
		`{"path":"\u12`:                        false,
		"{\"path\":\"/root/c\xff\"}":           true,
		"{\"path\xed\xa0\x80\":1}":             true, // a surrogate in UTF-8
		`{"path":"\ud800"}`:                    true,
		`{"path":"\ud800\ud800"}`:              true,
		`{"path":"\ud800x\udc00"}`:             true,
		`{"path":"\udc00\ud800"}`:              true,
		`{"path":"\\\ud800"}`:                  true,
		`{"path":"\ud83d\ude00\udfff"}`:        true,
		`{"path":"\ud83d`:                      true,
	} {
		err := CheckUTF8([]byte(in))
		if (err != nil) != bad || bad && (sandbox.CodeOf(err) != "invalid_request" || strings.Contains(in, `path":`) && !strings.Contains(err.Error(), `"path"`)) {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestMarshalUTF8(t *testing.T) {
	type request struct {
		Argv []string          `json:"argv"`
		Env  map[string]string `json:"env"`
	}
	good := request{[]string{"sh", `\ufffd �` + "\U0001f600 <\u2028>"}, map[string]string{"X": "�"}}
	b, err := MarshalUTF8(good)
	if want, _ := json.Marshal(good); err != nil || string(b) != string(want) {
		t.Errorf("%s %v", b, err)
	}
	for field, v := range map[string]request{
		"argv": {Argv: []string{"sh", "A\xffB"}}, "X": {Env: map[string]string{"X": "\xc3\x28"}}, "env": {Env: map[string]string{"\xff": ""}},
	} {
		if _, err := MarshalUTF8(v); sandbox.CodeOf(err) != "invalid_request" || !strings.Contains(err.Error(), `"`+field+`"`) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// FuzzCheckUTF8: what passes has a U+FFFD only where it was sent.
func FuzzCheckUTF8(f *testing.F) {
	f.Add("\\ud83d\\ude00")
	f.Add("\xff\\ud800\\")
	f.Fuzz(func(t *testing.T, s string) {
		in := `"` + s + `"`
		var text string
		if CheckUTF8([]byte(in)) == nil && json.Unmarshal([]byte(in), &text) == nil && strings.Contains(text, "�") &&
			!strings.Contains(strings.ToLower(in), `\ufffd`) && !strings.Contains(in, "�") {
			t.Errorf("%q became %q", in, text)
		}
	})
}
