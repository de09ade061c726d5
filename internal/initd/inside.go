package initd

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Programs inside may ask the daemon something: a line to an abstract unix
// socket, which the network namespace keeps to this sandbox and which is no file
// in anybody's root, and a line back. PID 1 understands none of it. It passes
// what is asked on among its events, bounded in length, number and rate, and
// hands the daemon's answer back:
//
//	program ──line──▶ PID 1 ──event asked──▶ daemon
//	program ◀─line─── PID 1 ◀──answer─────── daemon

const (
	// insideAddress is the socket's abstract name.
	insideAddress = "sandbox"
	// Askers at once, and questions a second of all together.
	maxAskers           = 16
	askRate, askBurst   = 10, 20
	askPatience         = 30 * time.Second // for the daemon's answer, over a restart of it
	askReads            = 10 * time.Second // for the next line
	answerTryLater      = `{"error":{"class":"unavailable","code":"daemon_unreachable","detail":"the daemon did not answer: send the same again, with the same key"}}`
	answerTooFast       = `{"error":{"class":"exhausted","code":"too_many_requests","detail":"at most 10 requests a second: wait a little"}}`
	answerTooLong       = `{"error":{"class":"too_large","code":"request_too_large","detail":"one line of JSON, at most 4096 bytes"}}`
	answerBufferedBytes = initproto.MaxAsk + 2
)

// askers are the questions that wait for an answer.
type askers struct {
	began   string // tells one PID 1 from another
	slots   chan struct{}
	mu      sync.Mutex
	last    int64
	waiting map[int64]chan string
	have    int64 // thousandths of questions that may be asked now
	at      time.Time
}

func newAskers(began time.Time) *askers {
	return &askers{
		began: strconv.FormatInt(began.UnixNano(), 36), slots: make(chan struct{}, maxAskers),
		waiting: map[int64]chan string{}, have: askBurst * 1000, at: began,
	}
}

// take reports whether one more question is within the rate.
func (a *askers) take(now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.have = min(askBurst*1000, a.have+now.Sub(a.at).Milliseconds()*askRate)
	a.at = now
	if a.have < 1000 {
		return false
	}
	a.have -= 1000
	return true
}

// begin numbers a question; end is to be called when nobody waits any more.
func (a *askers) begin() (id int64, answer <-chan string, end func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last++
	id, c := a.last, make(chan string, 1)
	a.waiting[id] = c
	return id, c, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.waiting, id)
	}
}

// answer hands an answer over; repeating it is safe.
func (a *askers) answer(id int64, line string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.waiting[id]
	if c == nil {
		return sandbox.Errorf(sandbox.ErrNotFound, "question_not_found", "nobody waits for the answer to question %d", id)
	}
	select {
	case c <- line:
	default:
	}
	return nil
}

// listenInside opens the socket. Whoever was in the network namespace before
// PID 1 may have the name: then there is none, and all else works.
func listenInside() (*guests, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	err = unix.Bind(fd, &unix.SockaddrUnix{Name: "@" + insideAddress})
	if err == nil {
		err = unix.Listen(fd, maxAskers)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("listening for programs inside: %w", err)
	}
	return newGuests(os.NewFile(uintptr(fd), "inside"))
}

// inside serves one connection: line after line.
func (s *Server) inside(c *guest) {
	f, in := c.f, bufio.NewReaderSize(c, answerBufferedBytes)
	for {
		if f.SetDeadline(time.Now().Add(askReads)) != nil {
			return
		}
		line, err := in.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			_, _ = io.WriteString(f, answerTooLong+"\n")
			return
		case err != nil:
			return
		}
		answer := s.ask(strings.TrimSpace(string(line)))
		if f.SetDeadline(time.Now().Add(askReads)) != nil {
			return
		}
		if _, err := io.WriteString(f, answer+"\n"); err != nil {
			return
		}
	}
}

// ask passes a question on and waits for its answer.
func (s *Server) ask(line string) string {
	if !s.asked.take(time.Now()) {
		return answerTooFast
	}
	id, answer, end := s.asked.begin()
	defer end()
	s.procs.tellAsked(initproto.Ask{ID: id, Key: s.asked.began + "-" + strconv.FormatInt(id, 10), Line: line})
	timer := time.NewTimer(askPatience)
	defer timer.Stop()
	select {
	case line := <-answer:
		return line
	case <-timer.C:
		return answerTryLater
	}
}

// tellAsked puts a question among the events.
func (t *table) tellAsked(a initproto.Ask) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.seq++
	t.keepLocked(initproto.Event{Seq: t.seq, Type: initproto.EventAsked, Live: t.live, Ask: &a})
}
