//go:build root

package escape

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

func giveProbe(t testing.TB, d *harness.Daemon, ref string) string { return d.GiveProbe(t, ref) }

// outcomes are what the probe counted: what was tried, how it ended, how often.
type outcomes map[string]map[string]int

func probeAs(t testing.TB, d *harness.Daemon, ref, user string, argv ...string) outcomes {
	t.Helper()
	r, err := d.Try(t.Context(), ref, sandbox.ProcessSpec{Argv: argv, User: user})
	if err != nil {
		t.Fatalf("%q: %v", argv, err)
	}
	var told map[string]string
	if err := json.Unmarshal([]byte(r.Stdout), &told); err != nil {
		t.Fatalf("%q: exit %d, %v; its last words: %s", argv, r.Exit.Code, err, harness.LastLines(r.Stderr, 3))
	}
	out := outcomes{}
	for what, counts := range told {
		m := map[string]int{}
		if err := json.Unmarshal([]byte(counts), &m); err != nil {
			t.Fatal(err)
		}
		out[what] = m
	}
	return out
}

// answers fails the test unless PID 1 is the same one, and serves commands,
// files and a reset.
func answers(t testing.TB, d *harness.Daemon, was sandbox.Sandbox) {
	t.Helper()
	ref := string(was.ID)
	serve := func() {
		t.Helper()
		if out := d.Sh(t, ref, "echo answered"); out != "answered" {
			t.Errorf("a command says %q", out)
		}
		if _, err := d.Files(ref).Write(t.Context(), "root", "/tmp/answers", 0o644, strings.NewReader("x")); err != nil {
			t.Error(err)
		}
	}
	serve()
	if _, err := d.Reset(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	serve()
	if sb, err := d.Sandbox(t.Context(), ref); err != nil || sb.InitPID != was.InitPID || sb.Status != sandbox.StatusRunning {
		t.Errorf("PID 1 was %d; now %d, %s, %v", was.InitPID, sb.InitPID, sb.Status, err)
	}
}

// inmates are those who try: what the sandbox may, and as whom.
var inmates = []struct {
	caps sandbox.Capabilities
	user string
}{{sandbox.CapabilitiesRoot, "root"}, {sandbox.CapabilitiesRoot, "1000"}, {sandbox.CapabilitiesNone, "root"}}

// TestPID1Signals sends PID 1 and each of its threads every signal in every
// way, beside commands that start: a thread that forks blocks all signals.
func TestPID1Signals(t *testing.T) {
	d := harness.Install(t, "")
	rounds, length := harness.Soak(1, 50), time.Duration(harness.Soak(1, 60))*time.Second
	for _, who := range inmates {
		t.Run(string(who.caps)+" "+who.user, func(t *testing.T) {
			sb := d.New(t, sandbox.Spec{Capabilities: who.caps})
			ref := string(sb.ID)
			probe := giveProbe(t, d, ref)
			d.Sh(t, ref, probe+" noop") // nobody has it open for writing any more
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			busy := make(chan int, 1)
			go func() {
				n := 0
				for ; ctx.Err() == nil; n++ {
					if r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: []string{"true"}}); ctx.Err() == nil && (err != nil || r.Exit.Code != 0) {
						t.Errorf("a command beside it: %+v, %v", r.Exit, err)
						break
					}
				}
				busy <- n
			}()
			got := probeAs(t, d, ref, who.user, probe, "signals", strconv.Itoa(rounds))
			hammered := probeAs(t, d, ref, who.user, probe, "hammer", length.String())
			stop()
			t.Logf("beside %d commands: %v; then %v", <-busy, got, hammered)
			if len(got) < 17 {
				t.Errorf("%d ways were tried: %v", len(got), got)
			}
			answers(t, d, sb)
		})
	}
	t.Run("control", func(t *testing.T) {
		sb := d.New(t, sandbox.Spec{})
		got := probeAs(t, d, string(sb.ID), "root", giveProbe(t, d, string(sb.ID)), "signal-control")
		for way, counts := range got {
			if strings.HasPrefix(way, "pidfd") && counts["EINVAL"] == 3 {
				t.Logf("%s: this kernel has none", way)
			} else if counts["ok"] != 3 {
				t.Errorf("%s: an ordinary process gets %v, want 3 signals", way, counts)
			}
		}
	})
}

// TestPID1Limits sets every limit of every thread of PID 1, its affinity and
// priorities, and touches its files in /proc.
func TestPID1Limits(t *testing.T) {
	d := harness.Install(t, "")
	for _, who := range inmates {
		t.Run(string(who.caps)+" "+who.user, func(t *testing.T) {
			sb := d.New(t, sandbox.Spec{Capabilities: who.caps})
			ref := string(sb.ID)
			probe := giveProbe(t, d, ref)
			d.Sh(t, ref, "true")
			before := condition(t, sb.InitPID)
			for what, counts := range probeAs(t, d, ref, who.user, probe, "limits") {
				if counts["ok"] > 0 {
					t.Errorf("%s: %v", what, counts)
				}
			}
			answers(t, d, sb)
			if after := condition(t, sb.InitPID); after != before {
				t.Errorf("PID 1 was\n%s\nand is\n%s", before, after)
			}
		})
	}
	t.Run("control", func(t *testing.T) {
		sb := d.New(t, sandbox.Spec{})
		got := probeAs(t, d, string(sb.ID), "root", giveProbe(t, d, string(sb.ID)), "limits-control")
		for res := range 16 {
			if what := fmt.Sprint("prlimit ", res); got[what]["ok"] == 0 {
				t.Errorf("%s on an ordinary process: %v", what, got[what])
			}
		}
		for _, what := range []string{"sched_setaffinity", "setpriority", "ioprio_set", "write oom_score_adj", "open environ", "list fd"} {
			if got[what]["ok"] == 0 {
				t.Errorf("%s on an ordinary process: %v", what, got[what])
			}
		}
	})
}

// condition is what others could change of a process: limits, score, nice value
// and affinity.
func condition(t testing.TB, pid int) string {
	t.Helper()
	var b strings.Builder
	for _, name := range []string{"limits", "oom_score_adj", "coredump_filter"} {
		content, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Fatal(err)
		}
		b.Write(content)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "Cpus_allowed:") || strings.HasPrefix(line, "Sig") && !strings.HasPrefix(line, "SigQ") {
			b.WriteString(line)
		}
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	b.WriteString("nice " + strings.Fields(rest)[16])
	return b.String()
}

// TestPID1ID tries to be who PID 1 is.
func TestPID1ID(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{})
	ref := string(sb.ID)
	probe := giveProbe(t, d, ref)
	for what, counts := range probeAs(t, d, ref, "root", probe, "become", strconv.Itoa(sandbox.InitID)) {
		if counts["EINVAL"] != 1 {
			t.Errorf("%s: %v", what, counts)
		}
	}
	for what, counts := range probeAs(t, d, ref, "root", probe, "become", "65535") {
		if counts["ok"] != 1 {
			t.Errorf("the control: %s: %v", what, counts)
		}
	}
	d.Sh(t, ref, "echo 'init:x:65536:0::/:/bin/sh' >> /etc/passwd")
	for _, user := range []string{"65536", "init", "0:65536"} {
		if r, err := d.Try(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{"id"}, User: user}); err == nil {
			t.Errorf("user %s: %+v", user, r)
		}
	}
	// What PID 1 and a command are, as the host sees them.
	base, own := strconv.Itoa(int(sb.UIDBase)), strconv.Itoa(int(sb.UIDBase)-65536*(sb.Slot+1)+sb.Slot)
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", sb.InitPID))
	if err != nil {
		t.Fatal(err)
	}
	filtered := 0
	for _, task := range tasks {
		got := statusOf(t, fmt.Sprintf("/proc/%d/task/%s/status", sb.InitPID, task.Name()))
		if want := strings.Join([]string{own, own, own, base}, " "); got["Uid"] != want {
			t.Errorf("thread %s: ids %s, want %s", task.Name(), got["Uid"], want)
		}
		if got["SigIgn"] != "fffffffeffbafeff" { // all but KILL, CHLD, STOP, and what Go handles: URG and 33
			t.Errorf("thread %s ignores %s", task.Name(), got["SigIgn"])
		}
		// Of what is not ignored, Go's runtime handles URG and 33, which interrupt a
		// thread and no more, and CHLD does nothing by default.
		if got["SigCgt"] != "0000000100400000" {
			t.Errorf("thread %s handles %s", task.Name(), got["SigCgt"])
		}
		t.Logf("thread %s (filter %s): ignored %s, handled %s, blocked %s, pending %s", task.Name(), got["Seccomp"], got["SigIgn"], got["SigCgt"], got["SigBlk"], got["SigPnd"])
		switch got["Seccomp"] + got["NoNewPrivs"] {
		case "21":
			filtered++
		case "00":
		default:
			t.Errorf("thread %s: Seccomp %s, NoNewPrivs %s", task.Name(), got["Seccomp"], got["NoNewPrivs"])
		}
	}
	if filtered != 1 {
		t.Errorf("%d threads are under the filter, want the one that forks", filtered)
	}
	inside := d.Sh(t, ref, "cat /proc/self/uid_map /proc/self/gid_map /proc/self/status")
	maps := strings.Join(strings.Fields(inside)[:9], " ")
	if want := fmt.Sprintf("0 %s 65536 65536 %s 1 0 %s 65536", base, own, base); maps != want {
		t.Errorf("maps %s, want %s", maps, want)
	}
	for name, want := range map[string]string{"Uid": "0 0 0 0", "Gid": "0 0 0 0", "NoNewPrivs": "1", "Seccomp": "2", "CapEff": "00000000000004fb", "CapAmb": "0000000000000000", "CapInh": "0000000000000000", "SigIgn": "0000000000000000"} {
		if got := parseStatus(inside)[name]; got != want {
			t.Errorf("a command's %s is %s, want %s", name, got, want)
		}
	}
}

func statusOf(t testing.TB, path string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return parseStatus(string(b))
}

func parseStatus(s string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(s) {
		name, value, _ := strings.Cut(line, ":")
		m[name] = strings.Join(strings.Fields(value), " ")
	}
	return m
}

// TestPID1Files asks the files API, which PID 1 itself serves, for its own
// files in /proc: by its number, its threads' and the links to it.
func TestPID1Files(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{})
	ref, files := string(sb.ID), d.Files(string(sb.ID))
	names := []string{"self", "thread-self"}
	tids := strings.Fields(d.Sh(t, ref, "ls /proc/1/task"))
	if len(tids) < 2 {
		t.Fatalf("PID 1 has threads %v", tids)
	}
	for _, name := range append(names, tids...) {
		dir := "/proc/" + name
		for _, file := range []string{"environ", "maps", "status", "auxv", "cmdline"} {
			if _, r, err := files.Read(t.Context(), "root", dir+"/"+file, 0, -1); err == nil {
				b, rerr := io.ReadAll(r)
				t.Errorf("%s/%s: read %d bytes, %v", dir, file, len(b), rerr)
				_ = r.Close()
			}
		}
		for _, sub := range []string{"", "/fd", "/ns", "/task"} {
			if list, err := files.List(t.Context(), "root", dir+sub, 1); err == nil && len(list) > 0 {
				t.Errorf("%s%s: listed %d entries", dir, sub, len(list))
			}
		}
		for _, link := range []string{"/exe", "/root", "/cwd", "/fd/3"} {
			if info, err := files.Stat(t.Context(), "root", dir+link); err == nil {
				t.Errorf("%s%s: told as %+v", dir, link, info)
			}
		}
	}
	d.Sh(t, ref, "ln -s /proc/1/exe /tmp/planted; ln -s /proc/self/fd/0 /tmp/planted0")
	for _, name := range []string{"/proc/self/exe", "/proc/thread-self/exe", "/proc/1/exe", "/proc/self/fd/1", "/tmp/planted", "/tmp/planted0"} {
		if info, err := files.Write(t.Context(), "root", name, 0o644, strings.NewReader("x")); err == nil {
			t.Errorf("%s: written as %+v", name, info)
		}
	}
	if said := d.Sh(t, ref, "ls -A / | grep sandbox-init || true"); said != "" {
		t.Errorf("a write made %s", said)
	}
	list, err := files.List(t.Context(), "root", "/proc", 3)
	if err != nil {
		t.Logf("/proc, three deep: %v", err)
	}
	for _, info := range list {
		if strings.HasPrefix(info.Path, "/proc/1/") {
			t.Errorf("a listing of /proc enters %s", info.Path)
			break
		}
	}
	// Nor is any of them a working directory.
	begin := func(dir string) error {
		_, err := d.Try(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{"true"}, WorkDir: dir})
		return err
	}
	for _, name := range append([]string{"self", "thread-self", "1"}, tids...) {
		for _, sub := range []string{"", "/fd", "/ns", "/task", "/net", "/fdinfo"} {
			if dir := "/proc/" + name + sub; codeOf(begin(dir)) != "workdir_not_found" {
				t.Errorf("a command begins in %s: %v", dir, begin(dir))
			}
		}
	}
	// The same look at an ordinary process.
	pid := d.Sh(t, ref, "sleep 60 >/dev/null 2>&1 & echo $!")
	for _, dir := range []string{"/proc", "/proc/" + pid, "/proc/" + pid + "/fd", "/proc/sys"} {
		if err := begin(dir); err != nil {
			t.Errorf("the control does not begin in %s: %v", dir, err)
		}
	}
	_, r, err := files.Read(t.Context(), "root", "/proc/"+pid+"/status", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	_ = r.Close()
	if err != nil || !strings.Contains(string(b), "sleep") {
		t.Errorf("the control reads %q, %v", b, err)
	}
}
