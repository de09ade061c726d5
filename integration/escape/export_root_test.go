//go:build root

package escape

import (
	"io"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestExportRefused exports what an image cannot say, in the second layer: it
// is refused with the file's path before the first byte, and does not break
// off. The controls are the same image without it, and as one merged tree.
func TestExportRefused(t *testing.T) {
	d := harness.Install(t, "")
	if err := ociImage(t, d, "below", imageConfig{}, dir("d"), file("d/keep", "kept")); err != nil {
		t.Fatal(err)
	}
	for name, step := range map[string]string{"sound": "echo x >/d/x", "marked": "echo x >/d/.wh.keep"} {
		if _, err := d.Build(t.Context(), sandbox.BuildRequest{Names: []string{name}, Dockerfile: "FROM below\nRUN " + step + "\n"}, nil, func(sandbox.BuildEvent) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	sb := d.New(t, sandbox.Spec{Image: "marked"})
	snap, err := d.Snapshot(t.Context(), string(sb.ID), sandbox.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	export := func(source string, format sandbox.ImageFormat) (io.ReadCloser, error) {
		return d.ExportImage(t.Context(), sandbox.ExportRequest{Source: source, Format: format})
	}
	for _, c := range []struct {
		what    string
		open    func() (io.ReadCloser, error)
		refused bool
	}{
		{"the marked image, oci", func() (io.ReadCloser, error) { return export("marked", sandbox.FormatOCI) }, true},
		{"the marked image, docker", func() (io.ReadCloser, error) { return export("marked", sandbox.FormatDocker) }, true},
		{"its sandbox", func() (io.ReadCloser, error) { return export(string(sb.ID), "") }, true},
		{"its snapshot", func() (io.ReadCloser, error) { return d.ExportSnapshot(t.Context(), string(snap.ID)) }, true},
		{"the marked image, merged", func() (io.ReadCloser, error) { return export("marked", sandbox.FormatTar) }, false},
		{"the sound image", func() (io.ReadCloser, error) { return export("sound", "") }, false},
	} {
		r, err := c.open()
		var n int64
		if err == nil {
			n, err = io.Copy(io.Discard, r)
			r.Close()
		}
		if !c.refused && (err != nil || n == 0) {
			t.Errorf("%s: %d bytes, %v", c.what, n, err)
		}
		if c.refused && (n > 0 || codeOf(err) != "layer_bad_name" || !strings.Contains(err.Error(), "d/.wh.keep")) {
			t.Errorf("%s: %d bytes, then %v", c.what, n, err)
		}
	}
}
