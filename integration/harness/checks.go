//go:build root

package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Soak is n, or full where the run asked for full length.
func Soak(n, full int) int {
	if os.Getenv("SANDBOXD_SOAK") != "" {
		return full
	}
	return n
}

// Agree compares what the API says lives with the kernel's cgroups, links
// and processes and the volume's directories, once what goes on in the
// background has had its time. Beyond the sandboxes there may be exactly as
// many shells as the pool says it has ready, each of them whole.
func (d *Daemon) Agree(t testing.TB) {
	t.Helper()
	var wrong []string
	testenv.Within(15*time.Second, func() bool {
		wrong = d.differences(t)
		return len(wrong) == 0
	})
	for _, w := range wrong {
		t.Error(w)
	}
}

func (d *Daemon) differences(t testing.TB) (wrong []string) {
	t.Helper()
	tell := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	var running, kept []string
	for sb, err := range d.All(t.Context(), sandbox.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		switch sb.Status {
		case sandbox.StatusRunning, sandbox.StatusPaused:
			running = append(running, string(sb.ID))
			kept = append(kept, string(sb.ID))
			if _, err := os.Stat(fmt.Sprintf("/proc/%d", sb.InitPID)); err != nil {
				tell("%s is %s but its PID 1 is gone: %v", sb.ID, sb.Status, err)
			}
		case sandbox.StatusStopped:
			kept = append(kept, string(sb.ID))
		default:
			tell("%s is left %s (%s)", sb.ID, sb.Status, sb.Detail)
		}
	}
	pool, err := d.Pool(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// Where the volume is an image it is mounted in the daemon's namespace only.
	seen := fmt.Sprintf("/proc/%d/root", d.PID())
	var ready []string // as the first of the places has it
	for i, place := range []struct {
		what, dir string
		want      []string
	}{
		{"cgroups", CgroupRoot() + d.Parent, running},
		{"uppers", filepath.Join(seen, d.Dir, "state/volume/sandboxes"), kept},
		{"shell states", filepath.Join(d.Dir, "run/shells"), running},
		{"sockets", filepath.Join(d.Dir, "run/init"), running},
	} {
		have := Names(t, place.dir)
		for _, id := range place.want {
			if !slices.Contains(have, id) {
				tell("%s: the kernel has %v, the database also %s", place.what, have, id)
			}
		}
		spare := slices.DeleteFunc(have, func(id string) bool { return slices.Contains(place.want, id) })
		slices.Sort(spare)
		if i == 0 {
			ready = spare
		}
		if len(spare) != pool.Ready || !slices.Equal(spare, ready) {
			tell("%s: the kernel has %v beyond the database, the pool %d, the first place %v", place.what, spare, pool.Ready, ready)
		}
	}
	return wrong
}

// Names lists the sandboxes a directory has entries of.
func Names(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var ids []string
	for _, e := range entries {
		name := strings.TrimSuffix(e.Name(), ".sock")
		if _, err := sandbox.ParseID(name); err == nil {
			ids = append(ids, name)
		}
	}
	return ids
}

// State is a path of the daemon's own view: the volume may be mounted there
// only.
func (d *Daemon) State(parts ...string) string {
	root := fmt.Sprintf("/proc/%d/root", d.PID())
	return filepath.Join(append([]string{root, d.Dir, "state"}, parts...)...)
}

// CLI runs the command line with an environment and standard input.
func (d *Daemon) CLI(t testing.TB, env []string, in string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, Program(t, "sandbox"), args...)
	cmd.Env = append(append(os.Environ(), "SANDBOX_HOST="+d.Host()), env...)
	cmd.Stdin = strings.NewReader(in)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// Memory reads a line of the daemon's /proc/PID/status, as "VmRSS", in bytes.
func (d *Daemon) Memory(t testing.TB, line string) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(b)) {
		if f := strings.Fields(l); len(f) == 3 && f[0] == line+":" {
			kb, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kb << 10
		}
	}
	t.Fatalf("no %s in the daemon's status", line)
	return 0
}
