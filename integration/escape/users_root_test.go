//go:build root

package escape

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestNumbersAreIDs: digits are an id, whatever the sandbox's files call so
// (CVE-2016-3697), and files that cannot be read are told as such. The controls
// are a name that the same files give to root, and a file that can be read.
func TestNumbersAreIDs(t *testing.T) {
	d := harness.Install(t, "")
	d.New(t, sandbox.Spec{Name: "x"})
	run := func(user string) (string, error) {
		r, err := d.Try(t.Context(), "x", sandbox.ProcessSpec{User: user, Argv: []string{"sh", "-c", "echo $(id -u):$(id -g)"}})
		return strings.TrimSpace(r.Stdout), err
	}
	d.Sh(t, "x", `printf '1000:x:0:0::/:/bin/sh\n70000:x:0:0::/:/bin/sh\nme:x:0:0::/:/bin/sh\n' >/etc/passwd; printf '1000:x:0:\n70000:x:0:\n' >/etc/group`)
	for user, want := range map[string]string{"1000": "1000:0", "1000:1000": "1000:1000", "me": "0:0", "me:1000": "0:1000", "70000": "", ":5": "", "me:70000": "", "me:": ""} {
		if got, err := run(user); got != want || want == "" && codeOf(err) != "unknown_user" {
			t.Errorf("user %q: %s, %v; want %q", user, got, err, want)
		}
	}
	for _, odd := range []string{"mkfifo /etc/passwd", "ln -s /dev/zero /etc/passwd", "truncate -s 8T /etc/passwd", "mkdir /etc/passwd", "ln -s passwd /etc/passwd"} {
		d.Sh(t, "x", "rm -rf /etc/passwd; "+odd)
		if _, err := run("me"); codeOf(err) != "unknown_user" || !strings.Contains(err.Error(), "cannot be read") {
			t.Errorf("%s: %v", odd, err)
		}
		if got, err := run("1000"); got != "1000:0" {
			t.Errorf("%s: user 1000: %s, %v", odd, got, err)
		}
	}
	d.Sh(t, "x", "rm -rf /etc/passwd; touch /etc/passwd")
	if _, err := run("me"); codeOf(err) != "unknown_user" || !strings.Contains(err.Error(), "has no entry") {
		t.Errorf("control: %v", err)
	}
}
