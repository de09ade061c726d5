package main

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// TestSocketModeIsItsOwn: others' files have the modes they ask for while a
// socket is made, and the socket is root's alone from its first moment.
func TestSocketModeIsItsOwn(t *testing.T) {
	dir := t.TempDir()
	c := config{RunDir: dir, SocketGroup: "no such group"}
	done := make(chan bool)
	go func() {
		defer close(done)
		for range 2000 {
			ln, err := listen(c, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Error(err)
				return
			}
			if st, err := os.Lstat(c.socketPath()); err != nil || st.Mode().Perm() != 0o600 {
				t.Errorf("socket: %v, %v", st, err)
			}
			_ = ln.Close() // a listener of this test alone
		}
	}()
	for i := 0; ; i++ {
		select {
		case <-done:
			return
		default:
		}
		at := filepath.Join(dir, "d")
		if err := os.Mkdir(at, 0o755); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Lstat(at); err != nil || st.Mode().Perm() != 0o755 {
			t.Fatalf("a directory of somebody else's, the %d.: %v, %v", i, st.Mode(), err)
		}
		if err := os.Remove(at); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNoSocketInItsPlace: what lies where the socket was is told and left alone. The
// control is its removal, after which the socket is made again.
func TestNoSocketInItsPlace(t *testing.T) {
	c := config{RunDir: t.TempDir()}
	s, err := listenForGood(c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	// In one step, as the socket is looked for meanwhile.
	file := filepath.Join(c.RunDir, "file")
	if err := errors.Join(os.WriteFile(file, []byte("somebody's"), 0o600), os.Rename(file, c.socketPath())); err != nil {
		t.Fatal(err)
	}
	if _, err := s.restore(); err == nil || !strings.Contains(err.Error(), "is no socket") {
		t.Errorf("with a file in its place: %v", err)
	}
	if b, err := os.ReadFile(c.socketPath()); err != nil || string(b) != "somebody's" {
		t.Errorf("the file: %q, %v", b, err)
	}
	if err := os.Remove(c.socketPath()); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, "the socket again", func() bool { return exists(c.socketPath()) })
}
