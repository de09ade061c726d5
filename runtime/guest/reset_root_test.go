//go:build root

package guest_test

import (
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// switchRoot gives b one more root and returns what PID 1 said of it.
func (b *box) switchRoot(change ...func(*guest.Config)) guest.Timings {
	b.t.Helper()
	cfg := b.config()
	cfg.Root, _ = b.newRoot()
	var done guest.Timings
	cfg.Timings = &done
	for _, f := range change {
		f(&cfg)
	}
	if err := b.Configure(ctx(b.t), cfg); err != nil {
		b.t.Fatal(err)
	}
	return done
}

func number(t *testing.T, id sandbox.ProcessID) int64 {
	t.Helper()
	n, err := strconv.ParseInt(strings.TrimPrefix(string(id), "p"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestSwitchDividesProcesses: starts race with switches, and of each process
// Before tells which side it is on.
func TestSwitchDividesProcesses(t *testing.T) {
	const rounds, starters, each = 25, 3, 4
	b, _ := newRooted(t, func(c *guest.Config) { c.KeepEnded = 4096 })
	if info, err := b.Ping(ctx(t)); err != nil || info.Before != 0 {
		t.Fatalf("with no process before the first root: %+v, %v", info, err)
	}
	var ended, living int
	for range rounds {
		var mu sync.Mutex
		var all []sandbox.Process
		var wg sync.WaitGroup
		begun := make(chan struct{}, starters*each)
		for range starters {
			wg.Go(func() {
				for range each {
					p, err := b.Start(ctx(t), argv("sh", "-c", "cat /etc/marker; exec sleep 1000"))
					if err != nil {
						t.Errorf("start: %v", err)
						return
					}
					mu.Lock()
					all = append(all, p)
					mu.Unlock()
					begun <- struct{}{}
				}
			})
		}
		<-begun
		done := b.switchRoot(func(c *guest.Config) { c.KeepEnded = 4096 })
		info, err := b.Ping(ctx(t))
		if err != nil || info.Before != done.Before || done.Before == 0 {
			t.Fatalf("configured: before %d; ping: %+v, %v", done.Before, info, err)
		}
		wg.Wait()
		for _, p := range all {
			if number(t, p.ID) <= done.Before {
				ended++
				b.checkEnded(p.ID)
				continue
			}
			living++
			b.checkLiving(p.ID)
		}
		if t.Failed() {
			return
		}
	}
	if ended == 0 || living == 0 {
		t.Errorf("no race: %d processes before a switch, %d after", ended, living)
	}
	t.Logf("%d processes before a switch, %d after", ended, living)
	if done := b.switchRoot(func(c *guest.Config) { c.LastProcess = 100_000 }); done.Before != 100_000 {
		t.Errorf("with numbers of an earlier PID 1: before %d", done.Before)
	}
	// Settings alone divide nothing.
	b.sh("true")
	var same guest.Timings
	cfg := b.config()
	cfg.Timings = &same
	if err := b.Configure(ctx(t), cfg); err != nil || same.Before != 100_000 {
		t.Errorf("without a root: %+v, %v", same, err)
	}
}

func (b *box) checkEnded(id sandbox.ProcessID) {
	b.t.Helper()
	p, err := b.Process(ctx(b.t), id)
	if errors.Is(sandbox.ClassOf(err), sandbox.ErrNotFound) {
		return
	}
	if err != nil || p.Exit == nil {
		b.t.Errorf("%s is of an earlier root and lives: %+v, %v", id, p, err)
	}
}

func (b *box) checkLiving(id sandbox.ProcessID) {
	b.t.Helper()
	s, err := b.Attach(ctx(b.t), id, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	defer s.Close()
	o, err := s.Next()
	if got := strings.TrimSpace(string(o.Data)); err != nil || got != strconv.Itoa(b.roots) {
		b.t.Errorf("%s runs on root %q, want %d: %v", id, got, b.roots, err)
	}
	if p, err := b.Process(ctx(b.t), id); err != nil || p.Exit != nil {
		b.t.Errorf("%s is of the root in force and ended: %+v, %v", id, p, err)
	}
}

// TestSwitchLeavesNothing: what hangs on the namespaces and the mounts that go
// along from root to root, seen by a second process before a switch and by
// none after it.
func TestSwitchLeavesNothing(t *testing.T) {
	b, _ := newRooted(t)
	// Where there is nothing to clear.
	b.switchRoot()
	things := []struct{ name, leave, see string }{
		{"file in /dev/shm", "echo x > /dev/shm/file", "cat /dev/shm/file"},
		{"tree in /dev/shm", "mkdir -p /dev/shm/.a/b && chmod 0 /dev/shm/.a", "ls -A /dev/shm | grep '^.a$'"},
		{"mode of /dev/shm", "chmod 755 /dev/shm", "stat -c %a /dev/shm | grep -vx 1777"},
		{"owner of /dev/shm", "chown 1000 /dev/shm", "stat -c %u /dev/shm | grep -vx 0"},
		{"time of /dev/shm", "touch -d @77 /dev/shm", "stat -c %Y /dev/shm | grep -x 77"},
		{"message queue", "echo > /dev/mqueue/q; test -e /dev/mqueue/q", "ls -A /dev/mqueue | grep ."},
		{"time of /dev/pts/ptmx", "touch -d @77 /dev/pts/ptmx", "stat -c %Y /dev/pts/ptmx | grep -x 77"},
		{"mode of /dev/pts/ptmx", "chmod 0 /dev/pts/ptmx", "stat -c %a /dev/pts/ptmx | grep -vx 666"},
		{"owner of /dev/pts/ptmx", "chown 1000 /dev/pts/ptmx", "stat -c %u /dev/pts/ptmx | grep -vx 0"},
		{"mode of /dev/pts", "chmod 700 /dev/pts", "stat -c %a /dev/pts | grep -vx 755"},
		{"time of /dev/pts", "touch -d @77 /dev/pts", "stat -c %Y /dev/pts | grep -x 77"},
		{"mode of /dev/mqueue", "chmod 700 /dev/mqueue", "stat -c %a /dev/mqueue | grep -vx 1777"},
		{"mode in /proc/net", "chmod 0 /proc/net/tcp", "stat -c %a /proc/net/tcp | grep -vx 444"},
		{"owner in /proc/net", "chown 1000 /proc/net/udp", "stat -c %u /proc/net/udp | grep -x 1000"},
		{"mode of a directory in /proc/net", "chmod 500 /proc/net/stat", "stat -c %a /proc/net/stat | grep -vx 555"},
		{"mode deep in /proc/net", "chmod 4 /proc/net/stat/rt_cache", "stat -c %a /proc/net/stat/rt_cache | grep -vx 444"},
		{"shared memory", "ipcmk -M 65536 -p 600 && ipcmk -M 4096", "tail -n +2 /proc/sysvipc/shm | grep ."},
		{"semaphores", "ipcmk -S 3 -p 600 && ipcmk -S 1", "tail -n +2 /proc/sysvipc/sem | grep ."},
		{"System V queue", "ipcmk -Q -p 600 && ipcmk -Q", "tail -n +2 /proc/sysvipc/msg | grep ."},
		{"abstract socket", "python3 -c 'import socket,os,time; s=socket.socket(socket.AF_UNIX); s.bind(\"\\0left\"); os.fork() and os._exit(0); os.setsid(); time.sleep(1000)' >/dev/null 2>&1", "grep @left /proc/net/unix"},
	}
	for _, x := range things {
		if got := b.sh(x.see + "; true"); got != "" {
			t.Fatalf("%s: there before it was left: %q", x.name, got)
		}
	}
	for _, user := range []string{"", "alice"} {
		for _, x := range things {
			if user != "" && (strings.HasPrefix(x.name, "mode") || strings.HasPrefix(x.name, "owner") || strings.HasPrefix(x.name, "time")) {
				continue // they are root's
			}
			r, err := b.run(sandbox.ProcessSpec{Argv: []string{"sh", "-c", x.leave}, User: user})
			if err != nil || r.exit.Code != 0 {
				t.Fatalf("%s: leaving it: %+v, %v", x.name, r, err)
			}
			if got := b.sh(x.see); got == "" {
				t.Errorf("%s: control: not seen before the switch", x.name)
			}
		}
		done := b.switchRoot()
		for _, x := range things {
			if got := b.sh(x.see + "; true"); got != "" {
				t.Errorf("%s, left by user %q, is there after the switch: %q", x.name, user, got)
			}
		}
		t.Logf("user %q: cleared in %v", user, done.Clear)
		if got := b.sh("grep ' /dev/shm ' /proc/self/mountinfo | cut -d' ' -f6- | sed 's/,inode64//'"); !strings.Contains(got, "nosuid,nodev,noexec") || !strings.Contains(got, "size=65536k") || strings.Contains(got, "\n") {
			t.Errorf("/dev/shm is mounted as %q", got)
		}
	}
	// Both users can go on using what was cleared, a terminal too.
	spec := argv("sh", "-c", "tty && echo x > /dev/shm/mine && echo > /dev/mqueue/mine; test -e /dev/mqueue/mine && ipcmk -M 4096")
	spec.User, spec.TTY = "alice", &sandbox.WindowSize{Cols: 80, Rows: 24}
	if r, err := b.run(spec); err != nil || r.exit.Code != 0 {
		t.Errorf("after the switches: %+v, %v", r, err)
	}
}

// TestSwitchClearsMuch: what takes long to remove does not hold a switch up.
func TestSwitchClearsMuch(t *testing.T) {
	b, _ := newRooted(t)
	b.sh("head -c 30M /dev/zero > /dev/shm/big; mkdir /dev/shm/d; cd /dev/shm/d; seq 20000 | xargs touch; for i in $(seq 300); do ipcmk -S 1; done; for i in $(seq 200); do ipcmk -M 4096; done")
	done := b.switchRoot()
	t.Logf("cleared in %v", done.Clear)
	if got := b.sh("ls -A /dev/shm; tail -qn +2 /proc/sysvipc/shm /proc/sysvipc/sem"); got != "" {
		t.Errorf("left: %.300q", got)
	}
}

// TestSwitchClearsFileWork: no process ever ran, but the file API wrote.
func TestSwitchClearsFileWork(t *testing.T) {
	b, _ := newRooted(t)
	const path = "/dev/shm/file"
	if _, err := b.Write(ctx(t), "", path, 0o644, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Stat(ctx(t), "", path); err != nil {
		t.Fatalf("control: %v", err)
	}
	b.switchRoot()
	if _, err := b.Stat(ctx(t), "", path); !errors.Is(sandbox.ClassOf(err), sandbox.ErrNotFound) {
		t.Errorf("after the switch: %v", err)
	}
}
