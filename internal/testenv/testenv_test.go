package testenv

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"
)

func TestParsePromises(t *testing.T) {
	got, err := parsePromises(" root, cgroup,,")
	if err != nil || len(got) != 2 || !got["root"] || !got["cgroup"] {
		t.Errorf("parsePromises: %v, %v; want root and cgroup", got, err)
	}
	if _, err := parsePromises("root,cgroups"); err == nil || !strings.Contains(err.Error(), `"cgroups"`) {
		t.Errorf("an unknown feature gave %v, want an error that names it", err)
	}
}

// recorder notes how a test under test ended.
type recorder struct {
	testing.TB
	ended string
}

type ended struct{}

func (r *recorder) Helper()               {}
func (r *recorder) Skipf(string, ...any)  { r.ended = "skip"; panic(ended{}) }
func (r *recorder) Fatal(...any)          { r.ended = "fatal"; panic(ended{}) }
func (r *recorder) Fatalf(string, ...any) { r.ended = "fatal"; panic(ended{}) }

func outcome(f func(testing.TB)) string {
	r := &recorder{ended: "run"}
	func() {
		defer func() {
			if p := recover(); p != nil && p != (ended{}) {
				panic(p)
			}
		}()
		f(r)
	}()
	return r.ended
}

func TestNeed(t *testing.T) {
	there := feature("root", func() error { return nil })
	missing := feature("quota", func() error { return errors.New("no such thing") })
	for _, c := range []struct {
		name, promised string
		need           []*Feature
		want           string
	}{
		{"nothing needed", "", nil, "run"},
		{"there", "", []*Feature{there}, "run"},
		{"there and promised", "root", []*Feature{there}, "run"},
		{"missing", "", []*Feature{there, missing}, "skip"},
		{"missing, another promised", "root", []*Feature{missing}, "skip"},
		{"missing though promised", "root,quota", []*Feature{there, missing}, "fatal"},
		{"promise unknown", "quotas", []*Feature{there}, "fatal"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv(promises, c.promised)
			if got := outcome(func(tb testing.TB) { Need(tb, c.need...) }); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

func TestProbeRunsOnce(t *testing.T) {
	n := 0
	f := feature("x", func() error { n++; return nil })
	_, _ = f.Missing(), f.Missing()
	if n != 1 {
		t.Errorf("the probe ran %d times, want once", n)
	}
}

func TestCycles(t *testing.T) {
	for _, c := range []struct {
		soak, cycles string
		want         int
	}{{"", "", 3}, {"1", "", 1000}, {"", "17", 17}, {"1", "17", 17}} {
		t.Setenv("SANDBOXD_SOAK", c.soak)
		t.Setenv("SANDBOXD_SOAK_CYCLES", c.cycles)
		if got := Cycles(t, 3, 1000); got != c.want {
			t.Errorf("soak %q, cycles %q: %d, want %d", c.soak, c.cycles, got, c.want)
		}
	}
	t.Setenv("SANDBOXD_SOAK_CYCLES", "many")
	if got := outcome(func(tb testing.TB) { Cycles(tb, 1, 2) }); got != "fatal" {
		t.Errorf("a count that is no number: %s, want fatal", got)
	}
}

func TestBinary(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("SANDBOXD_BIN", dir)
	if got := outcome(func(tb testing.TB) { Binary(tb, "sandbox") }); got != "fatal" {
		t.Errorf("a missing program: %s, want fatal", got)
	}
	if err := os.WriteFile(dir+"/sandbox", nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, want := Binary(t, "sandbox"), dir+"/sandbox"; got != want {
		t.Errorf("Binary: %s, want %s", got, want)
	}
}

func TestEventually(t *testing.T) {
	n := 0
	if got := outcome(func(tb testing.TB) {
		Eventually(tb, time.Minute, "third call", func() bool { n++; return n == 3 })
	}); got != "run" || n != 3 {
		t.Errorf("%s after %d calls, want run after 3", got, n)
	}
	if got := outcome(func(tb testing.TB) {
		Eventually(tb, 0, "never", func() bool { return false })
	}); got != "fatal" {
		t.Errorf("a condition that never holds: %s, want fatal", got)
	}
}
