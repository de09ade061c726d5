package tarfile

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

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

// TestReaderWantsTheEnd: an archive cut anywhere is an error, and most of all one
// cut between two entries. The control has a block of zeros.
func TestReaderWantsTheEnd(t *testing.T) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for name, size := range map[string]int64{"empty": 0, "small": 5, "block": 512, "large": 3000} {
		if err := Write(w, &tar.Header{Name: name, Size: size, Typeflag: tar.TypeReg}, io.LimitReader(zeros{}, size)); err != nil {
			t.Fatal(err)
		}
	}
	// Headers of headers: those of pax, and of GNU a name that ends where a block does,
	// of which the terminator has a block of zeros to itself.
	for _, h := range []tar.Header{
		{Name: "pax", ModTime: time.Unix(1, 1), Format: tar.FormatPAX},
		{Name: "commented", Format: tar.FormatPAX, PAXRecords: map[string]string{"comment": strings.Repeat("long", 300)}},
		{Name: strings.Repeat("n", 512), Format: tar.FormatGNU},
		{Name: "l", Linkname: strings.Repeat("l", 1024), Typeflag: tar.TypeSymlink, Format: tar.FormatGNU},
		{Name: "global", Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "of all"}},
		{Name: "dir/", Typeflag: tar.TypeDir, ModTime: time.Unix(1, 1), Format: tar.FormatPAX},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	entries := buf.Len()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for i := range 2 * (buf.Len() + 1) {
		n, skip := i/2, i%2 > 0
		if in := n % block; in > 1 && in < block-1 && in%50 != 0 {
			continue
		}
		r := NewReader(iotest.OneByteReader(bytes.NewReader(buf.Bytes()[:n])))
		var err error
		for err == nil {
			if _, err = r.Next(); err == nil && !skip {
				_, err = io.Copy(io.Discard, r)
			}
		}
		if whole := errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF); whole != (n == entries+512 || n == entries+1024) {
			t.Errorf("%d bytes of %d, contents skipped %t: %v", n, buf.Len(), skip, err)
		}
		if n == entries && !errors.Is(err, ErrCut) {
			t.Errorf("all entries, and no end: %v", err)
		}
	}
}

// TestHolesAreSkipped: holes that are larger than any disk, and of which no byte is in
// the archive, take no time where nobody reads them.
func TestHolesAreSkipped(t *testing.T) {
	for name, records := range map[string]map[string]string{
		"of a real size": {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.numblocks": "0", "GNU.sparse.realsize": "9223372036854775807"},
		"of a size":      {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.numblocks": "0", "size": "9223372036854775807"},
	} {
		var body string
		for k, v := range records {
			n := len(k) + len(v) + 3
			n += len(strconv.Itoa(n + 1))
			body += fmt.Sprintf("%d %s=%s\n", n, k, v)
		}
		archive := rawHeader("x", 'x', len(body)) + body + strings.Repeat("\x00", block-len(body)%block) + rawHeader("holes", '7', 0) + rawHeader("last", '0', 0)
		if _, err := tar.NewReader(strings.NewReader(archive)).Next(); err != nil {
			t.Fatalf("control, %s: %v", name, err)
		}
		r := NewReader(strings.NewReader(archive + strings.Repeat("\x00", 2*block)))
		var names []string
		h, err := r.Next()
		for ; err == nil; h, err = r.Next() {
			names = append(names, h.Name)
		}
		if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %q, then %v", name, names, err)
		}
	}
}

// rawHeader is a header that tar.Writer does not write.
func rawHeader(name string, flag byte, size int) string {
	b := make([]byte, block)
	copy(b, name)
	copy(b[100:], "0000644\x000000000\x000000000\x00")
	copy(b[124:], fmt.Sprintf("%011o\x0000000000000\x00        ", size))
	b[156] = flag
	copy(b[257:], "ustar\x0000")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return string(b)
}

func TestDrain(t *testing.T) {
	padding := func() io.Reader { return io.LimitReader(zeros{}, 100_000) }
	if err := Drain(padding()); err != nil {
		t.Error(err)
	}
	if err := Drain(io.MultiReader(padding(), strings.NewReader("x"))); !errors.Is(err, errMore) {
		t.Error(err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
