package server

import (
	"bytes"
	"net/http"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// flushed is a response that tells what each flush sends.
type flushed struct {
	http.ResponseWriter
	buf  bytes.Buffer
	sent chan string
}

func (f *flushed) Header() http.Header         { return http.Header{} }
func (f *flushed) Write(p []byte) (int, error) { return f.buf.Write(p) }
func (f *flushed) FlushError() error           { f.sent <- f.buf.String(); f.buf.Reset(); return nil }

// TestMessagesAfterTheFirstFlush: a message that comes when the time to hold back is
// over leaves at once, and not with the next heartbeat.
func TestMessagesAfterTheFirstFlush(t *testing.T) {
	to := &flushed{sent: make(chan string, 8)}
	f := newFrameWriter(to)
	defer f.stop()
	if first := <-to.sent; first != "" {
		t.Errorf("the head of the answer is %q", first)
	}
	if err := f.message(t.Context(), api.Message{Type: api.MsgStarted}); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-to.sent:
		if !bytes.Contains([]byte(got), []byte(api.MsgStarted)) {
			t.Errorf("sent %q", got)
		}
	case <-time.After(heartbeat / 2):
		t.Error("it waits for the heartbeat")
	}
}
