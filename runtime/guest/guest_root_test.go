//go:build root

package guest_test

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestRootSwitchesRepeatedly(t *testing.T) {
	b, _ := newRooted(t)
	for i := 1; i <= 3; i++ {
		if i > 1 {
			cfg := b.config()
			var dir string
			cfg.Root, dir = b.newRoot()
			// What a workload of an earlier life may have left in the way.
			_ = os.Symlink("/etc", filepath.Join(dir, "proc"))
			_ = os.WriteFile(filepath.Join(dir, "sys"), nil, 0o644)
			_ = os.Symlink("/nowhere", filepath.Join(dir, "etc/resolv.conf"))
			var took guest.Timings
			cfg.Timings = &took
			b.sh("sleep 1000 & setsid sleep 1000 >/dev/null 2>&1 &")
			if err := b.Configure(ctx(t), cfg); err != nil {
				t.Fatal(err)
			}
			t.Logf("switch %d: %+v", i, took)
		}
		if got := b.sh("cat /etc/marker"); got != strconv.Itoa(i) {
			t.Errorf("root %d: marker %q", i, got)
		}
		if got := b.sh("cat /etc/resolv.conf; cat /etc/hostname; hostname; grep -c '10.1.2.3.box' /etc/hosts"); got != "nameserver 192.0.2.1\nbox\nbox\n1" {
			t.Errorf("root %d: identity %q", i, got)
		}
		if got := b.sh("ls /; test -e /proc/self/status && test -d /sys/class && test -c /dev/null && test -c /dev/pts/ptmx && echo mounts"); filepath.Base(got) == "" || got[len(got)-6:] != "mounts" {
			t.Errorf("root %d: %q", i, got)
		}
		if got := b.sh("awk '{print $5}' /proc/self/mountinfo | sort | uniq -d"); got != "" {
			t.Errorf("root %d: mounted twice: %q", i, got)
		}
	}
	info, err := b.Ping(ctx(t))
	if err != nil || info.Switches != 3 {
		t.Errorf("ping: %+v, %v", info, err)
	}
}

func TestExecTellsOutputAndExit(t *testing.T) {
	b, _ := newRooted(t)
	r, err := b.run(sandbox.ProcessSpec{Argv: []string{"sh", "-c", "echo out; echo err >&2; exit 7"}})
	if err != nil {
		t.Fatal(err)
	}
	if r.out != "out\n" || r.err != "err\n" || r.exit.Code != 7 {
		t.Errorf("got %+v", r)
	}
}
