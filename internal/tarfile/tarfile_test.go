package tarfile

import (
	"archive/tar"
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestWrite(t *testing.T) {
	text := func(n int) string { return strings.Repeat("x", n) }
	for name, tc := range map[string]struct {
		says int64 // size of the file when it was looked at
		has  string
		want string
		code string
	}{
		"empty":                   {},
		"small":                   {5, "hello", "hello", ""},
		"large":                   {100_000, text(100_000), text(100_000), ""},
		"of /proc":                {0, text(9000), text(9000), ""},
		"of /sys":                 {4096, "on\n", "on\n", ""},
		"grew":                    {5000, text(9000), text(5000), ""},
		"shrank":                  {100_000, "rest", "", "file_changed"},
		"emptied":                 {5000, "", "", "file_changed"},
		"without size, and large": {0, text(most + 1), "", "file_without_size"},
	} {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		err := Write(w, &tar.Header{Name: "f", Size: tc.says, Typeflag: tar.TypeReg}, strings.NewReader(tc.has))
		if tc.code != "" || err != nil {
			if err == nil || sandbox.CodeOf(err) != tc.code {
				t.Errorf("%s: %v, want %q", name, err, tc.code)
			}
			continue
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		r := tar.NewReader(&buf)
		if _, err := r.Next(); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r); err != nil || string(got) != tc.want {
			t.Errorf("%s: %d bytes, %v; want %d", name, len(got), err, len(tc.want))
		}
	}
}
