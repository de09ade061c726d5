//go:build root

package integration

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// smallVolume keeps the loop image of these tests small.
const smallVolume = "volume: {size: 640m}\n"

// zeros reads n zero bytes.
func zeros(n int64) io.Reader { return io.LimitReader(zero{}, n) }

type zero struct{}

func (zero) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// usage reads the counters now.
func (d *daemon) usage(t testing.TB, ref string) sandbox.Usage {
	t.Helper()
	u, err := d.Usage(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// gone waits for a sandbox's end.
func (d *daemon) gone(t testing.TB, ref sandbox.ID) sandbox.Sandbox {
	t.Helper()
	var sb sandbox.Sandbox
	testenv.Eventually(t, time.Minute, fmt.Sprintf("%s ends", ref), func() bool {
		var err error
		if sb, err = d.Sandbox(t.Context(), string(ref)); err != nil {
			t.Fatal(err)
		}
		return sb.Status.Terminal()
	})
	return sb
}

// TestMemoryLimit allocates beyond memory.max and within it.
func TestMemoryLimit(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers)
	d := install(t, smallVolume)
	tight := d.create(t, sandbox.Spec{Name: "tight", Limits: sandbox.Limits{MemoryBytes: 48 << 20}})
	wide := d.create(t, sandbox.Spec{Name: "wide", Limits: sandbox.Limits{MemoryBytes: 192 << 20}})
	alloc := func(mib int) []string {
		return []string{"dd", "if=/dev/zero", "of=/dev/null", "count=1", fmt.Sprintf("bs=%dM", mib)}
	}
	// A kill by hand is not called an OOM.
	if r := d.exec(t, "tight", "sh", "-c", "kill -KILL $$"); r.exit.Code != 137 || r.exit.OOM {
		t.Errorf("killed by hand: %+v", r.exit)
	}
	if r := d.exec(t, "tight", alloc(16)...); r.exit.Code != 0 {
		t.Errorf("16 of 48 MiB: %+v %s", r.exit, r.stderr)
	}
	if u := d.usage(t, "tight"); u.OOMKills != 0 {
		t.Errorf("before: %d OOM kills", u.OOMKills)
	}
	bystander, err := d.StartProcess(t.Context(), "tight", sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	r := d.exec(t, "tight", alloc(96)...)
	if !r.exit.OOM || r.exit.Signal != "SIGKILL" || r.exit.Code != 137 {
		t.Errorf("96 of 48 MiB: %+v", r.exit)
	}
	if rec := d.ended(t, 10*time.Second, "tight", bystander.ID); !rec.Exit.OOM {
		t.Errorf("the workload does not go as a whole: %+v", rec.Exit)
	}
	if u := d.usage(t, "tight"); u.OOMKills == 0 || u.MemoryPeakBytes > 49<<20 {
		t.Errorf("after: %d OOM kills, peak %d bytes", u.OOMKills, u.MemoryPeakBytes)
	}
	// PID 1 outlives it and runs the next one.
	if got := d.sh(t, "tight", "echo fine"); got != "fine" {
		t.Errorf("after the kill: %q", got)
	}
	if sb, err := d.Sandbox(t.Context(), "tight"); err != nil || sb.Status != sandbox.StatusRunning || sb.InitPID != tight.InitPID {
		t.Errorf("after the kill: %s, PID 1 %d, %v; had %d", sb.Status, sb.InitPID, err, tight.InitPID)
	}
	if r := d.exec(t, "wide", alloc(96)...); r.exit.Code != 0 || r.exit.OOM {
		t.Errorf("96 of 192 MiB: %+v %s", r.exit, r.stderr)
	}
	// As the main process it takes the sandbox with it, and the reason says why.
	for _, c := range []struct {
		sb     sandbox.Sandbox
		reason sandbox.Reason
		code   int
	}{{tight, sandbox.ReasonOOM, 137}, {wide, sandbox.ReasonExited, 0}} {
		if _, err := d.StartProcess(t.Context(), string(c.sb.ID), sandbox.ProcessSpec{Argv: alloc(96), Main: true}); err != nil {
			t.Fatal(err)
		}
		sb := d.gone(t, c.sb.ID)
		if sb.Reason != c.reason || sb.ExitCode == nil || *sb.ExitCode != c.code {
			t.Errorf("%s ended %s, %v; want %s, %d", c.sb.Spec.Name, sb.Reason, sb.ExitCode, c.reason, c.code)
		}
	}
}

// TestCPULimit burns cpu time under a fifth of a cpu and under a whole one.
func TestCPULimit(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers)
	d := install(t, smallVolume)
	const quota = 0.2
	d.create(t, sandbox.Spec{Name: "fifth", Limits: sandbox.Limits{CPUs: quota}})
	d.create(t, sandbox.Spec{Name: "whole", Limits: sandbox.Limits{CPUs: 1}})
	burn := func(ref string) (stop func()) {
		p, err := d.StartProcess(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{"sh", "-c", "while :; do :; done"}})
		if err != nil {
			t.Fatal(err)
		}
		return func() { _ = d.SignalProcess(t.Context(), ref, p.ID, "SIGKILL") }
	}
	// window measures cpus used over some periods of cpu.max, since a moment.
	window := func(ref string, since time.Time, used float64) float64 {
		time.Sleep(3 * time.Second) //nolint:forbidigo // the window that is measured
		return (d.usage(t, ref).CPUSeconds - used) / time.Since(since).Seconds()
	}
	stop := burn("fifth")
	throttled := d.usage(t, "fifth").CPUThrottled
	// On a busy machine single windows differ: the longer it is measured, the
	// nearer to the limit.
	var got []float64
	used, since := d.usage(t, "fifth").CPUSeconds, time.Now()
	for range 8 {
		g := window("fifth", since, used)
		if got = append(got, g); math.Abs(g-quota) <= quota/10 {
			break
		}
	}
	if last := got[len(got)-1]; math.Abs(last-quota) > quota/10 {
		t.Errorf("used %.3f cpus in windows that end every 3 s, want %.2f within a tenth", got, quota)
	}
	if now := d.usage(t, "fifth").CPUThrottled; now <= throttled {
		t.Errorf("throttled periods: %d, then %d", throttled, now)
	}
	stop()
	defer burn("whole")()
	control := window("whole", time.Now(), d.usage(t, "whole").CPUSeconds)
	if control < 2*quota {
		t.Errorf("the control used %.3f cpus with a whole one allowed: this machine is too busy to tell", control)
	}
	t.Logf("limit %.2f: used %.3f; limit 1: used %.3f", quota, got, control)
}

// TestCPUCount asks programs inside how many cpus there are.
func TestCPUCount(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers)
	d := install(t, smallVolume)
	for cpus, want := range map[float64]string{0.5: "1", 1: "1", 2: "2"} {
		sb := d.create(t, sandbox.Spec{Limits: sandbox.Limits{CPUs: cpus}})
		if got := d.sh(t, string(sb.ID), "nproc"); got != want {
			t.Errorf("%v cpus: nproc says %s, want %s", cpus, got, want)
		}
	}
}

// TestForkBomb lets one off beneath pids.max.
func TestForkBomb(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers)
	d := install(t, smallVolume)
	const limit = 24
	d.create(t, sandbox.Spec{Name: "bomb", Limits: sandbox.Limits{PIDs: limit}})
	d.create(t, sandbox.Spec{Name: "other"})
	// Below the limit everything starts and nothing is denied.
	if got := d.sh(t, "bomb", "for i in $(seq 10); do sleep 1000 & all=\"$all $!\"; done; kill -0 $all && echo $all | wc -w; kill $all"); got != "10" {
		t.Errorf("10 jobs of %d tasks: %s", limit, got)
	}
	if u := d.usage(t, "bomb"); u.PIDsDenied != 0 || u.PIDsPeak > limit {
		t.Errorf("below the limit: %d forks denied, peak %d", u.PIDsDenied, u.PIDsPeak)
	}
	// bash tries a refused fork again for half a minute; dash gives up at once,
	// and a bomb of it may burn out before it can be killed.
	p, err := d.StartProcess(t.Context(), "bomb", sandbox.ProcessSpec{Argv: []string{"bash", "-c", "bomb() { while :; do bomb & done; }; bomb"}})
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "forks are denied", func() bool { return d.usage(t, "bomb").PIDsDenied > limit })
	u := d.usage(t, "bomb")
	if u.PIDs > limit || u.PIDsPeak > limit {
		t.Errorf("%d tasks, peak %d; at most %d wanted", u.PIDs, u.PIDsPeak, limit)
	}
	// PID 1 answers: with the result, or with the reason why there is none.
	switch r, err := d.try(t.Context(), "bomb", sandbox.ProcessSpec{Argv: []string{"true"}}); {
	case err != nil && sandbox.CodeOf(err) != "pids_exhausted":
		t.Errorf("exec beside the bomb: %v", err)
	case err == nil && r.exit.Code != 0:
		t.Errorf("exec beside the bomb: %+v", r)
	}
	if _, err := d.Files("bomb").Write(t.Context(), "", "/tmp/x", 0o644, strings.NewReader("x")); err != nil {
		t.Errorf("file work beside the bomb: %v", err)
	}
	if got := d.sh(t, "other", "echo fine"); got != "fine" {
		t.Errorf("elsewhere: %q", got)
	}
	if err := d.SignalProcess(t.Context(), "bomb", p.ID, "SIGKILL"); err != nil {
		t.Fatal(err)
	}
	d.ended(t, time.Minute, "bomb", p.ID)
	testenv.Eventually(t, time.Minute, "every task of the bomb is gone", func() bool { return d.usage(t, "bomb").PIDs == 0 })
	if got := d.sh(t, "bomb", "echo fine"); got != "fine" {
		t.Errorf("after the bomb: %q", got)
	}
	t.Logf("%d forks denied", u.PIDsDenied)
}

// tarOf makes an archive of one file.
func tarOf(t testing.TB, name string, size int64) io.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: size, Format: tar.FormatPAX}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(w, zeros(size)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

// wantDiskFull checks the class and code of file work beyond the quota.
func wantDiskFull(t testing.TB, what string, err error) {
	t.Helper()
	if !errors.Is(err, sandbox.ErrExhausted) || sandbox.CodeOf(err) != "disk_full" {
		t.Errorf("%s: %v (%s), want disk_full", what, err, sandbox.CodeOf(err))
	}
}

// TestDiskBytes fills the quota by processes and by file work, from outside
// and from inside, and makes room again.
func TestDiskBytes(t *testing.T) {
	testenv.Need(t, testenv.Quota)
	d := install(t, smallVolume)
	const limit, below, above = 16 << 20, 12 << 20, 24 << 20
	d.create(t, sandbox.Spec{Name: "full", Limits: sandbox.Limits{DiskBytes: limit}})
	d.create(t, sandbox.Spec{Name: "other", Limits: sandbox.Limits{DiskBytes: limit}})
	files := d.Files("full")
	dd := func(ref, path string, n int) result {
		return d.exec(t, ref, "dd", "if=/dev/zero", "of="+path, "bs=64k", fmt.Sprintf("count=%d", n>>16), "conv=fsync")
	}
	remove := func(path string) {
		t.Helper()
		if err := files.Remove(t.Context(), "", path, true); err != nil {
			t.Errorf("remove %s: %v", path, err)
		}
		testenv.Eventually(t, time.Minute, "there is room again", func() bool { return d.usage(t, "full").DiskBytes < 1<<20 })
	}
	within := func(what string) {
		t.Helper()
		if u := d.usage(t, "full"); u.DiskBytes > limit {
			t.Errorf("%s: %d bytes on disk, limit %d", what, u.DiskBytes, limit)
		}
	}
	for _, user := range []string{"root", "nobody"} {
		path := "/tmp/" + user
		write := func(n int) result {
			t.Helper()
			r, err := d.try(t.Context(), "full", sandbox.ProcessSpec{
				Argv: []string{"dd", "if=/dev/zero", "of=" + path, "bs=64k", fmt.Sprintf("count=%d", n>>16), "conv=fsync"}, User: user,
			})
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		if r := write(below); r.exit.Code != 0 {
			t.Errorf("%s: a process below the limit: %s", user, r.stderr)
		}
		if r := write(above); r.exit.Code == 0 || !strings.Contains(r.stderr, "No space left") {
			t.Errorf("%s: a process above the limit: exit %d %s", user, r.exit.Code, r.stderr)
		}
		within(user + "'s process")
		remove(path)
	}

	if _, err := files.Write(t.Context(), "", "/tmp/w", 0o644, zeros(below)); err != nil {
		t.Errorf("file work below the limit: %v", err)
	}
	remove("/tmp/w")
	if _, err := files.Write(t.Context(), "", "/tmp/w", 0o644, strings.NewReader("old")); err != nil {
		t.Fatal(err)
	}
	_, err := files.Write(t.Context(), "", "/tmp/w", 0o644, zeros(above))
	wantDiskFull(t, "file work above the limit", err)
	if got := d.sh(t, "full", "cat /tmp/w; ls -A /tmp"); got != "oldw" {
		t.Errorf("after it: %q, want the old content and no other file", got)
	}
	within("file work")
	remove("/tmp/w")

	if err := files.TarIn(t.Context(), "", "/tmp", tarOf(t, "t", below)); err != nil {
		t.Errorf("an archive below the limit: %v", err)
	}
	remove("/tmp/t")
	wantDiskFull(t, "an archive above the limit", files.TarIn(t.Context(), "", "/tmp", tarOf(t, "t", above)))
	within("an archive")

	// A neighbour has its own account, also while this one is full.
	d.exec(t, "full", "dd", "if=/dev/zero", "of=/tmp/fill", "bs=64k")
	if r := dd("other", "/tmp/x", below); r.exit.Code != 0 {
		t.Errorf("a neighbour: %s", r.stderr)
	}
	// A full sandbox can still be used, emptied, stopped and started.
	if got := d.sh(t, "full", "echo fine"); got != "fine" {
		t.Errorf("in a full sandbox: %q", got)
	}
	if _, err := d.Stop(t.Context(), "full"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Start(t.Context(), "full"); err != nil {
		t.Fatalf("start a full sandbox: %v", err)
	}
	d.sh(t, "full", "rm -r /tmp/*")
	if r := dd("full", "/tmp/again", below); r.exit.Code != 0 {
		t.Errorf("after making room: %s", r.stderr)
	}
}

// TestDiskInodes does the same with the number of files.
func TestDiskInodes(t *testing.T) {
	testenv.Need(t, testenv.Quota)
	d := install(t, smallVolume)
	const limit = 128
	d.create(t, sandbox.Spec{Name: "full", Limits: sandbox.Limits{DiskInodes: limit}})
	d.create(t, sandbox.Spec{Name: "other", Limits: sandbox.Limits{DiskInodes: limit}})
	const touch = "mkdir -p /tmp/d; i=0; while [ $i -lt %d ]; do : > /tmp/d/$i || exit 9; i=$((i+1)); done"
	few, many := fmt.Sprintf(touch, limit/2), fmt.Sprintf(touch, 2*limit)
	d.sh(t, "full", few)
	if r := d.exec(t, "full", "sh", "-c", many); r.exit.Code == 0 || !strings.Contains(r.stderr, "No space left") {
		t.Errorf("%d files of %d: exit %d %s", 2*limit, limit, r.exit.Code, r.stderr)
	}
	if u := d.usage(t, "full"); u.DiskInodes > limit || u.DiskInodes < limit/2 {
		t.Errorf("%d files, limit %d", u.DiskInodes, limit)
	}
	files := d.Files("full")
	_, err := files.Write(t.Context(), "", "/tmp/w", 0o644, strings.NewReader("x"))
	wantDiskFull(t, "file work", err)
	_, err = files.Mkdir(t.Context(), "", "/tmp/m", 0o755)
	wantDiskFull(t, "a directory", err)
	wantDiskFull(t, "an archive", files.TarIn(t.Context(), "", "/tmp", tarOf(t, "t", 1)))
	d.sh(t, "other", few) // a neighbour has its own account
	if err := files.Remove(t.Context(), "", "/tmp/d", true); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "there is room again", func() bool { return d.usage(t, "full").DiskInodes < limit/2 })
	for what, err := range map[string]error{
		"file work": func() error {
			_, err := files.Write(t.Context(), "", "/tmp/w", 0o644, strings.NewReader("x"))
			return err
		}(),
		"a directory": func() error { _, err := files.Mkdir(t.Context(), "", "/tmp/m", 0o755); return err }(),
		"an archive":  files.TarIn(t.Context(), "", "/tmp", tarOf(t, "t", 1)),
	} {
		if err != nil {
			t.Errorf("%s after making room: %v", what, err)
		}
	}
	d.sh(t, "full", few)
}

// TestIOLimit moves the same bytes with a limit and without. fsync does
// nothing in a sandbox, so what stays in the page cache is written when the
// kernel likes; what does not fit its memory waits for the disk.
func TestIOLimit(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers, testenv.Quota)
	d := install(t, smallVolume)
	const rate, memory = 2 << 20, 24 << 20
	// Beneath /usr the image "host" shows the host's own disk, past the volume.
	shared := "/usr/local/share/sbx-it-" + strings.ToLower(rand.Text()[:10])
	t.Cleanup(func() { _ = os.Remove(shared) })
	if err := errors.Join(os.WriteFile(shared, make([]byte, 8<<20), 0o644), run("sync", shared)); err != nil {
		t.Fatal(err)
	}
	d.create(t, sandbox.Spec{Name: "slow", Limits: sandbox.Limits{IOReadBPS: rate, IOWriteBPS: rate, MemoryBytes: memory}})
	d.create(t, sandbox.Spec{Name: "free", Limits: sandbox.Limits{MemoryBytes: memory}})
	d.create(t, sandbox.Spec{Name: "ops", Limits: sandbox.Limits{IOWriteIOPS: 20}})
	for _, ref := range []string{"slow", "free", "ops"} {
		d.sh(t, ref, "dd --version > /tmp/warm")
	}
	took := func(ref string, args ...string) time.Duration {
		t.Helper()
		start := time.Now()
		if r := d.exec(t, ref, append([]string{"dd"}, args...)...); r.exit.Code != 0 {
			t.Fatalf("dd %q: %s", args, r.stderr)
		}
		return time.Since(start)
	}
	for _, c := range []struct {
		name   string
		mib    int
		cached int // MiB that may still be on their way at the end
		args   []string
	}{
		{"direct writes", 8, 0, []string{"if=/dev/zero", "of=/tmp/direct", "bs=64k", "count=128", "oflag=direct"}},
		{"direct reads", 8, 0, []string{"if=/tmp/direct", "of=/dev/null", "bs=64k", "count=128", "iflag=direct"}},
		{"direct reads of the host's files", 8, 0, []string{"if=" + shared, "of=/dev/null", "bs=64k", "count=128", "iflag=direct"}},
		{"buffered writes", 40, memory >> 20, []string{"if=/dev/zero", "of=/tmp/buffered", "bs=64k", "count=640"}},
	} {
		before := d.usage(t, "slow")
		slow, free := took("slow", c.args...), took("free", c.args...)
		after := d.usage(t, "slow")
		read, written := after.IOReadBytes-before.IOReadBytes, after.IOWriteBytes-before.IOWriteBytes
		t.Logf("%s: %d MiB in %v at %d MiB/s, in %v unlimited; counted %.1f MiB read, %.1f written", c.name, c.mib, slow, rate>>20, free,
			float64(read)/(1<<20), float64(written)/(1<<20))
		// The kernel lets a little pass at the start of each slice.
		least := time.Duration(c.mib-c.cached) << 20 * time.Second / rate * 3 / 4
		if slow < least || slow < 2*free {
			t.Errorf("%s: %d MiB took %v at %d MiB/s, %v unlimited; want at least %v", c.name, c.mib, slow, rate>>20, free, least)
		}
		// Counted once, though two devices see it.
		if moved := read + written; moved < uint64(c.mib-c.cached)<<20 || moved > uint64(c.mib)<<20*5/4 {
			t.Errorf("%s: %d MiB are counted as %d bytes read and %d written", c.name, c.mib, read, written)
		}
	}
	ops := []string{"if=/dev/zero", "of=/tmp/ops", "bs=4k", "count=100", "oflag=direct"}
	slow, free := took("ops", ops...), took("free", ops...)
	t.Logf("100 writes in %v at 20 a second, in %v unlimited", slow, free)
	if least := 100 * time.Second / 20 * 3 / 4; slow < least || slow < 2*free {
		t.Errorf("100 writes took %v at 20 a second, %v unlimited; want at least %v", slow, free, least)
	}
}

// TestIOLimitLeavesOthersAlone writes while a neighbour waits for its limit:
// the two share a volume, and must not share the wait.
func TestIOLimitLeavesOthersAlone(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers, testenv.Quota)
	d := install(t, smallVolume)
	d.create(t, sandbox.Spec{Name: "slow", Limits: sandbox.Limits{IOReadBPS: 1 << 20, IOWriteBPS: 1 << 20, MemoryBytes: 64 << 20}})
	d.create(t, sandbox.Spec{Name: "free"})
	write := func() time.Duration {
		t.Helper()
		start := time.Now()
		d.sh(t, "free", "dd if=/dev/zero of=/tmp/x bs=64k count=64 oflag=direct")
		return time.Since(start)
	}
	write()
	alone := write()
	if _, err := d.StartProcess(t.Context(), "slow", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "for i in 1 2 3 4; do dd if=/dev/zero of=/tmp/$i bs=1M count=64 & done; wait"}}); err != nil {
		t.Fatal(err)
	}
	started := d.usage(t, "slow").IOWriteBytes
	testenv.Eventually(t, time.Minute, "the neighbour writes", func() bool { return d.usage(t, "slow").IOWriteBytes > started+2<<20 })
	beside := write()
	t.Logf("4 MiB alone in %v, beside a throttled neighbour in %v", alone, beside)
	if beside > 5*alone+time.Second {
		t.Errorf("4 MiB took %v beside a throttled neighbour, %v alone", beside, alone)
	}
}

// TestOpenFiles opens files up to RLIMIT_NOFILE and beyond.
func TestOpenFiles(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "few", Limits: sandbox.Limits{OpenFiles: 512}})
	d.create(t, sandbox.Spec{Name: "many", Limits: sandbox.Limits{OpenFiles: 1024}})
	const script = `ulimit -n; ulimit -Hn; bash -c 'for i in $(seq 600); do exec {fd}</dev/null || exit 9; done'`
	if r := d.exec(t, "few", "sh", "-c", script); r.stdout != "512\n512\n" || r.exit.Code == 0 || !strings.Contains(r.stderr, "Too many open files") {
		t.Errorf("600 files of 512: %+v", r)
	}
	if r := d.exec(t, "many", "sh", "-c", script); r.stdout != "1024\n1024\n" || r.exit.Code != 0 {
		t.Errorf("600 files of 1024: %+v", r)
	}
	if r := d.exec(t, "few", "sh", "-c", "ulimit -n 513"); r.exit.Code == 0 {
		t.Error("a workload raised its own limit")
	}
	_, err := d.Create(t.Context(), sandbox.Spec{Limits: sandbox.Limits{OpenFiles: 1 << 20}}, "")
	if err != nil && sandbox.CodeOf(err) != "invalid_limits" { // a host may give so many
		t.Errorf("a million files: %v", err)
	}
}

// TestEnforcementTold reads in the record what becomes of each limit here.
func TestEnforcementTold(t *testing.T) {
	d := install(t, smallVolume)
	sb := d.create(t, sandbox.Spec{Limits: sandbox.Limits{
		CPUs: 0.5, MemoryBytes: 64 << 20, PIDs: 100, IOWriteBPS: 1 << 20, OpenFiles: 777, DiskBytes: 64 << 20, DiskInodes: 1000,
	}})
	cgroups, quota := testenv.CgroupControllers.Missing() == nil, testenv.Quota.Missing() == nil
	want := map[string]struct {
		asked    string
		enforced bool
		mend     string
	}{
		"cpu":        {"0.5 cpus", cgroups, "systemd.unified_cgroup_hierarchy=1"},
		"memory":     {"64MiB", cgroups, "systemd.unified_cgroup_hierarchy=1"},
		"pids":       {"100", cgroups, "systemd.unified_cgroup_hierarchy=1"},
		"io":         {"wbps=1048576", cgroups, "systemd.unified_cgroup_hierarchy=1"},
		"disk":       {"64MiB", quota, "Debian's own kernel has it"},
		"inodes":     {"1000 files", quota, "Debian's own kernel has it"},
		"open_files": {"777", true, ""},
		"network":    {"off", true, ""},
	}
	for _, e := range sb.Enforcement {
		w, ok := want[e.Limit]
		delete(want, e.Limit)
		switch {
		case !ok:
			t.Errorf("unknown or repeated limit %q", e.Limit)
		case e.Enforced != w.enforced || !strings.Contains(e.Asked, w.asked):
			t.Errorf("%+v, want enforced %v, asked %s", e, w.enforced, w.asked)
		case e.Enforced && e.Why != "":
			t.Errorf("%s is enforced, and still: %s", e.Limit, e.Why)
		case !e.Enforced && !strings.Contains(e.Why, w.mend):
			t.Errorf("%s is not enforced, and the reason does not tell how to mend it (%s): %q", e.Limit, w.mend, e.Why)
		}
	}
	for limit := range want {
		t.Errorf("nothing is said of limit %s", limit)
	}
}
