//go:build root

package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestRemovalCrossesNoMount: neither a reset of paths nor the removal of a tree
// takes away what is mounted in it, and what is refused is refused before
// anything is gone. The controls are paths beside the mounts, and trees in one.
func TestRemovalCrossesNoMount(t *testing.T) {
	shared := t.TempDir()
	host := filepath.Join(shared, "mine")
	need(t, os.Mkdir(host, 0o777))
	need(t, os.Chown(host, 1234, 1234))
	d := harness.Install(t, fmt.Sprintf("bind_roots: [%q]\n", shared))
	_, err := d.CreateVolume(t.Context(), sandbox.VolumeRequest{Name: "v"})
	need(t, err)
	d.New(t, sandbox.Spec{Name: "x", Volumes: []sandbox.VolumeMount{{Volume: "v", Path: "/srv/data"}, {HostPath: host, Path: "/opt/host", Writable: true}}})
	const look = "cd /; find srv opt root -type f | sort | xargs"
	d.Sh(t, "x", "mkdir -p /srv/data/d /srv/beside /root/a; cd /; touch srv/data/d/f opt/host/f srv/beside/f root/a/f")
	before := d.Sh(t, "x", look)
	for _, at := range []string{
		"/srv", "/srv/data", "/srv/data/d", "/srv/data/d/f", "/srv/data/none/x", "/opt", "/opt/host", "/opt/host/f", "/dev", "/dev/shm", "/dev/shm/x", "/dev/null", "/proc", "/proc/1", "/sys", "/sys/fs",
	} {
		_, err := d.ResetPaths(t.Context(), "x", "/root/a", at) // what comes first stays, too
		if codeOf(err) != "crosses_mounts" || !strings.Contains(err.Error(), "nothing was removed") {
			t.Errorf("reset of %s: %v", at, err)
		}
	}
	for _, at := range []string{"/srv", "/srv/data", "/opt", "/opt/host", "/dev"} {
		if err := d.Files("x").Remove(t.Context(), "", at, true); codeOf(err) != "crosses_mounts" {
			t.Errorf("removal of %s: %v", at, err)
		}
	}
	if after := d.Sh(t, "x", look); after != before {
		t.Errorf("left: %s; there was %s", after, before)
	}
	_, err = d.ResetPaths(t.Context(), "x", "/srv/beside", "/root/a")
	need(t, err)
	need(t, d.Files("x").Remove(t.Context(), "", "/srv/data/d", true))
	if after := d.Sh(t, "x", look); strings.Contains(after, "beside") || strings.Contains(after, "root/a") || strings.Contains(after, "data/d") {
		t.Errorf("controls: left %s", after)
	}

	t.Run("race", func(t *testing.T) {
		d.New(t, sandbox.Spec{Name: "r", Volumes: []sandbox.VolumeMount{{Volume: "v", Path: "/srv/hold/v"}}})
		d.Sh(t, "r", "touch /srv/hold/v/f")
		_, err := d.StartProcess(t.Context(), "r", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "while :; do mkdir -p /srv/t; mv /srv/hold /srv/t/0; mv /srv/t/0 /srv/hold; done 2>/dev/null"}})
		need(t, err)
		removed, met := 0, 0
		for range harness.Soak(60, 1000) {
			d.Sh(t, "r", "mkdir -p /srv/t/b; cd /srv/t/b; mkdir -p $(seq 50) || true")
			if _, err := d.ResetPaths(t.Context(), "r", "/srv/t"); err == nil {
				removed++
			} else if met++; codeOf(err) != "crosses_mounts" && codeOf(err) != "directory_not_empty" && codeOf(err) != "file_busy" {
				t.Errorf("refused otherwise: %v", err)
			}
		}
		t.Logf("%d removed, %d met the mount", removed, met)
		if removed == 0 || met == 0 {
			t.Errorf("%d removed, %d met the mount: want some of both, or there was no race", removed, met)
		}
		d.New(t, sandbox.Spec{Name: "s", Volumes: []sandbox.VolumeMount{{Volume: "v", Path: "/v"}}})
		d.Sh(t, "s", "test -e /v/f")
	})
}

// TestResetPathsFollowsNoLink: a link on the way to a path leads a reset
// nowhere, whoever put it there, also where it changes meanwhile. The control is
// the same path with a directory there.
func TestResetPathsFollowsNoLink(t *testing.T) {
	d := harness.Install(t, "")
	d.New(t, sandbox.Spec{Name: "x"})
	const look = "sha256sum /etc/passwd /etc/group"
	before := d.Sh(t, "x", look)
	as := func(script string) {
		t.Helper()
		r, err := d.Try(t.Context(), "x", sandbox.ProcessSpec{Argv: []string{"sh", "-c", script}, User: "1000"})
		need(t, err)
		if r.Exit.Code != 0 {
			t.Fatalf("%s: %+v", script, r)
		}
	}
	d.Sh(t, "x", "mkdir -p /home/user/dir/sub; touch /home/user/dir/sub/passwd; chown -R 1000:1000 /home/user")
	as("cd /home/user; ln -s /etc app; ln -s ../../etc rel; ln -s / root")
	for at, link := range map[string]string{
		"/home/user/app/passwd": "/home/user/app", "/home/user/rel/passwd": "/home/user/rel", "/home/user/root/etc/group": "/home/user/root", "/home/user/root/home/user/dir": "/home/user/root",
	} {
		_, err := d.ResetPaths(t.Context(), "x", "/home/user/dir", at)
		if codeOf(err) != "crosses_link" || !strings.Contains(err.Error(), `"`+link+`"`) {
			t.Errorf("reset of %s: %v, want it to name %s", at, err, link)
		}
	}
	if after := d.Sh(t, "x", look+"; ls /home/user/dir/sub"); after != before+"\npasswd" {
		t.Errorf("changed: %s, was %s", after, before)
	}
	_, err := d.ResetPaths(t.Context(), "x", "/home/user/dir/sub/passwd", "/home/user/app") // the link itself
	need(t, err)
	if got := d.Sh(t, "x", look+"; ls /home/user /home/user/dir/sub"); got != before+"\n/home/user:\ndir\nrel\nroot\n\n/home/user/dir/sub:" {
		t.Errorf("control: %s", got)
	}

	t.Run("race", func(t *testing.T) {
		_, err := d.StartProcess(t.Context(), "x", sandbox.ProcessSpec{User: "1000", Argv: []string{"sh", "-c", "cd /home/user; while :; do mkdir w; touch w/passwd; rm -rf w; ln -sfn /etc w; rm w; done 2>/dev/null"}})
		need(t, err)
		done, refused := 0, 0
		for range harness.Soak(300, 5000) {
			if _, err := d.ResetPaths(t.Context(), "x", "/home/user/w/passwd"); err == nil {
				done++
			} else if refused++; codeOf(err) != "crosses_link" {
				t.Errorf("refused otherwise: %v", err)
			}
		}
		if after := d.Sh(t, "x", look); after != before || done == 0 || refused == 0 {
			t.Errorf("%d done, %d refused; changed: %s, was %s", done, refused, after, before)
		}
	})
}

// TestResetPathsKeepsNames: a reset of paths leaves the files that tell a sandbox
// its name, address and resolver as they were at its start. The controls are that
// they were written over, and that a file beside them is reset.
func TestResetPathsKeepsNames(t *testing.T) {
	d := harness.Install(t, "")
	d.New(t, sandbox.Spec{Name: "r1", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"example.com:443"}}})
	const look = "cd /etc; stat -c '%n %F %a %u:%g' hostname hosts resolv.conf; cat hostname hosts resolv.conf; sha256sum passwd"
	want := d.Sh(t, "r1", look)
	if !strings.Contains(want, "nameserver ") || !strings.Contains(want, "\nr1\n") {
		t.Fatalf("at its start: %s", want)
	}
	for _, paths := range [][]string{{"/etc"}, {"/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/etc/passwd"}, {"/etc/../etc/"}} {
		d.Sh(t, "r1", "cd /etc; for f in hostname hosts resolv.conf passwd; do echo x >$f; done; rm hosts; ln -s passwd hosts")
		if d.Sh(t, "r1", look) == want {
			t.Error("control: nothing was changed")
		}
		_, err := d.ResetPaths(t.Context(), "r1", paths...)
		need(t, err)
		if got := d.Sh(t, "r1", look); got != want {
			t.Errorf("after a reset of %q: %s; at its start: %s", paths, got, want)
		}
	}
}
