package state

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestBuildSteps(t *testing.T) {
	d := open(t)
	step := func(layers ...string) sandbox.Image { return sandbox.Image{Kind: sandbox.ImageBuild, Layers: layers} }
	if _, err := d.BuildStep(t.Context(), "sha256:none"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a step nobody took: %v", err)
	}
	for _, key := range []string{"a", "b", "c", "d"} {
		if err := d.PutBuildStep(t.Context(), key, step("sha256:base", "upper:"+key)); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.PutBuildStep(t.Context(), "a", step("upper:again")); err != nil {
		t.Fatal(err)
	}
	got, err := d.BuildStep(t.Context(), "a")
	if err != nil || !slices.Equal(got.Layers, []string{"upper:again"}) {
		t.Errorf("a step put twice: %v, %v", got, err)
	}
	if err := d.PutBuildStep(t.Context(), "n", sandbox.Image{Name: "named"}); sandbox.CodeOf(err) != "invalid_build_step" {
		t.Errorf("a step with a name: %v", err)
	}
	left := func() (keys []string) {
		for _, k := range []string{"a", "b", "c", "d"} { // not BuildStep, which would use them
			var n int
			if err := d.reader.QueryRow(`SELECT count(*) FROM build_cache WHERE key = ?`, k).Scan(&n); err != nil {
				t.Fatal(err)
			}
			if n > 0 {
				keys = append(keys, k)
			}
		}
		return keys
	}
	if gone, err := d.PruneBuildSteps(t.Context(), time.Now().Add(-time.Hour), 100); err != nil || gone != 0 || len(left()) != 4 {
		t.Errorf("nothing is old: %d gone, %v, left %v", gone, err, left())
	}
	if _, err := d.BuildStep(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	if gone, err := d.PruneBuildSteps(t.Context(), time.Unix(0, 1), 2); err != nil || gone != 2 || !slices.Equal(left(), []string{"a", "b"}) {
		t.Errorf("the two least lately used: %d gone, %v, left %v", gone, err, left())
	}
	if n, err := d.BuildSteps(t.Context()); err != nil || n != 2 {
		t.Errorf("%d steps, %v", n, err)
	}
	if gone, err := d.PruneBuildSteps(t.Context(), time.Now().Add(time.Hour), 100); err != nil || gone != 2 || left() != nil {
		t.Errorf("all are old: %d gone, %v, left %v", gone, err, left())
	}
}
