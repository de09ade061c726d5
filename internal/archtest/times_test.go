package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// absolute finds an upper bound in seconds or less on a time that was
// measured: a busy machine breaks it. Compare with a control measured in the
// same run, or with what the wrong behaviour would take (minutes).
var absolute = regexp.MustCompile(`(took|elapsed|waited|time\.Since\(\w+\)) *>=? *([0-9]+ *\* *)?time\.(Nano|Micro|Milli)?[sS]econd`)

func TestNoTestAssertsAnAbsoluteTime(t *testing.T) {
	for _, p := range load(t) {
		files, err := filepath.Glob(filepath.Join(p.Dir, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			if m := absolute.Find(b); m != nil {
				t.Errorf("%s: %q asserts an absolute time", filepath.Join(p.short(), filepath.Base(f)), m)
			}
		}
	}
	for text, want := range map[string]bool{ // the control
		"took " + "> 5*time.Second": true, "took > 3*before": false, "took < time.Second": false,
	} {
		if absolute.MatchString(text) != want {
			t.Errorf("%q: found %v, want %v", text, !want, want)
		}
	}
}

// TestFileTimesByTheirOwnClock: whether a file may change again without a new
// time is asked of linux.FileClock. time.Now goes on while that stands still, as
// in guests that wait for a processor: a change was then missed.
func TestFileTimesByTheirOwnClock(t *testing.T) {
	about, wrong := regexp.MustCompile(`\.Ctim\b|\bcoarseClock\b|\.look\(ctx, `), regexp.MustCompile(`time\.(Now|Since)\(`)
	n := 0
	for _, p := range load(t) {
		for _, f := range p.GoFiles {
			b, err := os.ReadFile(filepath.Join(p.Dir, f))
			if err != nil {
				t.Fatal(err)
			}
			if !about.Match(b) {
				continue
			}
			n++
			if m := wrong.Find(b); m != nil {
				t.Errorf("%s: %s) beside change times of files: use linux.FileClock", filepath.Join(p.short(), f), m)
			}
		}
	}
	if n < 4 {
		t.Errorf("%d files about change times were found, want at least 4", n)
	}
}
