//go:build root

package guest_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

func argv(a ...string) sandbox.ProcessSpec { return sandbox.ProcessSpec{Argv: a} }

func TestExecRefusesInWords(t *testing.T) {
	b, dir := newRooted(t)
	for name, mode := range map[string]os.FileMode{"tmp/plain": 0o644, "tmp/noint": 0o755, "tmp/closed": 0o700} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/no/such/interpreter\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "private"), 0o700); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name string
		spec sandbox.ProcessSpec
		code string
	}{
		{"control", argv("true"), ""},
		{"not in PATH", argv("no-such-command"), "command_not_found"},
		{"no such path", argv("/no/such/command"), "command_not_found"},
		{"not executable", argv("/tmp/plain"), "command_not_executable"},
		{"no interpreter", argv("/tmp/noint"), "command_not_executable"},
		{"a directory", argv("/tmp"), "command_not_executable"},
		{"unknown user", sandbox.ProcessSpec{Argv: []string{"true"}, User: "nobody-here"}, "unknown_user"},
		{"control: known user", sandbox.ProcessSpec{Argv: []string{"true"}, User: "alice"}, ""},
		{"no such workdir", sandbox.ProcessSpec{Argv: []string{"true"}, WorkDir: "/nowhere"}, "workdir_not_found"},
		{"workdir is a file", sandbox.ProcessSpec{Argv: []string{"true"}, WorkDir: "/etc/passwd"}, "workdir_not_found"},
		{"workdir not the user's", sandbox.ProcessSpec{Argv: []string{"true"}, User: "alice", WorkDir: "/private"}, "workdir_not_found"},
		{"control: root may", sandbox.ProcessSpec{Argv: []string{"true"}, WorkDir: "/private"}, ""},
		{"file not the user's", sandbox.ProcessSpec{Argv: []string{"/tmp/closed"}, User: "alice"}, "command_not_executable"},
	}
	for _, c := range cases {
		_, err := b.run(c.spec)
		if (err == nil) != (c.code == "") || err != nil && (sandbox.CodeOf(err) != c.code || !errors.Is(sandbox.ClassOf(err), sandbox.ErrInvalid)) {
			t.Errorf("%s: got %v (%s), want %q", c.name, err, sandbox.CodeOf(err), c.code)
		}
	}
}

func TestUserAndEnvironment(t *testing.T) {
	b, _ := newRooted(t, func(c *guest.Config) { c.Env = map[string]string{"SHARED": "1", "OWN": "sandbox"} })
	r, err := b.run(sandbox.ProcessSpec{Argv: []string{"sh", "-c", "id -u; id -g; id -G; pwd; echo $HOME $USER $SHARED $OWN; umask"}, User: "alice", Env: map[string]string{"OWN": "process"}})
	if err != nil {
		t.Fatal(err)
	}
	if want := "1000\n1000\n1000 44\n/home/alice\n/home/alice alice 1 process\n0022\n"; r.out != want {
		t.Errorf("got %q, want %q", r.out, want)
	}
	if got := b.sh("id -u; cat /proc/self/status | grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:|CapInh|CapAmb' | tr -d '\\t'"); got != "0\nCapInh:0000000000000000\nCapEff:00000000000004fb\nCapBnd:00000000000004fb\nCapAmb:0000000000000000\nNoNewPrivs:1\nSeccomp:2" {
		t.Errorf("profile root: %q", got)
	}
	r, err = b.run(sandbox.ProcessSpec{Argv: []string{"sh", "-c", "trap '' TERM; kill -TERM $$; trap - TERM; kill -TERM $$; echo alive"}})
	if err != nil || r.exit.Signal != "SIGTERM" || r.exit.Code != 143 || r.out != "" {
		t.Errorf("TERM must not be ignored by inheritance: %+v, %v", r, err)
	}
}

func TestProfileNoneLeavesNothing(t *testing.T) {
	b, _ := newRooted(t, func(c *guest.Config) { c.Capabilities = sandbox.CapabilitiesNone })
	for _, user := range []string{"", "alice"} {
		r, err := b.run(sandbox.ProcessSpec{Argv: []string{"sh", "-c", "grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status | grep -vc 0000000000000000"}, User: user})
		if err != nil || r.out != "0\n" {
			t.Errorf("user %q has capabilities: %+v %v", user, r, err)
		}
	}
	if r, err := b.run(argv("chown", "1000", "/tmp")); err != nil || r.exit.Code == 0 {
		t.Errorf("chown worked without CAP_CHOWN: %+v %v", r, err)
	}
	control, _ := newRooted(t)
	control.sh("chown 1000 /tmp")
}

// timed waits for the end of a process and fails if the limit passes.
func waitExit(t *testing.T, b *box, id sandbox.ProcessID, limit time.Duration) sandbox.Process {
	t.Helper()
	var p sandbox.Process
	testenv.Eventually(t, limit, "process "+string(id)+" to end", func() bool {
		var err error
		if p, err = b.Process(ctx(t), id); err != nil {
			t.Fatal(err)
		}
		return p.Exit != nil
	})
	return p
}

const stray = "setsid sh -c 'trap \"\" TERM HUP; echo $$ > /tmp/stray; while :; do sleep 0.1; done' >/dev/null 2>&1 </dev/null & while ! test -s /tmp/stray; do sleep 0.02; done; "

func TestTimeoutEndsTheWholeTree(t *testing.T) {
	testenv.Need(t, testenv.Cgroup2)
	b, _ := newRooted(t)
	spec := argv("sh", "-c", stray+"(setsid setsid sleep 500 &) ; sleep 500")
	spec.TimeoutSeconds = 0.5
	began := time.Now()
	r, err := b.run(spec)
	if err != nil {
		t.Fatal(err)
	}
	if !r.exit.TimedOut || r.exit.Signal != "SIGTERM" {
		t.Errorf("exit %+v", r.exit)
	}
	// The stray ignores TERM: KILL must come for it after the grace.
	testenv.Eventually(t, 20*time.Second, "the stray to be killed", func() bool {
		return b.sh("ls -d /proc/$(cat /tmp/stray) 2>/dev/null; true") == ""
	})
	if took := time.Since(began); took < sandbox.TerminationGrace {
		t.Errorf("KILL came after %v, before the grace was over", took)
	}
	testenv.Eventually(t, 20*time.Second, "no sleep is left", func() bool { return b.sh("pgrep -c sleep; true") == "0" })
	// One cgroup at most is kept, for the next process.
	testenv.Eventually(t, 5*time.Second, "the process's cgroup to empty and the others to go", func() bool {
		groups, err := filepath.Glob(filepath.Join(b.cgroup, "work", "*", "cgroup.events"))
		if err != nil || len(groups) > 1 {
			return false
		}
		events, err := os.ReadFile(filepath.Join(b.cgroup, "work", "cgroup.events"))
		return err == nil && strings.Contains(string(events), "populated 0\n")
	})
	// Control: without a timeout the same lives on.
	spec.TimeoutSeconds = 0
	p, err := b.Start(ctx(t), spec)
	if err != nil {
		t.Fatal(err)
	}
	<-time.After(700 * time.Millisecond)
	if p, err = b.Process(ctx(t), p.ID); err != nil || p.Exit != nil {
		t.Errorf("without a timeout it ended: %+v %v", p, err)
	}
	if err := b.Forget(ctx(t), p.ID); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 20*time.Second, "forget leaves none", func() bool {
		return b.sh("ls -d /proc/$(cat /tmp/stray) 2>/dev/null; pgrep -c sleep; true") == "0"
	})
	if err := b.Forget(ctx(t), p.ID); err != nil {
		t.Errorf("forgetting twice: %v", err)
	}
}

func TestSignalReachesTheTree(t *testing.T) {
	b, _ := newRooted(t)
	p, err := b.Start(ctx(t), argv("sh", "-c", stray+"sleep 500"))
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 5*time.Second, "the stray to start", func() bool { return b.sh("cat /tmp/stray 2>/dev/null; true") != "" })
	if err := b.Signal(ctx(t), p.ID, "SIGKILL"); err != nil {
		t.Fatal(err)
	}
	if got := waitExit(t, b, p.ID, 5*time.Second); got.Exit.Signal != "SIGKILL" || got.Exit.Code != 137 {
		t.Errorf("exit %+v", got.Exit)
	}
	if b.cgroup != "" {
		testenv.Eventually(t, 5*time.Second, "the stray to die", func() bool { return b.sh("ls -d /proc/$(cat /tmp/stray) 2>/dev/null; true") == "" })
	}
	// What it started is signalled until the last of it is reaped.
	testenv.Eventually(t, 5*time.Second, "a signal to an ended process to be a conflict", func() bool {
		return errors.Is(sandbox.ClassOf(b.Signal(ctx(t), p.ID, "SIGTERM")), sandbox.ErrConflict)
	})
	if err := b.Signal(ctx(t), "p999", "SIGTERM"); !errors.Is(sandbox.ClassOf(err), sandbox.ErrNotFound) {
		t.Errorf("signal to none: %v", err)
	}
	if err := b.Signal(ctx(t), p.ID, "SIGNONSENSE"); !errors.Is(sandbox.ClassOf(err), sandbox.ErrInvalid) {
		t.Errorf("nonsense signal: %v", err)
	}
}

func TestBackgroundChildKeepsNobodyWaiting(t *testing.T) {
	b, _ := newRooted(t)
	began := time.Now()
	r, err := b.run(argv("sh", "-c", "sleep 300 & echo done"))
	if err != nil || r.out != "done\n" {
		t.Fatalf("%+v %v", r, err)
	}
	if took := time.Since(began); took > 5*time.Minute {
		t.Errorf("waited %v, as long as the child lives", took)
	}
	testenv.Eventually(t, 20*time.Second, "the background child lives on", func() bool { return b.sh("pgrep -c sleep; true") == "1" })
}

func TestStdin(t *testing.T) {
	b, _ := newRooted(t)
	s, err := b.Exec(ctx(t), sandbox.ProcessSpec{Argv: []string{"sha256sum"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = s.WriteStdin(bytes.Repeat([]byte("0123456789abcdef"), 1<<18)) // 4 MiB: more than every buffer
		_ = s.CloseStdin()
		_ = s.CloseStdin()
	}()
	r := drain(t, s)
	if want := b.sh("yes 0123456789abcdef | tr -d '\\n' | head -c 4194304 | sha256sum"); strings.TrimSpace(r.out) != want {
		t.Errorf("got %q, want %q", r.out, want)
	}
	if r, err := b.run(argv("cat")); err != nil || r.out != "" || r.exit.Code != 0 {
		t.Errorf("without stdin: %+v %v", r, err)
	}
}

func TestTerminal(t *testing.T) {
	b, _ := newRooted(t)
	spec := argv("sh", "-c", "tty; stty size; read x; stty size; echo got $x; cat; echo end")
	spec.TTY, spec.User = &sandbox.WindowSize{Cols: 91, Rows: 33}, "alice"
	s, err := b.Exec(ctx(t), spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Resize(sandbox.WindowSize{Cols: 100, Rows: 40}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.WriteStdin([]byte("word\nline\n")); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseStdin(); err != nil {
		t.Fatal(err)
	}
	r := drain(t, s)
	for _, want := range []string{"/dev/pts/", "40 100", "got word", "line\r\n", "end"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("no %q in %q", want, r.out)
		}
	}
	if r.exit.Code != 0 {
		t.Errorf("exit %+v", r.exit)
	}
}

func TestOutputIsKeptAndBounded(t *testing.T) {
	b, _ := newRooted(t)
	const total = 8 << 20
	spec := argv("sh", "-c", fmt.Sprintf("head -c %d /dev/zero", total))
	p, err := b.Start(ctx(t), spec) // nobody reads
	if err != nil {
		t.Fatal(err)
	}
	p = waitExit(t, b, p.ID, 20*time.Second)
	testenv.Eventually(t, 5*time.Second, "all output to be in", func() bool {
		p, err = b.Process(ctx(t), p.ID)
		return err == nil && p.Output.End == total
	})
	if p.Output.Dropped != total-sandbox.DefaultOutput || p.Output.Start != p.Output.Dropped {
		t.Errorf("never read: %+v", p.Output)
	}
	s, err := b.Attach(ctx(t), p.ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	o, err := s.Next()
	if err != nil || o.Dropped != p.Output.Start || o.Offset != p.Output.Start {
		t.Errorf("first piece at %d after %d missing, %v", o.Offset, o.Dropped, err)
	}
	rest := len(o.Data) + len(drain(t, s).out)
	if rest != sandbox.DefaultOutput {
		t.Errorf("%d bytes kept", rest)
	}
	// Control: a reader that reads loses nothing of the same output.
	r, err := b.run(spec)
	if err != nil || len(r.out) != total {
		t.Errorf("with a reader: %d bytes, %v", len(r.out), err)
	}
	if p, err = b.Process(ctx(t), r.proc.ID); err != nil || p.Output.Dropped != 0 {
		t.Errorf("with a reader: %+v, %v", p.Output, err)
	}
}

func TestSlowReaderLosesNothingAndStalledOneDoesNotHold(t *testing.T) {
	b, _ := newRooted(t)
	const total = 6 << 20
	spec := argv("sh", "-c", fmt.Sprintf("head -c %d /dev/zero", total))
	s, err := b.Exec(ctx(t), spec)
	if err != nil {
		t.Fatal(err)
	}
	got := int64(0)
	for {
		o, err := s.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got += int64(len(o.Data))
		<-time.After(20 * time.Millisecond) // a client slower than the process
	}
	if got != total {
		t.Errorf("slow reader got %d of %d", got, total)
	}
	stalled, err := b.Exec(ctx(t), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer stalled.Close()
	p := waitExit(t, b, stalled.Process().ID, 20*time.Second) // only once it no longer holds
	testenv.Eventually(t, 5*time.Second, "the rest", func() bool {
		p, err = b.Process(ctx(t), p.ID)
		return err == nil && p.Output.End == total
	})
	if p.Output.Dropped == 0 {
		t.Errorf("a stalled reader cost nothing: %+v", p.Output)
	}
	r := drain(t, stalled)
	if len(r.out) >= total {
		t.Errorf("stalled reader got everything: %d", len(r.out))
	}
}

func TestAttachGoesOnWhereItStopped(t *testing.T) {
	b, _ := newRooted(t)
	s, err := b.Exec(ctx(t), argv("sh", "-c", "i=0; while [ $i -lt 300 ]; do echo line $i; i=$((i+1)); [ $i = 100 ] && sleep 0.3; done"))
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	offset := int64(0)
	for offset < 400 {
		o, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		got.Write(o.Data)
		offset = o.Offset + int64(len(o.Data))
	}
	_ = s.Close()
	again, err := b.Attach(ctx(t), s.Process().ID, offset)
	if err != nil {
		t.Fatal(err)
	}
	got.WriteString(drain(t, again).out)
	var want strings.Builder
	for i := range 300 {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	if got.String() != want.String() {
		t.Errorf("got %d bytes, want %d", got.Len(), want.Len())
	}
}

func TestEvents(t *testing.T) {
	b, _ := newRooted(t)
	b.sh("true")
	ev, err := b.Events(ctx(t), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer ev.Close()
	next := func() guest.Event {
		e, err := ev.Next()
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	if e := next(); e.Type != "started" || e.Live != 1 || e.Seq != 1 {
		t.Errorf("first %+v", e)
	}
	if e := next(); e.Type != "exited" || e.Live != 0 || e.Process.Exit == nil || e.Process.Exit.Code != 0 {
		t.Errorf("second %+v", e)
	}
	for range 400 {
		b.sh("exit 0")
	}
	old, err := b.Events(ctx(t), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if e, err := old.Next(); err != nil || e.Type != "lost" {
		t.Errorf("after a gap: %+v %v", e, err)
	}
	list, err := b.Processes(ctx(t))
	if err != nil || len(list) > 64 {
		t.Errorf("%d processes kept, %v", len(list), err)
	}
}

func TestUnreachable(t *testing.T) {
	b, _ := newRooted(t)
	if _, err := b.Ping(ctx(t)); err != nil {
		t.Fatalf("control: %v", err)
	}
	ev, err := b.Events(ctx(t), 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = b.cmd.Process.Kill()
	_, _ = b.cmd.Process.Wait()
	if _, err := ev.Next(); sandbox.CodeOf(err) != "sandbox_unreachable" {
		t.Errorf("stream: %v", err)
	}
	if _, err := b.Ping(ctx(t)); sandbox.CodeOf(err) != "sandbox_unreachable" || !errors.Is(sandbox.ClassOf(err), sandbox.ErrUnavailable) {
		t.Errorf("ping: %v", err)
	}
}

func TestOpenFilesLimit(t *testing.T) {
	b, _ := newRooted(t, func(c *guest.Config) { c.OpenFiles = 777 })
	if got := b.sh("ulimit -Sn; ulimit -Hn"); got != "777\n777" {
		t.Errorf("limit %q", got)
	}
	// A terminal and many processes still find descriptors.
	for range 40 {
		if _, err := b.Start(ctx(t), argv("sleep", "100")); err != nil {
			t.Fatal(err)
		}
	}
	control, _ := newRooted(t)
	if got := control.sh("ulimit -Hn"); got == "777" {
		t.Errorf("without a limit: %s", got)
	}
}

// TestOneConnectionAfterAnother: exec, late input, a new root with its
// descriptors and a failed command, all on what is kept of the first
// connection.
func TestOneConnectionAfterAnother(t *testing.T) {
	b, _ := newRooted(t)
	s, err := b.Exec(ctx(t), sandbox.ProcessSpec{Argv: []string{"true"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	for err == nil { // until the end is told
		_, err = s.WriteStdin([]byte("too late"))
		if _, nerr := s.Next(); nerr != nil {
			break
		}
	}
	cfg := b.config()
	cfg.Root, _ = b.newRoot()
	if err := b.Configure(ctx(t), cfg); err != nil {
		t.Fatal(err)
	}
	if got := b.sh("cat /etc/marker"); got != "2" {
		t.Errorf("root %q", got)
	}
	if _, err := b.run(argv("no-such-command")); sandbox.CodeOf(err) != "command_not_found" {
		t.Error(err)
	}
	for range 3 {
		if got := b.sh("echo x"); got != "x" {
			t.Error(got)
		}
	}
	if _, err := s.WriteStdin([]byte("x")); err == nil {
		t.Error("input to a process whose connection was given back")
	}
	b.CloseIdle()
	b.sh("true")
}
