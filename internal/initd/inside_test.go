package initd

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// askedServer answers what programs inside ask with what they asked, as a
// daemon would.
func askedServer(t *testing.T) *Server {
	s := New("test")
	stop := false
	t.Cleanup(func() {
		s.procs.mu.Lock()
		stop = true
		s.procs.changed.Broadcast()
		s.procs.mu.Unlock()
	})
	go func() {
		for seq := int64(0); ; {
			events, ok := s.procs.eventsAfter(seq, &stop)
			if !ok {
				return
			}
			for _, e := range events {
				seq = e.Seq
				_ = s.asked.answer(e.Ask.ID, "to "+e.Ask.Line)
			}
		}
	}()
	return s
}

// program is the end of a connection that a program inside has.
func program(t *testing.T, s *Server) *os.File {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "inside"), os.NewFile(uintptr(fds[1]), "program")
	t.Cleanup(func() { _ = theirs.Close() })
	raw, err := ours.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer ours.Close()
		s.inside(&guest{f: ours, raw: raw})
	}()
	_ = theirs.SetDeadline(time.Now().Add(20 * time.Second))
	return theirs
}

func TestInsideAsks(t *testing.T) {
	s := askedServer(t)
	p := program(t, s)
	in := bufio.NewReader(p)
	for i := range 3 {
		fmt.Fprintf(p, "line %d\n", i)
		if got, err := in.ReadString('\n'); err != nil || got != fmt.Sprintf("to line %d\n", i) {
			t.Fatalf("%q, %v", got, err)
		}
	}
	fast := 0
	for range 2 * askBurst {
		fmt.Fprintln(p, "x")
		got, err := in.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(got, "too_many_requests") {
			fast++
		}
	}
	if fast == 0 || fast == 2*askBurst {
		t.Errorf("%d of %d questions at once were too many", fast, 2*askBurst)
	}
	long := program(t, s)
	go fmt.Fprint(long, strings.Repeat("x", 8192))
	if got, err := bufio.NewReader(long).ReadString('\n'); err != nil || !strings.Contains(got, "request_too_large") {
		t.Errorf("a line without end: %q, %v", got, err)
	}
	if err := s.asked.answer(1, "late"); sandbox.CodeOf(err) != "question_not_found" {
		t.Errorf("an answer nobody waits for: %v", err)
	}
}
