package main

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestOutputSteersNoTerminal: in JSON and YAML nothing of a text from outside
// reaches the terminal but as its code, and readers get the same text.
func TestOutputSteersNoTerminal(t *testing.T) {
	img := sandbox.Image{Name: "x", Config: sandbox.ImageConfig{
		User: "a\x1b]0;title\a", WorkDir: "/\u202egnp", Entrypoint: []string{"\u009b2J", "\u200d"}, Cmd: []string{"two\nlines\r", "plain: text", "\x7f"},
		Labels: map[string]string{"K\x1b[2J": "\u2066v\u2028"},
	}}
	want, err := json.Marshal(img)
	if err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"json", "yaml"} {
		var shown, line bytes.Buffer
		if err := (&cli{out: &shown, output: format}).show(img, nil); err != nil {
			t.Fatal(err)
		}
		if err := (&cli{out: &line, output: format}).showLine(img, ""); err != nil {
			t.Fatal(err)
		}
		for _, out := range []string{shown.String(), line.String()} {
			if sandbox.PlainText(out) != out {
				t.Errorf("%s: %q", format, out)
			}
			var a, b any
			if err := yaml.Unmarshal([]byte(out), &a); err != nil { // JSON is YAML
				t.Fatalf("%s: %v: %s", format, err, out)
			}
			if err := yaml.Unmarshal(want, &b); err != nil || !reflect.DeepEqual(a, b) {
				t.Errorf("%s reads as\n%#v, want\n%#v, %v", format, a, b, err)
			}
		}
	}
}
