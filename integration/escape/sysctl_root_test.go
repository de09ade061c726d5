//go:build root

package escape

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// readSettings prints every line of every file below /proc/sys.
const readSettings = `grep -rs '' /proc/sys; true`

// writeSettings writes another value to every file below /proc/sys that takes
// one, and names those that did.
const writeSettings = `for f in $(find /proc/sys -type f -writable 2>/dev/null); do
  for v in 7 1 0 '7 7 7 7' 301; do
    was=$(cat "$f")
    { echo "$v" > "$f"; } 2>/dev/null && [ "$(cat "$f")" != "$was" ] && { echo "$f"; break; }
  done
done 2>/dev/null
true`

// TestResetSettings: what root inside can write below /proc/sys is after a
// reset as in a new sandbox.
func TestResetSettings(t *testing.T) {
	d := harness.Install(t, "")
	fresh, sb := d.New(t, sandbox.Spec{}), d.New(t, sandbox.Spec{})
	settings := func(id sandbox.ID) map[string]string {
		out := map[string]string{}
		for line := range strings.Lines(d.Sh(t, string(id), readSettings)) {
			name, v, _ := strings.Cut(strings.TrimSpace(line), ":")
			out[name] += v + "\n"
		}
		return out
	}
	want := settings(fresh.ID)
	written := strings.Fields(d.Sh(t, string(sb.ID), writeSettings))
	t.Logf("root inside can write %d: %v", len(written), written)
	// Positive control: the probe writes, and what it wrote is there.
	for _, must := range []string{"shmmax", "msgmni", "fs/mqueue/msg_max"} {
		if !slices.ContainsFunc(written, func(f string) bool { return strings.HasSuffix(f, must) }) {
			t.Errorf("the probe did not write %s: does it probe?", must)
		}
	}
	for _, f := range written {
		if strings.HasSuffix(f, "/pid_max") {
			t.Errorf("%s can be set: with few numbers left PID 1 can make no thread", f)
		}
		if dirty := settings(sb.ID); dirty[f] == want[f] {
			t.Errorf("%s was not changed: does the probe write?", f)
		}
	}
	if _, err := d.Reset(t.Context(), string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	got := settings(sb.ID)
	for _, f := range slices.Sorted(maps.Keys(want)) {
		switch {
		case got[f] == want[f]:
		case slices.Contains(written, f):
			t.Errorf("%s: %q after a reset, %q in a new sandbox", f, got[f], want[f])
		default: // the kernel's counters, and numbers that are new at each look
			t.Logf("%s: %q after a reset, %q in a new sandbox; root inside cannot write it", f, got[f], want[f])
		}
	}
}

// writeOnce tries to write the files of a process that a namespace has once for
// all, and those of PID 1, and names those that it could.
const writeOnce = `for f in /proc/self/*_map /proc/self/setgroups /proc/self/timens_offsets; do
  for v in "1000 6841708 1" "0 0 1" deny "monotonic 1 0"; do { echo "$v" >$f; } 2>/dev/null && echo $f; done
done
for f in /proc/1/* /proc/1/task/1/* /proc/1/attr/*; do [ -f $f ] && { echo 1 >>$f; } 2>/dev/null && echo $f; done
echo 999 2>/dev/null >/proc/self/oom_score_adj && echo control`

// TestNamespaceStateIsNobodys: what a user or pid namespace keeps for good, or PID 1
// does, nobody inside can set, since no reset would take it back. The control is a
// process's own file.
func TestNamespaceStateIsNobodys(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{})
	for _, user := range []string{"root", "nobody"} {
		r, err := d.Try(t.Context(), string(sb.ID), sandbox.ProcessSpec{User: user, Argv: []string{"sh", "-c", writeOnce}})
		if err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(r.Stdout) != "control" {
			t.Errorf("%s may write %q, want only its own file (control)", user, r.Stdout)
		}
	}
}

// TestKernelFilesReadOnly: beside processes and settings, which TestResetSettings
// walks, nothing of /proc and /sys can be written. The control is a process's own
// file, which can. PSI triggers (/proc/pressure) have the host's kernel work.
func TestKernelFilesReadOnly(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{})
	for _, user := range []string{"root", "nobody"} {
		r, err := d.Try(t.Context(), string(sb.ID), sandbox.ProcessSpec{User: user, Argv: []string{
			"sh", "-c", `find /proc /sys /proc/$$/comm '(' -path '/proc/[0-9]*' -o -path /proc/sys ')' ! -path /proc/$$/comm -prune -o -writable ! -type l -exec test -f {} \; -print 2>/dev/null | sed "s,/$$/,/SELF/,"`,
		}})
		if err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(r.Stdout) != "/proc/SELF/comm" {
			t.Errorf("%s may write %q, want a process's own file alone (%s)", user, r.Stdout, r.Stderr)
		}
	}
}
