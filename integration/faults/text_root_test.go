//go:build root

package faults

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestNamesBeyondUTF8: what is no UTF-8 is refused or arrives as it was, and
// never means the file that has U+FFFD in its place. The controls are names of
// UTF-8, and the archive, which carries any.
func TestNamesBeyondUTF8(t *testing.T) {
	d := harness.Install(t, "")
	d.New(t, sandbox.Spec{Name: "a"})
	const look = `cd /root; for f in c* bad*; do printf '%s=' "$f"; cat "$f"; done | od -An -tx1`
	d.Sh(t, "a", `cd /root; echo 1 > "$(printf 'c\357\277\275')"; echo 2 > "$(printf 'bad\377')"; echo 3 > cé`)
	before := d.Sh(t, "a", look)
	files := d.Files("a")
	for what, do := range map[string]func(at string) error{
		"remove": func(at string) error { return files.Remove(t.Context(), "", at, true) },
		"write": func(at string) error {
			_, err := files.Write(t.Context(), "", at, 0o644, strings.NewReader("x"))
			return err
		},
		"mkdir":    func(at string) error { _, err := files.Mkdir(t.Context(), "", at, 0o755); return err },
		"move":     func(at string) error { return files.Move(t.Context(), "", "/root/cé", at) },
		"move out": func(at string) error { return files.Move(t.Context(), "", at, "/root/other") },
		"chmod":    func(at string) error { return files.Chmod(t.Context(), "", at, 0o600) },
		"stat":     func(at string) error { _, err := files.Stat(t.Context(), "", at); return err },
		"reset":    func(at string) error { _, err := d.ResetPaths(t.Context(), "a", at); return err },
		"argument": func(at string) error {
			if strings.Contains(at, "\ufffd") {
				at += "\xff" // a true one may be an argument
			}
			_, err := d.Try(t.Context(), "a", sandbox.ProcessSpec{Argv: []string{"rm", at}})
			return err
		},
	} {
		for _, at := range []string{"/root/c\xff", "/root/c\ufffd", "/root/bad\ufffd"} {
			if err := do(at); codeOf(err) != "invalid_path" && codeOf(err) != "invalid_request" {
				t.Errorf("%s %q: %v", what, at, err)
			}
		}
	}
	if after := d.Sh(t, "a", look); after != before {
		t.Errorf("changed:\n%s\nwas\n%s", after, before)
	}

	r, err := d.Try(t.Context(), "a", sandbox.ProcessSpec{Argv: []string{"sh", "-c", `printf %s "$1$X"`, "x", "é\ufffd\U0001f600"}, Env: map[string]string{"X": "\ufffd"}})
	if err != nil || r.Stdout != "é\ufffd\U0001f600\ufffd" {
		t.Errorf("control: %+v %v", r, err)
	}
	need(t, files.Remove(t.Context(), "", "/root/cé", false))
	need(t, files.Move(t.Context(), "", "/root", "/srv/root")) // and what lies in it
	if got := d.Sh(t, "a", `cat /srv/root/bad*`); got != "2" {
		t.Errorf("moved with its directory: %s", got)
	}
	if err := files.Move(t.Context(), "", "/srv", "/srv/x"); codeOf(err) != "invalid_path" || !strings.Contains(err.Error(), "moved into itself") {
		t.Errorf("into itself: %v", err)
	}
}
