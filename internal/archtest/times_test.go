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
