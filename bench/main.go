package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/bench/report"
)

// isolated marks the program's second life, in namespaces of its own.
const isolated = "SANDBOXD_BENCH_ISOLATED"

// options are the command line.
type options struct {
	quick   bool
	vm      bool
	only    string
	bin     string
	results string
	scratch string
}

func main() {
	var o options
	flag.BoolVar(&o.quick, "quick", false, "few samples, small files: minutes become a minute or two, and figures rough")
	flag.BoolVar(&o.vm, "vm", false, "sizes for an emulated machine, on which only ratios are judged")
	flag.StringVar(&o.only, "only", "", "comma list of scenarios to run: "+strings.Join(names(), ", "))
	flag.StringVar(&o.bin, "bin", os.Getenv("SANDBOXD_BIN"), "directory of sandboxd and sandbox")
	flag.StringVar(&o.results, "results", "bench/results", "directory to write JSON, tables and the chart to")
	flag.StringVar(&o.scratch, "scratch", "/var/tmp", "directory to work in: on a disk, 12 GiB free")
	flag.Parse()
	if err := start(o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func names() []string {
	var all []string
	for _, s := range scenarios {
		all = append(all, s.name)
	}
	return all
}

// start checks what was asked for and runs it in namespaces of its own.
func start(o options) error {
	chosen, err := choose(o.only)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("namespaces, cgroups and the daemon need root")
	}
	if o.bin, err = filepath.Abs(o.bin); err != nil {
		return err
	}
	if os.Getenv(isolated) == "" {
		return isolate()
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// A reader of our output that goes must not end us before we have cleaned
	// up. Not ignored: children would inherit that.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	if err := settleIn(ctx); err != nil {
		return err
	}
	return run(ctx, o, chosen, os.Stdout)
}

func choose(only string) ([]scenario, error) {
	if only == "" {
		return scenarios, nil
	}
	var chosen []scenario
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == name })
		if i < 0 {
			return nil, fmt.Errorf("no scenario %q; there are %s", name, strings.Join(names(), ", "))
		}
		chosen = append(chosen, scenarios[i])
	}
	return chosen, nil
}

// isolate starts the program again in new network and mount namespaces:
// links, rules and mounts go when it ends, however it ends.
func isolate() error {
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		return fmt.Errorf("find unshare: %w; install the Debian package util-linux", err)
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	args := append([]string{unshare, "--net", "--mount", "--propagation", "private", "--", self}, os.Args[1:]...)
	return fmt.Errorf("start again in namespaces: %w", unix.Exec(unshare, args, append(os.Environ(), isolated+"=1")))
}

// settleIn prepares the new namespaces: loopback up, and /sys/fs/cgroup the
// cgroup2 tree, also on hosts that mount version 1 there. No runtime can then
// see, or write to, the machine's own version 1 trees.
func settleIn(ctx context.Context) error {
	if err := command(ctx, "ip", "link", "set", "lo", "up"); err != nil {
		return err
	}
	if isCgroup2(cgroupMount) {
		return nil
	}
	if !isCgroup2(cgroupMount + "/unified") {
		return errors.New("no cgroup2 tree at /sys/fs/cgroup or /sys/fs/cgroup/unified: boot with systemd.unified_cgroup_hierarchy=1")
	}
	if err := command(ctx, "mount", "--bind", cgroupMount+"/unified", cgroupMount); err != nil {
		return err
	}
	if !isCgroup2(cgroupMount) {
		return errors.New("/sys/fs/cgroup is not the cgroup2 tree, though it was mounted there")
	}
	return nil
}

func isCgroup2(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// command runs a helper to its end.
func command(ctx context.Context, name string, args ...string) error {
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// run measures the chosen scenarios and writes what came out. A scenario that
// fails is reported and leaves the others their turn.
func run(ctx context.Context, o options, chosen []scenario, out io.Writer) (err error) {
	b, err := open(ctx, o, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close(ctx)) }()
	if err := b.alike(ctx); err != nil {
		return fmt.Errorf("the contestants are not alike: %w", err)
	}
	var failed []error
	for _, s := range chosen {
		began := time.Now()
		fmt.Fprintf(out, "%-8s ", s.name)
		err := s.run(ctx, b)
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted in scenario %s", s.name)
		}
		if err != nil {
			err = fmt.Errorf("scenario %s: %w", s.name, err)
			failed = append(failed, err)
			b.rep.Skipped = append(b.rep.Skipped, report.Skip{Scenario: s.name, Why: "failed: " + err.Error()})
			fmt.Fprintf(out, "FAILED: %v\n", err)
			continue
		}
		fmt.Fprintf(out, "%.0f s\n", time.Since(began).Seconds())
	}
	b.finish()
	base := b.rep.Mode
	if o.only != "" {
		base += "-" + strings.ReplaceAll(o.only, ",", "-")
	}
	return errors.Join(append(failed, b.rep.Text(out), save(b.rep, o.results, base, out))...)
}

// charted are the scenarios the chart shows.
var charted = []string{"create-warm", "create-idle", "create-cold", "create-fresh", "exec", "burst", "churn-2", "churn-8", "destroy"}

// save writes the report in its three forms.
func save(r *report.Report, dir, base string, out io.Writer) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("directory for the results: %w", err)
	}
	for ext, write := range map[string]func(io.Writer) error{
		".json": r.JSON, ".md": r.Markdown,
		".svg": func(w io.Writer) error { return r.Chart(w, charted...) },
	} {
		path := filepath.Join(dir, base+ext)
		f, err := os.Create(path)
		if err != nil {
			return fmt.Errorf("write the results: %w", err)
		}
		if err := errors.Join(write(f), f.Close()); err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
	}
	_, err := fmt.Fprintf(out, "\nwrote %s.json, .md and .svg\n", filepath.Join(dir, base))
	return err
}
