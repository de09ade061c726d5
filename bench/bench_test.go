package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/bench/report"
)

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		only string
		want []string
		ok   bool
	}{
		{"", names(), true},
		{"exec,warm", []string{"exec", "warm"}, true},
		{"exec,nothing", nil, false},
	} {
		got, err := choose(c.only)
		var found []string
		for _, s := range got {
			found = append(found, s.name)
		}
		if !slices.Equal(found, c.want) || (err == nil) != c.ok {
			t.Errorf("%q: %v, %v", c.only, found, err)
		}
	}
}

// outcome returns how the goal that begins so was judged.
func outcome(t *testing.T, r *report.Report, begins string) report.Outcome {
	t.Helper()
	for _, v := range judge(r) {
		if len(v.Goal) >= len(begins) && v.Goal[:len(begins)] == begins {
			return v.Outcome
		}
	}
	t.Fatalf("no goal begins %q", begins)
	return ""
}

func TestJudge(t *testing.T) {
	r := &report.Report{}
	for _, goal := range goals {
		if got := outcome(t, r, goal.text); got != report.NotJudged {
			t.Errorf("nothing measured: %s: %s", goal.text, got)
		}
	}
	for _, c := range []string{"1", "4"} {
		r.Scene("churn-"+c, "", "")
	}
	r.Add("create-warm", report.Us, "ms", false, 5)
	r.Add("create-warm", "runc", "ms", false, 39) // 7.8 times
	r.Add("create-warm", "bwrap", "ms", false, 5)
	r.Add("exec", report.Us, "ms", false, 2)
	r.Add("exec", report.Floor, "ms", false, 1)
	r.Add("churn-1", report.Us, "/s", true, 30)
	r.Add("churn-4", report.Us, "/s", true, 90)
	r.Add("churn-1", "runc", "/s", true, 50)
	r.Add("density-latency", at(0), "ms", false, 4)
	r.Add("density-latency", at(1000), "ms", false, 7)
	for begins, want := range map[string]report.Outcome{
		"warm create → first byte: median": report.Met,
		"warm: at least 8 times":           report.Missed,
		"warm: no slower than bwrap":       report.Met,
		"warm: at least twice":             report.NotJudged, // crun was not there
		"exec of /bin/true":                report.Met,
		"churn: at least 80":               report.Met,
		"churn: at least twice":            report.Missed,
		"1,000 idle: create":               report.Missed,
		"1,000 idle: daemon":               report.NotJudged,
	} {
		if got := outcome(t, r, begins); got != want {
			t.Errorf("%s: %s, want %s", begins, got, want)
		}
	}
}

// A run in the virtual machine judges ratios and nothing else.
func TestJudgeEmulated(t *testing.T) {
	r := &report.Report{Mode: modeVM}
	r.Add("create-warm", report.Us, "ms", false, 5)
	r.Add("create-warm", "runc", "ms", false, 39)
	r.Add("create-warm", "bwrap", "ms", false, 5)
	for begins, want := range map[string]report.Outcome{
		"warm create → first byte: median": report.NotJudged,
		"warm: at least 8 times":           report.Missed,
		"warm: no slower than bwrap":       report.Met,
	} {
		if got := outcome(t, r, begins); got != want {
			t.Errorf("%s: %s, want %s", begins, got, want)
		}
	}
}

// Every contestant has one turn a round, after each wait, and the report keeps
// them apart whatever the order.
func TestRounds(t *testing.T) {
	b := &bench{rep: &report.Report{}}
	var turns []string
	waits := 0
	turn := func(name string, value float64) contestant {
		return contestant{name, func(context.Context) (float64, error) {
			turns = append(turns, name)
			if waits != len(turns) {
				t.Errorf("turn %d after %d waits", len(turns), waits)
			}
			return value, nil
		}}
	}
	wait := func(context.Context) error { waits++; return nil }
	const rounds, warmUp = 20, 2
	err := b.rounds(t.Context(), setting{name: "s"}, rounds, warmUp, wait, turn(report.Floor, 1), turn(report.Us, 2), turn("runc", 3))
	if err != nil {
		t.Fatal(err)
	}
	first := map[string]bool{}
	for round := range slices.Chunk(turns, 3) {
		first[round[0]] = true
		if slices.Sort(round); !slices.Equal(round, []string{report.Floor, "runc", report.Us}) {
			t.Errorf("a round of %q", round)
		}
	}
	if len(first) != 3 {
		t.Errorf("only %v began a round", first)
	}
	for i, s := range b.rep.Of("s") {
		if len(s.Samples) != rounds || slices.Max(s.Samples) != float64(i+1) || slices.Min(s.Samples) != float64(i+1) {
			t.Errorf("%s: %v", s.Contestant, s.Samples)
		}
	}
	if !b.owes {
		t.Error("our turns left nothing to wait for")
	}
}

// The lead uses up what was ready, and counts for nothing.
func TestLivesCountsAfterLead(t *testing.T) {
	b := &bench{plan: plan{slice: 50 * time.Millisecond}}
	ready := 1000 // gone in no time, each later life takes a while
	rate, err := b.lives(t.Context(), 1, 50*time.Millisecond, func(int) error {
		if ready--; ready < 0 {
			return pause(t.Context(), 5*time.Millisecond)
		}
		return nil
	})
	if err != nil || rate <= 0 || rate > 300 { // 200, and the one that was under way
		t.Errorf("%v lives a second, %v", rate, err)
	}
}

func TestPatternFindsOtherBytes(t *testing.T) {
	p := newPattern()
	const total = 3<<20 + 12345
	var b bytes.Buffer
	n, err := readThrough(io.TeeReader(p.reader(total), &b), make([]byte, 7777), p.check)
	if n != total || err != nil {
		t.Fatalf("the pattern itself: %d bytes, %v", n, err)
	}
	b.Bytes()[2<<20+5] ^= 1
	if _, err := readThrough(&b, make([]byte, 7777), p.check); err == nil {
		t.Error("a changed byte went unseen")
	}
}

func TestArchive(t *testing.T) {
	b, err := archive(12)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := unpacked(bytes.NewReader(b)); n != 12 || err != nil {
		t.Errorf("%d files, %v", n, err)
	}
	if n, err := unpacked(bytes.NewReader(b[:len(b)/2])); n == 12 || err == nil {
		t.Errorf("half of it: %d files, %v", n, err)
	}
}

func TestOthersShare(t *testing.T) {
	before, now := cpuTimes{all: 100, busy: 50, ours: 10}, cpuTimes{all: 120, busy: 65, ours: 20}
	if got := before.others(now); got != 0.25 {
		t.Errorf("of 20 s 15 were busy, 10 of them ours: others had %v", got)
	}
	if got := before.others(before); got != 0 {
		t.Errorf("no time: %v", got)
	}
}

func TestField(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte("MemFree:   7 kB\nMemAvailable:  1024 kB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := kilobytes(field(path, "MemAvailable:")); got != 1<<20 {
		t.Errorf("%d bytes", got)
	}
	if got := kilobytes(field(path, "Nothing:")); got != 0 {
		t.Errorf("a line that is not there: %d", got)
	}
}

func TestIsolates(t *testing.T) {
	host := map[string]bool{}
	said := "Seccomp:2\nNoNewPrivs:1\n"
	for _, n := range namespaces {
		host[n+":[1]"] = true
		said += n + ":[2]\n"
	}
	if err := isolates(said, host); err != nil {
		t.Errorf("all of its own: %v", err)
	}
	for _, c := range []struct{ old, other string }{
		{"Seccomp:2", "Seccomp:0"}, {"NoNewPrivs:1", "NoNewPrivs:0"}, {"net:[2]", "net:[1]"}, {"pid:[2]\n", ""},
	} {
		if err := isolates(strings.Replace(said, c.old, c.other, 1), host); err == nil {
			t.Errorf("with %q in place of %q: taken as alike", c.other, c.old)
		}
	}
}
