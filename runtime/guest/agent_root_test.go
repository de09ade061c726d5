//go:build root

package guest_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestAnAgentWorksForAUser writes where the user may not, and gives the user
// what it makes.
func TestAnAgentWorksForAUser(t *testing.T) {
	b, _ := newRooted(t)
	if _, err := b.Write(ctx(t), "alice", "/srv/app/x", 0, strings.NewReader("")); !errors.Is(sandbox.ClassOf(err), sandbox.ErrForbidden) {
		t.Fatalf("alice herself wrote to /srv: %v", err)
	}
	a := b.Agent("alice")
	info, err := a.Write(ctx(t), "", "/srv/app/x", 0o600, strings.NewReader("one"))
	if err != nil || info.UID != 1000 || info.Mode != 0o600 {
		t.Fatalf("write: %+v %v", info, err)
	}
	if info, err = a.Stat(ctx(t), "", "/srv/app"); err != nil || info.UID != 1000 {
		t.Errorf("the directory that was made: %+v %v", info, err)
	}
	if info, err = a.Mkdir(ctx(t), "", "/srv/y/z", 0o750); err != nil || info.UID != 1000 || info.Mode != 0o750 {
		t.Errorf("mkdir: %+v %v", info, err)
	}
	if info, err = a.Stat(ctx(t), "", "/"); err != nil || info.UID != 0 {
		t.Errorf("a directory that was there: %+v %v", info, err)
	}

	want := map[string]string{"user.e2b.a": "1", "user.e2b.b": "two words"}
	if err := a.SetAttrs(ctx(t), "/srv/app/x", want); err != nil {
		t.Fatal(err)
	}
	if info, err = a.Stat(ctx(t), "", "/srv/app/x"); err != nil || cmp.Diff(want, info.Attrs) != "" {
		t.Errorf("attributes: %v %v", info.Attrs, err)
	}
	if info, err = b.Stat(ctx(t), "", "/srv/app/x"); err != nil || info.Attrs != nil {
		t.Errorf("told without being asked: %v %v", info.Attrs, err)
	}
	if err := a.SetAttrs(ctx(t), "/srv/app/x", map[string]string{"trusted.overlay.opaque": "y"}); !errors.Is(sandbox.ClassOf(err), sandbox.ErrInvalid) {
		t.Errorf("another namespace: %v", err)
	}
	if err := a.SetAttrs(ctx(t), "/proc/self/status", want); err == nil {
		t.Error("attributes in /proc")
	}
	// A new content has none, and stands in the same file.
	b.sh("ln /srv/app/x /srv/app/y")
	if info, err = a.Write(ctx(t), "", "/srv/app/x", 0, strings.NewReader("two")); err != nil || info.Attrs != nil || info.Mode != 0o600 {
		t.Errorf("replaced: %+v %v", info, err)
	}
	if got, err := readAll(t, b, "root", "/srv/app/y"); err != nil || got != "two" {
		t.Errorf("the other name of the file: %q %v", got, err)
	}
	broken := errors.New("broken")
	if _, err := a.Write(ctx(t), "", "/srv/app/none", 0, io.MultiReader(strings.NewReader("part"), iotest.ErrReader(broken))); !errors.Is(err, broken) {
		t.Errorf("a broken upload: %v", err)
	}
	testenv.Eventually(t, 5*time.Second, "nothing is left of the broken upload", func() bool {
		_, err := a.Stat(ctx(t), "", "/srv/app/none")
		return errors.Is(sandbox.ClassOf(err), sandbox.ErrNotFound)
	})
	b.sh("mkfifo /srv/app/fifo; ln -s x /srv/app/link; chmod 700 /srv/app/x")
	if _, err := a.Write(ctx(t), "", "/srv/app/fifo", 0, strings.NewReader("x")); sandbox.CodeOf(err) != "not_a_file" {
		t.Errorf("to a FIFO: %v", err)
	}
	if _, err := a.Write(ctx(t), "", "/srv/app", 0, strings.NewReader("x")); sandbox.CodeOf(err) != "is_a_directory" {
		t.Errorf("to a directory: %v", err)
	}
	if info, err = a.Write(ctx(t), "", "/srv/app/link", 0, strings.NewReader("three")); err != nil || info.Mode != 0o700 {
		t.Errorf("through a link: %+v %v", info, err)
	}
	if got, err := readAll(t, b, "root", "/srv/app/y"); err != nil || got != "three" {
		t.Errorf("through a link: %q %v", got, err)
	}
	b.sh("chmod 600 /srv/app/x")

	b.sh("ln -s ../app/x /srv/y/link; ln -s nowhere /srv/y/dead")
	list, err := a.List(ctx(t), "", "/srv/y", 1)
	if err != nil || len(list) != 3 {
		t.Fatalf("%v %v", list, err)
	}
	for _, info := range list {
		end := sandbox.LinkEnd{Path: "/srv/app/x", Type: sandbox.FileRegular, Mode: 0o600}
		switch {
		case info.Name == "link" && (info.Leads == nil || *info.Leads != end):
			t.Errorf("link: %+v", info.Leads)
		case info.Name != "link" && info.Leads != nil:
			t.Errorf("%s leads to %+v", info.Name, info.Leads)
		}
	}
	// As docs/E2B.md says, and as E2B's own agent does it: a link of the user's is followed with root's rights.
	b.sh("install -d -o 1000 /srv/hers; echo of root >/srv/closed; chmod 600 /srv/closed; ln -s /srv/closed /srv/hers/link; chown -h 1000 /srv/hers/link")
	if _, err := readAll(t, b, "alice", "/srv/hers/link"); !errors.Is(sandbox.ClassOf(err), sandbox.ErrForbidden) {
		t.Errorf("alice herself read it: %v", err)
	}
	if _, r, err := a.Read(ctx(t), "", "/srv/hers/link", 0, -1); err != nil {
		t.Errorf("read through her link: %v", err)
	} else if got, err := io.ReadAll(r); err != nil || string(got) != "of root\n" || r.Close() != nil {
		t.Errorf("read through her link: %q %v", got, err)
	}
	if info, err = a.Write(ctx(t), "", "/srv/hers/link", 0, strings.NewReader("changed")); err != nil || info.UID != 1000 || info.Mode != 0o600 {
		t.Errorf("written through her link: %+v %v", info, err)
	}
	if _, err := b.Agent("nobody there").Stat(ctx(t), "", "/"); sandbox.CodeOf(err) != "unknown_user" {
		t.Errorf("an unknown user: %v", err)
	}
}

// TestInputArrivesInOrder feeds a process by calls of their own, one longer
// than its pipe.
func TestInputArrivesInOrder(t *testing.T) {
	b, _ := newRooted(t)
	p, err := b.Exec(ctx(t), sandbox.ProcessSpec{Argv: []string{"sh", "-c", "sleep 0.2; cat"}, Stdin: true, OutputBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	parts := []string{"a", strings.Repeat("b", 600<<10), "c", ""}
	var feeder sync.WaitGroup
	feeder.Go(func() {
		for i, part := range parts {
			if err := p.Feed(ctx(t), []byte(part), i == len(parts)-1); err != nil {
				t.Errorf("part %d: %v", i, err)
			}
		}
	})
	var got strings.Builder
	for {
		o, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got.Write(o.Data)
	}
	feeder.Wait()
	if got.String() != strings.Join(parts, "") {
		t.Errorf("%d bytes", got.Len())
	}
	if err := p.Feed(ctx(t), []byte("late"), false); sandbox.CodeOf(err) != "stdin_closed" {
		t.Errorf("to one that has ended: %v", err)
	}
}

// TestAgentWritesLeaveNothingOpen: files that are made, replaced or broken off
// leave PID 1 no descriptor. The control keeps one file open.
func TestAgentWritesLeaveNothingOpen(t *testing.T) {
	b, _ := newRooted(t)
	open := func() int {
		all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	a := b.Agent("alice")
	write := func(i int, r io.Reader) error {
		_, err := a.Write(ctx(t), "", fmt.Sprintf("/srv/f%d", i), 0, r)
		return err
	}
	if err := write(0, strings.NewReader("warm")); err != nil {
		t.Fatal(err)
	}
	before := open()
	testenv.Within(time.Second, func() bool { before = min(before, open()); return false }) // PID 1 may not have closed the first yet
	r, w := io.Pipe()
	kept := make(chan error)
	go func() { kept <- write(1, r) }()
	testenv.Eventually(t, 10*time.Second, "the control: a file is open", func() bool { return open() > before })
	_ = w.Close()
	if err := <-kept; err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		if err := write(i, strings.NewReader("x")); err != nil {
			t.Fatal(err)
		}
		if err := write(100+i, iotest.ErrReader(io.ErrUnexpectedEOF)); err == nil {
			t.Fatal("a write that broke off is none")
		}
	}
	testenv.Eventually(t, 10*time.Second, "all is closed", func() bool { return open() <= before+8 })
}
