package main

import (
	"bytes"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
)

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// TestDaemonEndsInAnUpload: a connection that breaks in the middle of an upload is
// told, and is not taken for a reader of our output that went.
func TestDaemonEndsInAnUpload(t *testing.T) {
	for _, line := range []string{"files put dev /x", "cp - dev:/x", "image import x -", "snapshot import -"} {
		sock := filepath.Join(t.TempDir(), "s")
		l, err := net.Listen("unix", sock)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.ReadFull(c, make([]byte, 1<<20)) // the rest is never read
				_ = c.Close()
			}
		}()
		var out, errs bytes.Buffer
		c := &cli{name: "sandbox", in: endless{}, out: &out, err: &errs, getenv: func(string) string { return "" }}
		code := c.main(t.Context(), append([]string{"--host", "unix://" + sock}, strings.Fields(line)...))
		if code != exitTrouble || !strings.Contains(errs.String(), "(daemon_unreachable)") {
			t.Errorf("%s: exit %d, %q", line, code, &errs)
		}
		_ = l.Close()
	}
}

// TestLocalErrorsAreNotTheDaemons: what cannot be read on this machine is told as that.
func TestLocalErrorsAreNotTheDaemons(t *testing.T) {
	w := newWorld(t)
	w.ok("create", "--name", "dev")
	dir := t.TempDir()
	for _, line := range []string{"files put dev /x " + dir, "snapshot import " + dir} {
		code, _, errs := w.run("", strings.Fields(line)...)
		if code != exitTrouble || !strings.Contains(errs, "is a directory") || !strings.Contains(errs, "(local_file)") || strings.Contains(errs, "daemon") {
			t.Errorf("%s: exit %d, %q", line, code, errs)
		}
	}
}
