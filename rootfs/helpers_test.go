package rootfs

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"syscall"
	"testing"
	"time"
)

// tarEntry is one entry of a test archive; a name ending in '/' makes a
// directory, a link a symbolic link, unless kind says otherwise.
type tarEntry struct {
	name, link, data string
	kind             byte
	mode             int64
	uid, gid         int
	mtime            time.Time
	pax              map[string]string
}

func (e tarEntry) header() *tar.Header {
	h := &tar.Header{
		Typeflag: e.kind, Name: e.name, Linkname: e.link, Mode: e.mode, Uid: e.uid, Gid: e.gid,
		ModTime: e.mtime, PAXRecords: e.pax, Size: int64(len(e.data)),
	}
	switch {
	case e.kind != 0:
	case e.link != "":
		h.Typeflag = tar.TypeSymlink
	case e.name != "" && e.name[len(e.name)-1] == '/':
		h.Typeflag = tar.TypeDir
	default:
		h.Typeflag = tar.TypeReg
	}
	if h.Mode == 0 {
		h.Mode = 0o644
		if h.Typeflag == tar.TypeDir {
			h.Mode = 0o755
		}
	}
	if h.ModTime.IsZero() {
		h.ModTime = time.Unix(1e9, 0)
	}
	if e.pax != nil {
		h.Format = tar.FormatPAX
	}
	return h
}

func tarBytes(t testing.TB, entries ...tarEntry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		if err := w.WriteHeader(e.header()); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func tarOf(t testing.TB, entries ...tarEntry) io.Reader {
	return bytes.NewReader(tarBytes(t, entries...))
}

func statOf(t testing.TB, path string) *syscall.Stat_t {
	t.Helper()
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return st.Sys().(*syscall.Stat_t)
}
