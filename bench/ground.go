package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/bench/peer"
	"github.com/sandboxd/sandboxd/bench/report"
)

const (
	cgroupMount = "/sys/fs/cgroup"
	imageName   = "bench"
	cleanUp     = 3 * time.Minute // bounds the removal of everything
)

// bench is one run: what it stands on and what it has found.
type bench struct {
	plan     plan
	out      io.Writer
	rep      *report.Report
	bin      string
	dir      string // scratch
	stateDir string // of the daemon
	root     string // the peers' root, and the content of our image
	tree     string // cgroup of all that runs, as a path below the mount
	home     string // cgroup this program came from
	owes     bool   // our last samples left the daemon work, see paid
	copies   int    // fresh roots made so far

	runc, crun *peer.OCI
	bwrap      *peer.Bubblewrap
	peerLog    *os.File
	daemon     *daemon
	before     cpuTimes
}

// open prepares scratch directory, cgroups, root and peers.
func open(ctx context.Context, o options, out io.Writer) (b *bench, err error) {
	b = &bench{plan: full, out: out, bin: o.bin, rep: &report.Report{Schema: 1, Mode: "full", Started: time.Now()}}
	switch {
	case o.vm:
		b.plan, b.rep.Mode = emulation, modeVM
	case o.quick:
		b.plan, b.rep.Mode = quick, "quick"
	}
	if b.dir, err = os.MkdirTemp(o.scratch, "sandboxd-bench-"); err != nil {
		return nil, fmt.Errorf("scratch directory: %w", err)
	}
	b.stateDir = filepath.Join(b.dir, "state")
	defer func(opened *bench) { // a failed return sets b to nil
		if err != nil {
			err = errors.Join(err, opened.close(ctx))
		}
	}(b)
	if err := os.Chmod(b.dir, 0o711); err != nil { // sandboxes' ids pass through
		return nil, fmt.Errorf("scratch directory: %w", err)
	}
	// As /run is on every machine that runs systemd, for all contestants.
	if err := os.Mkdir(b.run(), 0o711); err != nil {
		return nil, err
	}
	if said, err := exec.CommandContext(ctx, "mount", "-t", "tmpfs", "-o", "nosuid,nodev,mode=711", "run", b.run()).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mount a run directory: %w: %s", err, said)
	}
	b.root, b.tree = filepath.Join(b.dir, "root"), "/"+filepath.Base(b.dir)
	fmt.Fprintf(out, "working in %s and cgroup %s\n", b.dir, b.tree)
	if err := b.enterTree(); err != nil {
		return nil, err
	}
	if err := makeRoot(ctx, b.root); err != nil {
		return nil, err
	}
	if b.peerLog, err = os.Create(filepath.Join(b.dir, "peers.log")); err != nil {
		return nil, err
	}
	if b.runc, err = peer.NewOCI("runc", b.dir, b.run(), b.root, b.tree+"/peers", b.peerLog); err != nil {
		return nil, err
	}
	if b.crun, err = peer.NewOCI("crun", b.dir, b.run(), b.root, b.tree+"/peers", b.peerLog); err != nil {
		return nil, err
	}
	if b.bwrap, err = peer.NewBubblewrap(b.dir, b.root, b.peerLog); err != nil {
		return nil, err
	}
	b.rep.Host = hostFacts(ctx)
	b.limit()
	if b.crun.NoDevices() {
		b.note("This host does not let crun load a device program: its containers go without.")
	}
	if o.vm {
		b.note("This run is made for an emulated machine, where a system call costs many times what it should: only ratios are judged.")
	}
	b.before, err = b.cpuTimes()
	return b, err
}

func (b *bench) note(text string) { b.rep.Host.Notes = append(b.rep.Host.Notes, text) }

// limit gives the peers our limits, where the host can enforce any.
func (b *bench) limit() {
	if cgroupMode() != enforce {
		b.note("This host's cgroup2 tree lacks controllers: sandboxd runs with --cgroup=best-effort, and neither it nor its peers set cpu, memory and task limits.")
		return
	}
	b.runc.Limit(limits)
	b.crun.Limit(limits)
	b.note(fmt.Sprintf("Limits are enforced: sandboxd, runc and crun set %d cpu, %d MiB of memory without swap, %d tasks; sandboxd a disk quota too. bwrap can set none and has less to do.",
		limits.CPUs, limits.MemoryBytes>>20, limits.PIDs))
}

// finish fills in what is known only at the end.
func (b *bench) finish() {
	b.rep.Seconds = time.Since(b.rep.Started).Seconds()
	b.rep.Host.LoadAfter = load()
	if now, err := b.cpuTimes(); err == nil {
		b.rep.Host.OthersShare = b.before.others(now)
	}
	if b.daemon != nil {
		b.rep.Host.Versions["sandboxd"] = b.daemon.version
	}
	b.rep.Compare()
	b.rep.Goals = judge(b.rep)
}

// close ends and removes whatever the run made.
func (b *bench) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUp)
	defer cancel()
	errs := []error{b.stopDaemon(ctx)}
	for _, r := range []*peer.OCI{b.runc, b.crun} {
		if r != nil {
			r.Clean(ctx)
		}
	}
	if b.peerLog != nil {
		errs = append(errs, b.peerLog.Close())
	}
	// Where it was not mounted the removal works all the same.
	_ = exec.CommandContext(context.WithoutCancel(ctx), "umount", "--lazy", b.run()).Run()
	errs = append(errs, b.leaveTree(ctx), os.RemoveAll(b.dir))
	return errors.Join(errs...)
}

// leaves are the cgroups directly below the tree. The daemon's sandboxes and
// the peers' containers get theirs below two of them.
var leaves = []string{"bench", "daemon", "boxes", "peers"}

// enterTree makes the cgroups and moves this program, and so all it starts,
// into one: the tree's counters then hold all cpu time of the run.
func (b *bench) enterTree() error {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return fmt.Errorf("find this program's cgroup: %w", err)
	}
	for line := range strings.Lines(string(own)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			b.home = path
		}
	}
	for _, leaf := range leaves {
		if err := os.MkdirAll(b.cgroup(leaf), 0o755); err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
	}
	return moveSelf(b.cgroup("bench"))
}

func (b *bench) cgroup(leaf string) string { return filepath.Join(cgroupMount, b.tree, leaf) }

func moveSelf(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		return fmt.Errorf("move to cgroup %s: %w", dir, err)
	}
	return nil
}

// leaveTree goes back to where the program was started and removes the
// cgroups, deepest first, waiting for the last processes to go.
func (b *bench) leaveTree(ctx context.Context) error {
	if b.home == "" {
		return nil
	}
	if err := moveSelf(filepath.Join(cgroupMount, b.home)); err != nil {
		return err
	}
	top := filepath.Join(cgroupMount, b.tree)
	var err error
	for range 100 {
		var dirs []string
		_ = filepath.WalkDir(top, func(path string, e os.DirEntry, werr error) error {
			if werr == nil && e.IsDir() {
				dirs = append(dirs, path)
			}
			return nil // what vanishes meanwhile need not be removed
		})
		slices.Reverse(dirs)
		err = nil
		for _, d := range dirs {
			if rerr := os.Remove(d); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
				err = rerr
			}
		}
		if err == nil || pause(ctx, 50*time.Millisecond) != nil {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("remove cgroup %s: %w; see which processes are left in it", b.tree, err)
	}
	return nil
}

// run is a directory in memory, for sockets and the records of what runs.
func (b *bench) run() string { return filepath.Join(b.dir, "run") }

// makeRoot makes a root file system of the static busybox, and of this host's
// own /bin/true with the libraries it loads: what people mean by that name.
func makeRoot(ctx context.Context, dir string) error {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("find busybox: %w; install the Debian package busybox-static", err)
	}
	for _, d := range []string{"bin", "dev", "etc", "proc", "root", "sys", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return fmt.Errorf("root file system: %w", err)
		}
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return fmt.Errorf("root file system: %w", err)
	}
	applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("busybox --list: %w", err)
	}
	errs := []error{
		os.WriteFile(filepath.Join(dir, "bin/busybox"), program, 0o755),
		os.WriteFile(filepath.Join(dir, "etc/passwd"), []byte("root:x:0:0:root:/root:/bin/sh\n"), 0o644),
		os.WriteFile(filepath.Join(dir, "etc/group"), []byte("root:x:0:\n"), 0o644),
		os.Chmod(filepath.Join(dir, "tmp"), 0o777|os.ModeSticky),
	}
	for name := range strings.FieldsSeq(string(applets)) {
		if name != "busybox" && name != "true" {
			errs = append(errs, os.Symlink("busybox", filepath.Join(dir, "bin", name)))
		}
	}
	return errors.Join(append(errs, copyTrue(ctx, dir))...)
}

// copyTrue copies /bin/true of the host, its libraries and the list by which
// the loader finds them.
func copyTrue(ctx context.Context, dir string) error {
	out, err := exec.CommandContext(ctx, "ldd", "/bin/true").Output()
	if err != nil {
		return fmt.Errorf("ldd /bin/true: %w", err)
	}
	files := []string{"/bin/true", "/etc/ld.so.cache"}
	for word := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(word, "/") {
			files = append(files, word)
		}
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return fmt.Errorf("root file system: %w", err)
		}
		to := filepath.Join(dir, f)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return fmt.Errorf("root file system: %w", err)
		}
		if err := os.WriteFile(to, data, 0o755); err != nil {
			return fmt.Errorf("root file system: %w", err)
		}
	}
	return nil
}

// hostFacts describes the machine and the versions compared.
func hostFacts(ctx context.Context) report.Host {
	h := report.Host{CPUs: runtime.NumCPU(), LoadBefore: load(), Versions: map[string]string{"go": runtime.Version()}}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		h.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	h.System = strings.Trim(field("/etc/os-release", "PRETTY_NAME="), `"`)
	h.CPU = strings.TrimLeft(field("/proc/cpuinfo", "model name"), "\t :")
	h.MemoryMiB = meminfo("MemTotal:") >> 20
	if c, err := os.ReadFile(cgroupMount + "/cgroup.controllers"); err == nil {
		h.Cgroup = strings.TrimSpace(string(c))
	}
	for _, pkg := range []string{"runc", "crun", "bubblewrap", "busybox-static"} {
		v, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f", "${Version}", pkg).Output()
		if err != nil {
			v = []byte("not from a Debian package")
		}
		h.Versions[pkg] = string(v)
	}
	return h
}

// field returns the rest of the first line that begins with key.
func field(path, key string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, key); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return ""
	}
	return strings.Join(strings.Fields(string(b))[:3], " ")
}

// meminfo returns a line of /proc/meminfo, in bytes.
func meminfo(key string) int64 { return kilobytes(field("/proc/meminfo", key)) }

// kilobytes reads "123 kB" as bytes; 0 when it says something else.
func kilobytes(s string) int64 {
	n, err := strconv.ParseInt(strings.TrimSuffix(s, " kB"), 10, 64)
	if err != nil {
		return 0
	}
	return n << 10
}

// cpuTimes are counters of cpu time, in seconds.
type cpuTimes struct{ all, busy, ours float64 }

func (b *bench) cpuTimes() (cpuTimes, error) {
	ours, err := usage(filepath.Join(cgroupMount, b.tree))
	if err != nil {
		return cpuTimes{}, err
	}
	t := cpuTimes{ours: ours.Seconds()}
	const ticks = 100 // USER_HZ, see proc_stat(5)
	for i, f := range strings.Fields(field("/proc/stat", "cpu ")) {
		v, err := strconv.ParseFloat(f, 64)
		if err != nil || i > 7 { // guest time is part of user time
			break
		}
		t.all += v / ticks
		if i != 3 && i != 4 { // idle, iowait
			t.busy += v / ticks
		}
	}
	return t, nil
}

// others returns the share of all cpu time between two readings that went to
// programs which are not part of the run.
func (t cpuTimes) others(now cpuTimes) float64 {
	all := now.all - t.all
	if all <= 0 {
		return 0
	}
	return max(0, (now.busy-t.busy)-(now.ours-t.ours)) / all
}

// usage returns the cpu time a cgroup has used. The kernel counts it without
// any controller.
func usage(dir string) (time.Duration, error) {
	usec, err := strconv.ParseInt(field(filepath.Join(dir, "cpu.stat"), "usage_usec "), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("cpu time of %s: %w", dir, err)
	}
	return time.Duration(usec) * time.Microsecond, nil
}

// pause waits, unless ctx ends before.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// quiet waits until nothing of ours has used the cpu for a while, at most as
// long as most: what one contestant leaves behind must not meet the next.
func (b *bench) quiet(ctx context.Context, while, most time.Duration) error {
	for deadline := time.Now().Add(most); time.Now().Before(deadline); {
		before := b.working()
		if err := pause(ctx, while); err != nil {
			return err
		}
		if b.working()-before < while/10 {
			return nil
		}
	}
	return nil
}

// working returns the cpu time of everything but this program.
func (b *bench) working() time.Duration {
	var sum time.Duration
	for _, leaf := range leaves[1:] {
		if d, err := usage(b.cgroup(leaf)); err == nil {
			sum += d
		}
	}
	return sum
}

// ownGroup keeps a Ctrl-C at the terminal from the daemon, starts it in its
// cgroup, and lets it end if this program dies without a word.
func ownGroup(cgroup *os.File) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM, UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
}
