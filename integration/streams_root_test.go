//go:build root

package integration

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// maxDaemonRSS bounds the daemon's memory whatever clients do or leave undone.
const maxDaemonRSS = 128 << 20

// emulated tells whether the cpu is an interpreter: amounts of data, not what
// is asserted, are smaller there.
func emulated() bool {
	b, err := os.ReadFile("/proc/cpuinfo")
	return err == nil && (bytes.Contains(b, []byte("QEMU Virtual CPU")) || bytes.Contains(b, []byte("TCG")))
}

// amount chooses how many bytes to move: natively, at full length, emulated.
func amount(native, full, slow int64) int64 {
	if emulated() {
		return slow
	}
	if os.Getenv("SANDBOXD_SOAK") != "" {
		return full
	}
	return native
}

// open starts a command and returns the stream; it is closed with the test.
func (d *daemon) open(t testing.TB, ref string, spec sandbox.ProcessSpec) sandbox.ProcessIO {
	t.Helper()
	p, err := d.Exec(t.Context(), ref, spec)
	if err != nil {
		t.Fatalf("exec %q: %v", spec.Argv, err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// ended waits for a process's end by its record, without reading its output.
func (d *daemon) ended(t testing.TB, within time.Duration, ref string, id sandbox.ProcessID) sandbox.Process {
	t.Helper()
	var p sandbox.Process
	testenv.Eventually(t, within, fmt.Sprintf("process %s ends", id), func() bool {
		var err error
		if p, err = d.Process(t.Context(), ref, id); err != nil {
			t.Fatal(err)
		}
		return p.Exit != nil
	})
	return p
}

// tally is what a reader got: the bytes are counted and hashed, not kept.
type tally struct {
	bytes, dropped int64
	sum            hash.Hash
	exit           sandbox.ExitStatus
}

func (y *tally) hex() string { return hex.EncodeToString(y.sum.Sum(nil)) }

// count reads a stream to its end, and checks that offsets have no hole that
// was not told. after, if not nil, is called with the length of each piece.
func count(t testing.TB, p sandbox.ProcessIO, from int64, after func(int)) *tally {
	t.Helper()
	y := &tally{sum: sha256.New()}
	for at := from; ; {
		o, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("after %d bytes: %v", y.bytes, err)
		}
		if o.Offset != at+o.Dropped {
			t.Fatalf("output at %d after %d, with %d told as dropped", o.Offset, at, o.Dropped)
		}
		y.bytes += int64(len(o.Data))
		y.dropped += o.Dropped
		y.sum.Write(o.Data)
		at = o.Offset + int64(len(o.Data))
		if after != nil {
			after(len(o.Data))
		}
	}
	exit, ok := p.Exit()
	if !ok {
		t.Fatal("the output ended without an exit status")
	}
	y.exit = exit
	return y
}

// numbers is what seq 1 n writes: each byte differs from its neighbours, so
// one lost, doubled or moved changes the sum.
func numbers(w io.Writer, n int64) (size int64) {
	buf := make([]byte, 0, 1<<16)
	flush := func() {
		k, _ := w.Write(buf) // a hash or a buffer: neither fails
		size += int64(k)
		buf = buf[:0]
	}
	for i := range n {
		buf = append(strconv.AppendInt(buf, i+1, 10), '\n')
		if len(buf) > 1<<16-32 {
			flush()
		}
	}
	flush()
	return size
}

// latency is the median time of running true in a sandbox.
func (d *daemon) latency(t testing.TB, ref string) time.Duration {
	t.Helper()
	var took []time.Duration
	for range 15 {
		start := time.Now()
		d.exec(t, ref, "true")
		took = append(took, time.Since(start))
	}
	return median(took)
}

func median(list []time.Duration) time.Duration {
	list = slices.Sorted(slices.Values(list))
	return list[len(list)/2]
}

// TestClientThatNeverReads opens a stream and takes nothing from it. The
// process must run on to its end, the daemon's memory must stay small, others
// must not feel it, and what was lost must be told.
func TestClientThatNeverReads(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "loud"})
	d.create(t, sandbox.Spec{Name: "other"})
	size := amount(512<<20, 10<<30, 48<<20)
	d.latency(t, "other") // the first ones warm up
	// The control: a neighbour as busy whose output is taken.
	busy := d.open(t, "loud", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "yes | cat >/dev/null"}})
	d.latency(t, "other")
	before := d.latency(t, "other")
	if err := d.SignalProcess(t.Context(), "loud", busy.Process().ID, "SIGKILL"); err != nil {
		t.Fatal(err)
	}
	d.ended(t, time.Minute, "loud", busy.Process().ID)

	p := d.open(t, "loud", sandbox.ProcessSpec{Argv: []string{"sh", "-c", fmt.Sprintf("yes | head -c %d", size)}})
	var during []time.Duration
	var most int64
	for {
		rec, err := d.Process(t.Context(), "loud", p.Process().ID)
		if err != nil {
			t.Fatal(err)
		}
		if rec.Exit != nil {
			break
		}
		if rec.Output.End > 0 { // it flows
			during = append(during, d.latency(t, "other"))
		}
		most = max(most, d.memory(t, "VmRSS"))
	}
	rec := d.ended(t, time.Minute, "loud", p.Process().ID)
	testenv.Eventually(t, time.Minute, "all output has come", func() bool {
		rec = d.ended(t, time.Minute, "loud", p.Process().ID)
		return rec.Output.End == size
	})
	if rec.Exit.Code != 0 {
		t.Errorf("the process ended %+v", rec.Exit)
	}
	if len(during) == 0 {
		t.Error("the process was over before anything could be measured: the size is too small for this machine")
		during = append(during, 0)
	} else if m := median(during); m > 5*before {
		t.Errorf("exec elsewhere took %v while nobody read the stream, %v beside a busy neighbour", m, before)
	}
	high := d.memory(t, "VmHWM")
	if most > maxDaemonRSS || high > maxDaemonRSS {
		t.Errorf("the daemon's memory reached %d MiB (%d MiB at its highest), at most %d wanted", most>>20, high>>20, maxDaemonRSS>>20)
	}
	t.Logf("%d MiB unread: daemon RSS %d MiB, peak %d MiB; exec elsewhere %v before, at most %v during; dropped %d",
		size>>20, most>>20, high>>20, before, slices.Max(during), rec.Output.Dropped)
	if rec.Output.Dropped == 0 || rec.Output.Dropped > size {
		t.Errorf("the record tells %d bytes dropped of %d nobody read", rec.Output.Dropped, size)
	}

	// Whoever comes late is told what is missing and gets the rest.
	late, err := d.Attach(t.Context(), "loud", rec.ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	y := count(t, late, 0, nil)
	if y.dropped != rec.Output.Start || y.bytes != size-rec.Output.Start || y.dropped == 0 || y.bytes == 0 {
		t.Errorf("a late reader got %d and %d dropped; the record keeps %+v", y.bytes, y.dropped, rec.Output)
	}
	// So is the one who slept through it: each byte was sent or told as lost.
	if y := count(t, p, 0, nil); y.bytes+y.dropped != size || y.dropped == 0 {
		t.Errorf("the sleeper got %d and %d dropped, together not %d", y.bytes, y.dropped, size)
	}
}

// TestReaderGetsEveryByte is the control of TestClientThatNeverReads.
func TestReaderGetsEveryByte(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "loud"})
	for _, c := range []struct {
		name string
		n    int64
		// pause is taken after each KiB read: a slow reader, not an absent one.
		pause time.Duration
	}{
		{"fast", amount(30_500_000, 120_000_000, 3_000_000), 0},
		{"slow", 700_000, 500 * time.Microsecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := sha256.New()
			size := numbers(want, c.n)
			start := time.Now()
			p := d.open(t, "loud", sandbox.ProcessSpec{Argv: []string{"seq", "1", strconv.FormatInt(c.n, 10)}})
			y := count(t, p, 0, func(n int) {
				time.Sleep(time.Duration(n>>10) * c.pause) //nolint:forbidigo // a reader that is slow, on purpose
			})
			if y.bytes != size || y.dropped != 0 || y.exit.Code != 0 {
				t.Errorf("got %d of %d bytes, %d dropped, exit %+v", y.bytes, size, y.dropped, y.exit)
			}
			if got := hex.EncodeToString(want.Sum(nil)); y.hex() != got {
				t.Errorf("sha256 %s, want %s", y.hex(), got)
			}
			if rec := d.ended(t, time.Minute, "loud", p.Process().ID); rec.Output.Dropped != 0 || rec.Output.End != size {
				t.Errorf("record %+v", rec.Output)
			}
			took := time.Since(start)
			t.Logf("%d MiB in %v, %.0f MiB/s; daemon peak %d MiB", size>>20, took, float64(size>>20)/took.Seconds(), d.memory(t, "VmHWM")>>20)
		})
	}
	if high := d.memory(t, "VmHWM"); high > maxDaemonRSS {
		t.Errorf("the daemon's memory reached %d MiB", high>>20)
	}
}

// TestReattach reads one output from many offsets, as a stream and as plain
// bytes, while the process runs and after.
func TestReattach(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "s"})
	var want bytes.Buffer
	numbers(&want, 100_000)
	size := int64(want.Len())
	p, err := d.StartProcess(t.Context(), "s", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "seq 1 100000; while ! [ -e /tmp/go ]; do sleep 0.05; done; echo last"}, Tag: "bg"})
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "the output is there", func() bool {
		rec, err := d.Process(t.Context(), "s", p.ID)
		return err == nil && rec.Output.End == size
	})
	// The logs of a process in the background, while it runs.
	logs := func(offset int64, follow bool) string {
		r, err := d.Output(t.Context(), "s", p.ID, offset, follow)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if got := logs(-1, false); got != want.String() {
		t.Errorf("logs: %d bytes, want %d", len(got), size)
	}
	if got := logs(size-7, false); got != want.String()[size-7:] {
		t.Errorf("logs from near the end: %q", got)
	}
	// A stream taken up half way, broken off, and taken up again.
	one, err := d.Attach(t.Context(), "s", p.ID, 1000)
	if err != nil {
		t.Fatal(err)
	}
	o, err := one.Next()
	if err != nil || o.Offset != 1000 || !strings.HasPrefix(want.String()[1000:], string(o.Data)) {
		t.Fatalf("attached at 1000: %d bytes at %d, %v", len(o.Data), o.Offset, err)
	}
	next := o.Offset + int64(len(o.Data))
	if err := one.Close(); err != nil {
		t.Fatal(err)
	}
	follower := make(chan string, 1)
	go func() {
		r, err := d.Output(context.WithoutCancel(t.Context()), "s", p.ID, size-3, true)
		if err != nil {
			follower <- err.Error()
			return
		}
		defer r.Close()
		b, err := io.ReadAll(r)
		follower <- fmt.Sprint(string(b), err)
	}()
	d.sh(t, "s", "touch /tmp/go")
	want.WriteString("last\n")
	if rec := d.ended(t, time.Minute, "s", p.ID); rec.Tag != "bg" || rec.Exit.Code != 0 {
		t.Errorf("record %+v", rec)
	}
	select {
	case got := <-follower:
		if got != want.String()[size-3:]+"<nil>" {
			t.Errorf("a follower got %q", got)
		}
	case <-time.After(time.Minute):
		t.Error("a follower did not see the end")
	}
	for _, off := range []int64{next, 0, 1, 77_777, size - 1, size, size + 4, size + 5} {
		again, err := d.Attach(t.Context(), "s", p.ID, off)
		if err != nil {
			t.Errorf("attach at %d: %v", off, err)
			continue
		}
		r, err := collect(again)
		if err != nil || r.stdout != want.String()[off:] || r.dropped != 0 {
			t.Errorf("attached at %d: %d bytes, %d dropped, %v; want %d bytes", off, len(r.stdout), r.dropped, err, want.Len()-int(off))
		}
		_ = again.Close()
	}
}

// TestStreamsApart keeps stdout, stderr and their order.
func TestStreamsApart(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "s"})
	r := d.exec(t, "s", "sh", "-c", "i=0; while [ $i -lt 500 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done; exit 3")
	var out, errs strings.Builder
	for i := range 500 {
		fmt.Fprintf(&out, "o%d\n", i)
		fmt.Fprintf(&errs, "e%d\n", i)
	}
	if r.stdout != out.String() || r.stderr != errs.String() || r.exit.Code != 3 {
		t.Errorf("stdout %d bytes, stderr %d bytes, exit %+v", len(r.stdout), len(r.stderr), r.exit)
	}
	// On a terminal they are one.
	r, err := d.try(t.Context(), "s", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "echo o; echo e >&2"}, TTY: &sandbox.WindowSize{Cols: 80, Rows: 24}})
	if err != nil || r.stdout != "o\r\ne\r\n" || r.stderr != "" {
		t.Errorf("on a terminal: %q %q %v", r.stdout, r.stderr, err)
	}
}

// TestStdin sends random bytes through cat and back.
func TestStdin(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "s"})
	size := amount(64<<20, 1<<30, 8<<20)
	p := d.open(t, "s", sandbox.ProcessSpec{Argv: []string{"cat"}, Stdin: true})
	sent := sha256.New()
	failed := make(chan error, 1)
	go func() {
		source := rand.NewChaCha8([32]byte{1})
		buf := make([]byte, 100_003) // never a whole number of frames or pages
		for left := size; left > 0; {
			b := buf[:min(left, int64(len(buf)))]
			_, _ = source.Read(b) // never fails
			sent.Write(b)
			if _, err := p.WriteStdin(b); err != nil {
				failed <- err
				return
			}
			left -= int64(len(b))
		}
		failed <- p.CloseStdin()
	}()
	y := count(t, p, 0, nil)
	if err := <-failed; err != nil {
		t.Fatalf("write: %v", err)
	}
	if y.bytes != size || y.dropped != 0 || y.exit.Code != 0 || y.hex() != hex.EncodeToString(sent.Sum(nil)) {
		t.Errorf("%d of %d bytes came back, %d dropped, exit %+v, sha256 %s", y.bytes, size, y.dropped, y.exit, y.hex())
	}
	// Without stdin there is nothing to read, and it ends at once.
	if r := d.exec(t, "s", "wc", "-c"); strings.TrimSpace(r.stdout) != "0" {
		t.Errorf("without stdin: %q", r.stdout)
	}
	// A process that reads nothing does not hold its writer for ever.
	q := d.open(t, "s", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "exec 0<&-; echo closed; sleep 0.1"}, Stdin: true})
	go func() { _, _ = q.WriteStdin(make([]byte, 8<<20)) }()
	if y := count(t, q, 0, nil); y.exit.Code != 0 {
		t.Errorf("with stdin refused: %+v", y.exit)
	}
}

// TestTerminal runs on a terminal, resizes it and ends input.
func TestTerminal(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "s"})
	p := d.open(t, "s", sandbox.ProcessSpec{
		Argv: []string{"sh", "-c", `stty size; trap 'resized=1' WINCH; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && tty
			while [ -z "$resized" ]; do sleep 0.02; done; stty size; while read line; do echo "got $line"; done; echo end`},
		TTY: &sandbox.WindowSize{Cols: 81, Rows: 25},
	})
	var all strings.Builder
	until := func(want string) {
		t.Helper()
		for !strings.Contains(all.String(), want) {
			o, err := p.Next()
			if err != nil {
				t.Fatalf("waiting for %q: %v; got %q", want, err, all.String())
			}
			all.Write(o.Data)
		}
	}
	until("25 81\r\n")
	until("/dev/pts/")
	if err := p.Resize(sandbox.WindowSize{Cols: 132, Rows: 50}); err != nil {
		t.Fatal(err)
	}
	until("50 132\r\n")
	if _, err := p.WriteStdin([]byte("hello\n")); err != nil {
		t.Fatal(err)
	}
	until("got hello\r\n")
	if err := p.CloseStdin(); err != nil { // ^D
		t.Fatal(err)
	}
	until("end\r\n")
	if y := count(t, p, int64(all.Len()), nil); y.exit.Code != 0 {
		t.Errorf("exit %+v", y.exit)
	}
	if r := d.exec(t, "s", "sh", "-c", "tty; stty size"); !strings.Contains(r.stdout, "not a tty") || r.exit.Code == 0 {
		t.Errorf("without a terminal: %q, exit %d", r.stdout, r.exit.Code)
	}
}

// marked waits inside until the number of processes whose environment has the
// mark is as the test(1) condition says, as "-ge 6". One command does the
// waiting: PID 1 keeps the records of a limited number of ended ones.
func (d *daemon) marked(t testing.TB, ref, mark, condition string) {
	t.Helper()
	r := d.exec(t, ref, "sh", "-c", `for i in $(seq 600); do
		n=$(cat /proc/[0-9]*/environ 2>/dev/null | tr '\0' '\n' | grep -c '^`+mark+`=on$'); [ $n `+condition+` ] && exit 0; sleep 0.05
	done; echo "there are $n:"; ps -ef; exit 1`)
	if r.exit.Code != 0 {
		t.Fatalf("processes marked %s: want %s; %s", mark, condition, r.stdout)
	}
}

// family is a shell script whose process has a child, a grandchild in a
// session of its own, and one more that does not listen to TERM.
const family = `sleep 1000 & setsid sh -c 'sleep 1000 & setsid sleep 1000' & setsid sh -c 'trap "" TERM; while :; do sleep 1; done' & echo up; wait`

// TestTimeoutEndsTheTree ends a process that runs over its time, with all it
// started.
func TestTimeoutEndsTheTree(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "s"})
	p := d.open(t, "s", sandbox.ProcessSpec{Argv: []string{"sh", "-c", family}, Env: map[string]string{"LATE": "on"}, TimeoutSeconds: 10})
	q := d.open(t, "s", sandbox.ProcessSpec{Argv: []string{"sh", "-c", family}, Env: map[string]string{"INTIME": "on"}, TimeoutSeconds: 1000})
	d.marked(t, "s", "INTIME", "-ge 6") // the control's family is complete
	if _, err := p.Next(); err != nil {
		t.Fatal(err)
	}
	y := count(t, p, 3, nil)
	if !y.exit.TimedOut || y.exit.Signal != "SIGTERM" || y.exit.Code != 128+15 {
		t.Errorf("exit %+v", y.exit)
	}
	d.marked(t, "s", "LATE", "-eq 0")
	// What had time lives on, and goes by a signal, tree and all.
	d.marked(t, "s", "INTIME", "-ge 6")
	if rec, err := d.Process(t.Context(), "s", q.Process().ID); err != nil || rec.Exit != nil {
		t.Errorf("the control: %+v, %v", rec.Exit, err)
	}
	if err := q.Signal("SIGKILL"); err != nil {
		t.Fatal(err)
	}
	d.marked(t, "s", "INTIME", "-eq 0")
	rec := d.ended(t, 10*time.Second, "s", q.Process().ID)
	if rec.Exit.TimedOut || rec.Exit.OOM || rec.Exit.Signal != "SIGKILL" || rec.Exit.Code != 128+9 {
		t.Errorf("killed: %+v", rec.Exit)
	}
}

// TestSignals sends signals that are caught, fatal, unknown and too late.
func TestSignals(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "s"})
	p := d.open(t, "s", sandbox.ProcessSpec{Argv: []string{"sh", "-c", `trap 'echo usr1' USR1; trap 'echo hup; exit 5' HUP; echo up; while :; do sleep 0.05; done`}})
	next := func(want string) {
		t.Helper()
		if o, err := p.Next(); err != nil || string(o.Data) != want+"\n" {
			t.Fatalf("got %q, %v; want %s", o.Data, err, want)
		}
	}
	next("up")
	// sleep has no handler: it dies of it, the shell lives.
	if err := d.SignalProcess(t.Context(), "s", p.Process().ID, "SIGUSR1"); err != nil {
		t.Fatal(err)
	}
	for {
		o, err := p.Next()
		if err != nil {
			t.Fatal(err)
		}
		if o.Stream == sandbox.Stdout {
			if string(o.Data) != "usr1\n" {
				t.Fatalf("got %q", o.Data)
			}
			break
		}
	}
	if err := p.Signal("SIGNONSENSE"); sandbox.CodeOf(err) != "invalid_signal" {
		t.Errorf("an unknown signal: %v", err)
	}
	if err := p.Signal("SIGHUP"); err != nil {
		t.Fatal(err)
	}
	r, err := collect(p)
	if err != nil || r.stdout != "hup\n" || r.exit.Code != 5 || r.exit.Signal != "" {
		t.Errorf("%+v, %v", r, err)
	}
	if err := d.SignalProcess(t.Context(), "s", p.Process().ID, "SIGTERM"); sandbox.CodeOf(err) != "process_ended" {
		t.Errorf("a signal after the end: %v", err)
	}
}

// TestDisconnectKillsNothing loses the client in the middle of a command.
func TestDisconnectKillsNothing(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "s"})
	ctx, vanish := context.WithCancel(t.Context())
	p, err := d.Exec(ctx, "s", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "echo before; while ! [ -e /tmp/go ]; do sleep 0.05; done; echo after; exit 9"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	if o, err := p.Next(); err != nil || string(o.Data) != "before\n" {
		t.Fatalf("%q, %v", o.Data, err)
	}
	vanish()
	if _, err := p.Next(); !errors.Is(err, context.Canceled) {
		t.Fatalf("the client is still there: %v", err)
	}
	if rec, err := d.Process(t.Context(), "s", p.Process().ID); err != nil || rec.Exit != nil {
		t.Fatalf("after the client left: %+v, %v", rec.Exit, err)
	}
	d.sh(t, "s", "touch /tmp/go")
	if rec := d.ended(t, 30*time.Second, "s", p.Process().ID); rec.Exit.Code != 9 {
		t.Errorf("%+v", rec.Exit)
	}
	again, err := d.Attach(t.Context(), "s", p.Process().ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if r, err := collect(again); err != nil || r.stdout != "before\nafter\n" {
		t.Errorf("%q, %v", r.stdout, err)
	}
}
