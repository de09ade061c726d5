//go:build root

package integration

import (
	"archive/tar"
	"bytes"
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestSetIDOfImageIsUseless runs a set-id program of root's that came with an
// image. TestSetIDIsUseless has the control: outside, such a program works.
func TestSetIDOfImageIsUseless(t *testing.T) {
	d := install(t, "")
	program, err := os.ReadFile(probeBinary(t))
	if err != nil {
		t.Fatal(err)
	}
	passwd := []byte("root:*:0:0:root:/:/bin/sh\nnobody:*:65534:65534:nobody:/:/bin/sh\n")
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, f := range []struct {
		name string
		mode int64
		data []byte
	}{{"suid", 0o6755, program}, {"etc/passwd", 0o644, passwd}} {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Typeflag: tar.TypeReg, Mode: f.mode, Size: int64(len(f.data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.ImportImage(t.Context(), "setid", &archive); err != nil {
		t.Fatal(err)
	}
	d.create(t, sandbox.Spec{Name: "s", Image: "setid"})
	if st, err := d.Files("s").Stat(t.Context(), "root", "/suid"); err != nil || st.Mode != 0o6755 || st.UID != 0 {
		t.Fatalf("inside, the program is %+v, %v", st, err)
	}
	if got := d.inside(t, "s", "nobody", "/suid", "status"); got["euid"] != "65534" || got["egid"] != "65534" || got["CapEff"] != "0000000000000000" {
		t.Errorf("set-id of an image: %v", got)
	}
}
