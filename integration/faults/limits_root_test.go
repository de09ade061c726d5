//go:build root

package faults

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// pastLimits is how far above its limit a sandbox as a whole may come.
const pastLimits = 1.1

// counted reads one counter of a cgroup file of a sandbox, all parts of its
// lines whose names are as asked added up.
func counted(t testing.TB, d *harness.Daemon, id sandbox.ID, file, name string) (sum float64) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(harness.CgroupRoot(), d.Parent, string(id), file))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		words := strings.Fields(line)
		for i, w := range words {
			text, ok := strings.CutPrefix(w, name+"=")
			if !ok && w == name && i+1 < len(words) {
				text, ok = words[i+1], true
			}
			if n, err := strconv.ParseFloat(text, 64); ok && err == nil {
				sum += n
			}
		}
	}
	return sum
}

// cpuOf is what a process used, in seconds.
func cpuOf(t testing.TB, pid int) float64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	user, _ := strconv.ParseFloat(f[11], 64)
	system, _ := strconv.ParseFloat(f[12], 64)
	return (user + system) / 100
}

// TestWaysPastCPU has PID 1 work for a workload in every way there is: all of
// it stays within the sandbox's cpus. The control is the same without a limit.
func TestWaysPastCPU(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers)
	const cpus = 0.2
	d := harness.Install(t, "pool:\n  size: 0\n")
	run := func(argv ...string) func(context.Context, *testing.T, string) {
		return func(ctx context.Context, t *testing.T, ref string) {
			p, err := d.Exec(ctx, ref, sandbox.ProcessSpec{Argv: argv})
			if err != nil {
				if ctx.Err() == nil {
					t.Error(err)
				}
				return
			}
			defer p.Close()
			for err == nil { // reads all there is
				_, err = p.Next()
			}
		}
	}
	again := func(f func(context.Context, string) error) func(context.Context, *testing.T, string) {
		return func(ctx context.Context, t *testing.T, ref string) {
			for ctx.Err() == nil {
				if err := f(ctx, ref); err != nil && ctx.Err() == nil && sandbox.CodeOf(err) != "answers_full" {
					t.Error(err)
					return
				}
			}
		}
	}
	ways := map[string]func(context.Context, *testing.T, string){
		"output":   run("dd", "if=/dev/zero", "bs=64k"),
		"vmsplice": run("/opt/probe", "vmsplice"),
		"bad sudo": run("/opt/probe", "bad-sudo"),
		"orphans":  run("sh", "-c", "while :; do (true &); done"),
		"listings": again(func(ctx context.Context, ref string) error {
			return d.Files(ref).Each(ctx, "0:0", "/tmp/many", 1, func(sandbox.FileInfo) error { return nil })
		}),
		"archives": again(func(ctx context.Context, ref string) error {
			r, err := d.Files(ref).TarOut(ctx, "0:0", "/tmp/many")
			if err == nil {
				_, err = io.Copy(io.Discard, r)
				_ = r.Close()
			}
			return err
		}),
		"commands": again(func(ctx context.Context, ref string) error {
			_, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: []string{"true"}})
			return err
		}),
	}
	tight := d.New(t, sandbox.Spec{Limits: sandbox.Limits{CPUs: cpus}})
	free := d.New(t, sandbox.Spec{Limits: sandbox.Limits{CPUs: 2}})
	for _, sb := range []sandbox.Sandbox{free, tight} {
		d.GiveProbe(t, string(sb.ID))
		d.Sh(t, string(sb.ID), "mkdir /tmp/many && cd /tmp/many && seq 5000 | xargs touch")
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			// used is how many cpus a sandbox and the daemon used, and the part of PID 1.
			used := func(sb sandbox.Sandbox, enough func(float64) bool) (all, first, daemon float64) {
				ctx, stop := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				defer wg.Wait()
				defer stop()
				for range 2 {
					wg.Go(func() { way(ctx, t, string(sb.ID)) })
				}
				time.Sleep(time.Second) //nolint:forbidigo // what it takes to begin
				for range 4 {
					begin, a, f, m := time.Now(), counted(t, d, sb.ID, "cpu.stat", "usage_usec"), counted(t, d, sb.ID, "init/cpu.stat", "usage_usec"), cpuOf(t, d.PID())
					time.Sleep(3 * time.Second) //nolint:forbidigo // the window that is measured
					s := time.Since(begin).Seconds()
					all = (counted(t, d, sb.ID, "cpu.stat", "usage_usec") - a) / 1e6 / s
					first = (counted(t, d, sb.ID, "init/cpu.stat", "usage_usec") - f) / 1e6 / s
					daemon = (cpuOf(t, d.PID()) - m) / s
					if enough(all) {
						break
					}
				}
				return all, first, daemon
			}
			all, first, daemon := used(tight, func(n float64) bool { return n <= pastLimits*cpus })
			control, its, _ := used(free, func(n float64) bool { return n > 2*pastLimits*cpus })
			t.Logf("of %.2f cpus: %.3f used, %.2f of the limit; PID 1 %.3f, the daemon %.3f; without the limit %.3f, PID 1 %.3f", cpus, all, all/cpus, first, daemon, control, its)
			if all > pastLimits*cpus {
				t.Errorf("%.3f cpus used of %.2f", all, cpus)
			}
			if control < 1.5*pastLimits*cpus {
				t.Errorf("the control used %.3f cpus: this shows nothing", control)
			}
		})
	}
}

// TestWaysPastIO writes by the files API, faster than the sandbox may: what
// reaches the disk for all of it keeps to the rate. The control is the same
// without a limit. Stopped and removed, it holds up nobody with what waits for its turn: nor
// the daemon's end, for which the volume is written out.
func TestWaysPastIO(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers, testenv.Quota)
	const rate, size, seconds = 1 << 17, 1 << 20, 8
	d := harness.Install(t, "pool: {size: 0}\nvolume: {size: 640m}\n")
	device := func() (bytes float64) { // of all writes to the volume, in whosever name
		out, err := exec.CommandContext(t.Context(), "losetup", "--noheadings", "--output", "NAME", "--associated", d.State("volume.img")).Output()
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(strings.TrimSpace(string(out))), "stat"))
		if err != nil {
			t.Fatal(err)
		}
		sectors, err := strconv.ParseFloat(strings.Fields(string(b))[6], 64)
		if err != nil {
			t.Fatal(err)
		}
		return sectors * 512
	}
	rates := map[string]float64{}
	for _, name := range []string{"free", "slow"} {
		limits := sandbox.Limits{MemoryBytes: 32 << 20, DiskBytes: 160 << 20}
		if name == "slow" {
			limits.IOWriteBPS = rate
		}
		sb := d.New(t, sandbox.Spec{Limits: limits})
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					_, _ = d.Files(string(sb.ID)).Write(ctx, "0:0", fmt.Sprint("/tmp/", i, "-", n%4), 0o644, io.LimitReader(zeros{}, size))
				}
			})
		}
		// The kernel writes when it likes, so the disk is asked to.
		wg.Go(func() {
			for ctx.Err() == nil {
				_ = exec.CommandContext(ctx, "nsenter", "--mount", "--target", fmt.Sprint(d.PID()), "sync", "--file-system", d.State("volume")).Run()
			}
		})
		began := time.Now()
		for range 4 { // on a busy machine little is written in some windows: the control has more of them
			begin, before := time.Now(), device()
			time.Sleep(seconds * time.Second) //nolint:forbidigo // the window that is measured
			rates[name] = max(rates[name], (device()-before)/time.Since(begin).Seconds())
			if limits.IOWriteBPS != 0 || rates[name] >= 2*pastLimits*rate {
				break
			}
		}
		t.Logf("%s: %.2f MiB/s reach the disk, %.2f in the sandbox's name", name, rates[name]/(1<<20), counted(t, d, sb.ID, "io.stat", "wbytes")/(1<<20)/time.Since(began).Seconds())
		ended := time.Now()
		hung, cancel := context.WithTimeout(t.Context(), time.Minute)
		if _, err := d.Stop(hung, string(sb.ID)); err != nil {
			t.Errorf("stop the %s one: %v", name, err)
		}
		cancel()
		t.Logf("%s: stopped in %v", name, time.Since(ended))
		if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
			t.Fatal(err)
		}
		stop()
		wg.Wait()
	}
	if rates["slow"] > pastLimits*rate {
		t.Errorf("%.2f of its rate reach the disk", rates["slow"]/rate)
	}
	if rates["free"] < 2*pastLimits*rate {
		t.Errorf("the control wrote %.2f of the rate: this shows nothing", rates["free"]/rate)
	}
	began := time.Now()
	d.Shut()
	t.Logf("the daemon ended within %v", time.Since(began))
}

// onVolume is how many bytes of the volume are in use.
func onVolume(t testing.TB, d *harness.Daemon) int64 {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "nsenter", "--mount", "--target", fmt.Sprint(d.PID()), "stat", "--file-system", "--format", "%S %b %f", d.State("volume")).Output()
	if err != nil {
		t.Fatal(err)
	}
	var block, all, free int64
	if _, err := fmt.Sscan(string(out), &block, &all, &free); err != nil {
		t.Fatal(err)
	}
	return (all - free) * block
}

// TestSnapshotsWithinDisk writes and takes snapshots in turn: together they
// hold the disk limit once more and not again for each. The control has a limit
// that has room for all.
func TestSnapshotsWithinDisk(t *testing.T) {
	testenv.Need(t, testenv.Quota)
	const disk, each, rounds = 32 << 20, 24 << 20, 5
	d := harness.Install(t, "pool: {size: 0}\nvolume: {size: 640m}\n")
	fill := func(ref string, i int) error {
		_, err := d.Files(ref).Write(t.Context(), "0:0", fmt.Sprint("/root/", i), 0o644, io.LimitReader(zeros{}, each))
		return err
	}
	auto := func(ref string, _ int) error { d.Command(t, ref, "touch", "/root/it"); return nil }
	asked := func(ref string, _ int) error {
		_, err := d.Snapshot(t.Context(), ref, sandbox.SnapshotRequest{})
		return err
	}
	forgotten := func(ref string, _ int) error { // its layer stays in the stack
		s, err := d.Snapshot(t.Context(), ref, sandbox.SnapshotRequest{})
		if err == nil {
			_, err = d.RemoveSnapshot(t.Context(), string(s.ID))
		}
		return err
	}
	for _, c := range []struct {
		name  string
		spec  sandbox.Spec
		busy  bool
		take  func(string, int) error
		fails string
		whole bool
	}{
		{"restore points", sandbox.Spec{AutoSnapshot: true, Limits: sandbox.Limits{DiskBytes: disk}}, false, auto, "disk_full", false},
		{"asked for", sandbox.Spec{Limits: sandbox.Limits{DiskBytes: disk}}, false, asked, "snapshots_full", false},
		{"and forgotten", sandbox.Spec{Limits: sandbox.Limits{DiskBytes: disk}}, false, forgotten, "snapshots_full", false},
		{"of a busy one", sandbox.Spec{Limits: sandbox.Limits{DiskBytes: disk}}, true, asked, "disk_full", false},
		{"control", sandbox.Spec{Limits: sandbox.Limits{DiskBytes: 8 * disk}}, false, asked, "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := onVolume(t, d)
			sb := d.New(t, c.spec)
			ref := string(sb.ID)
			if c.busy {
				if _, err := d.StartProcess(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{"sleep", "100000"}}); err != nil {
					t.Fatal(err)
				}
			}
			var failed error
			for i := range rounds {
				if err := fill(ref, i); err != nil {
					failed = err
					break
				}
				if err := c.take(ref, i); err != nil {
					failed = err
				}
			}
			held := onVolume(t, d) - before
			t.Logf("%d MiB on the volume with a limit of %d; %v", held>>20, c.spec.Limits.DiskBytes>>20, failed)
			if code := sandbox.CodeOf(failed); code != c.fails && (failed != nil) == c.whole {
				t.Errorf("it ended with %v, want code %q", failed, c.fails)
			}
			if !c.whole && float64(held) > 2*pastLimits*disk {
				t.Errorf("%d MiB on the volume, more than twice the limit of %d", held>>20, disk>>20)
			}
			if c.whole && held < rounds*each {
				t.Errorf("the control holds %d MiB, want %d", held>>20, rounds*each>>20)
			}
			if _, err := d.Remove(t.Context(), ref); err != nil {
				t.Fatal(err)
			}
			if snaps, err := d.Snapshots(t.Context(), ""); err == nil {
				for _, s := range snaps {
					_, _ = d.RemoveSnapshot(t.Context(), string(s.ID))
				}
			}
			testenv.Eventually(t, time.Minute, "the files are gone", func() bool { return onVolume(t, d)-before < disk/4 })
		})
	}

	// What is written over again and again does not fill it for good.
	sb := d.New(t, sandbox.Spec{Limits: sandbox.Limits{DiskBytes: disk}})
	var last sandbox.Snapshot
	for i := range 12 {
		if _, err := d.Files(string(sb.ID)).Write(t.Context(), "0:0", "/root/file", 0o644, io.LimitReader(zeros{}, disk/5)); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, time.Minute, fmt.Sprint("snapshot ", i), func() bool {
			s, err := d.Snapshot(t.Context(), string(sb.ID), sandbox.SnapshotRequest{})
			if err != nil && sandbox.CodeOf(err) != "snapshots_full" {
				t.Fatal(err)
			}
			if err == nil && last.ID != "" {
				_, _ = d.RemoveSnapshot(t.Context(), string(last.ID))
			}
			if err == nil {
				last = s
			}
			return err == nil
		})
	}
}

// TestVolumeFull has one owner write all that their limits allow, which is more
// than the volume has: another owner goes on, and root is told. The controls:
// root writes where the owner cannot, and once there is room the owner can, too.
func TestVolumeFull(t *testing.T) {
	testenv.Need(t, testenv.Quota)
	w := newTenants(t, "pool: {size: 0}\nvolume: {size: 640m}\n")
	d := w.Daemon
	mine := `{"limits":{"disk_bytes":1073741824}}`
	hog, beside := w.make("alice", mine), w.make("bob", mine)
	roots := string(d.New(t, sandbox.Spec{}).ID)
	shelf := field(t, w.native("alice", "POST", "/v1/volumes", `{"name":"shelf","size_bytes":1073741824}`), "name")
	more := w.make("alice", `{"limits":{"disk_bytes":1073741824},"volumes":[{"volume":"`+shelf+`","path":"/shelf"}]}`)
	// A third of what is kept free is for those who make room: others write less
	// than what is left above it when the hog is held.
	const piece, small = 8 << 20, 2 << 20
	write := func(ref, dir string, i int, bytes int64) error {
		_, err := d.Files(ref).Write(t.Context(), "0:0", fmt.Sprint(dir, "/", i), 0o644, io.LimitReader(zeros{}, bytes))
		return err
	}
	space := func() (sandbox.CheckStatus, string) {
		checks, err := d.Doctor(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range checks {
			if c.Name == "volume space" {
				return c.Status, c.Detail
			}
		}
		return "", ""
	}
	told := func(kind string) bool {
		events, _, err := d.Events(t.Context(), client.EventQuery{Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(events, func(e sandbox.Event) bool { return e.Type == kind })
	}
	if s, detail := space(); s != sandbox.CheckOK {
		t.Fatalf("an empty volume: %s %s", s, detail)
	}
	for _, full := range [][2]string{{hog, "/root"}, {more, "/shelf"}} { // the hog first, which makes room below
		var err error
		for i := 0; err == nil && i < 200; i++ {
			err = write(full[0], full[1], i, piece)
		}
		if sandbox.CodeOf(err) != "disk_full" {
			t.Errorf("the volume took all of %s: %v", full[1], err)
		}
	}
	s, detail := space()
	t.Logf("%s: %s", s, detail)
	if s == sandbox.CheckOK || !told("space.low") || !strings.Contains(d.Log.String(), "the volume's space is low") {
		t.Errorf("nobody is told: doctor %s, event %v", s, told("space.low"))
	}
	// Others go on.
	for i := range 2 {
		if err := write(beside, "/root", i, small); err != nil {
			t.Errorf("another owner's: %v", err)
		}
	}
	if err := write(roots, "/root", 0, small); err != nil {
		t.Errorf("root's: %v", err)
	}
	if a := w.native("alice", "POST", "/v1/sandboxes", mine); !strings.Contains(a.body, "space_low") {
		t.Errorf("one more of who filled it: %d %s", a.status, a.body)
	}
	last := w.make("bob", mine)
	if err := write(last, "/root", 0, small); err != nil {
		t.Errorf("another owner's new one: %v", err)
	}
	// Room again, by who filled it.
	d.Sh(t, hog, "rm /root/*")
	testenv.Eventually(t, time.Minute, "room again", func() bool { return told("space.ample") && write(more, "/shelf", 300, piece) == nil })
	if s, detail := space(); s != sandbox.CheckOK {
		t.Errorf("afterwards: %s %s", s, detail)
	}
}

// TestWaysPastMemory writes to /dev/shm by the files API from many places at
// once, and then lets the workload take what it may: both together keep to the
// sandbox's memory. The control has room for both.
func TestWaysPastMemory(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers)
	const most, part = 48 << 20, 28 << 20 // /dev/shm itself holds 64 MiB, so that both parts fit there
	d := harness.Install(t, "pool: {size: 0}\n")
	for _, c := range []struct {
		name   string
		memory int64
		fits   bool
	}{{"tight", most, false}, {"wide", 2 * most, true}} {
		t.Run(c.name, func(t *testing.T) {
			sb := d.New(t, sandbox.Spec{Limits: sandbox.Limits{MemoryBytes: c.memory}})
			ref := string(sb.ID)
			held := func() (n float64) {
				for _, what := range []string{"shmem", "anon"} {
					n += counted(t, d, sb.ID, "work/memory.stat", what)
				}
				return n + counted(t, d, sb.ID, "init/memory.stat", "shmem")
			}
			// A command of the workload's own may be killed where memory is full.
			empty := func() {
				t.Helper()
				all, err := d.Files(ref).List(t.Context(), "0:0", "/dev/shm", 1)
				for i := 0; err == nil && i < len(all); i++ {
					err = d.Files(ref).Remove(t.Context(), "0:0", all[i].Path, false)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			var wg sync.WaitGroup
			for i := range 16 {
				wg.Go(func() {
					_, _ = d.Files(ref).Write(t.Context(), "0:0", fmt.Sprint("/dev/shm/", i), 0o644, io.LimitReader(zeros{}, c.memory/8))
				})
			}
			peak, done := 0.0, make(chan struct{})
			go func() { wg.Wait(); close(done) }()
			for over := false; !over; {
				select {
				case <-done:
					over = true
				case <-time.After(20 * time.Millisecond):
				}
				peak = max(peak, held())
			}
			empty()
			if _, err := d.Files(ref).Write(t.Context(), "0:0", "/dev/shm/file", 0o644, io.LimitReader(zeros{}, part)); err != nil {
				t.Errorf("what fits: %v", err)
			}
			hold := []string{"sh", "-c", fmt.Sprintf("head -c %d /dev/zero > /dev/shm/mine && wc -c < /dev/shm/mine", part)}
			r := d.Command(t, ref, hold...)
			both := held()
			t.Logf("limit %d MiB: files in memory at most %.0f MiB; with the workload's own %.0f: exit %d", c.memory>>20, peak/(1<<20), both/(1<<20), r.Exit.Code)
			if peak > pastLimits*float64(c.memory) || both > pastLimits*float64(c.memory) {
				t.Errorf("%.0f and %.0f MiB held of %d", peak/(1<<20), both/(1<<20), c.memory>>20)
			}
			if fitted := r.Exit.Code == 0; fitted != c.fits {
				t.Errorf("the workload's own %d MiB beside as many of PID 1's: exit %d %s", part>>20, r.Exit.Code, r.Stderr)
			}
			// What is given back, the workload has again.
			empty()
			testenv.Eventually(t, time.Minute, "the whole limit again", func() bool {
				return counted(t, d, sb.ID, "init/memory.stat", "shmem") < 1<<20 && d.Command(t, ref, hold...).Exit.Code == 0
			})
		})
	}
}
