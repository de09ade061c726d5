package guest

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestInputWaitsForOutput: PID 1 that takes no input until its output is read,
// and meanwhile tells what was taken, as of a process that is read as slowly as
// it reads, is read on: the input it does not take yet holds up no output.
func TestInputWaitsForOutput(t *testing.T) {
	const input, pieces = 8 << 20, 64
	g := impostor(t, func(c net.Conn) {
		must := func(err error) {
			if err != nil {
				t.Error(err)
			}
		}
		send := func(kind initproto.FrameType, payload []byte) {
			b, err := initproto.AppendFrame(nil, kind, payload)
			if err == nil {
				_, err = c.Write(b)
			}
			must(err)
		}
		must(sendJSON(c, initproto.FrameResponse, sandbox.Process{ID: "p1", Argv: []string{"cat"}}))
		_, err := initproto.ReadFrame(c, initproto.Daemon, nil) // StdinOpen
		must(err)
		taken, output := make([]byte, initproto.TakenSize), make([]byte, initproto.OutputHead+initproto.MaxData)
		for i := range int64(pieces) {
			send(initproto.FrameTaken, taken)
			initproto.PutOutputHead(output, 1, i*initproto.MaxData, 0)
			send(initproto.FrameOutput, output)
		}
		for left := input; left > 0; {
			f, err := initproto.ReadFrame(c, initproto.Daemon, nil)
			must(err)
			at, data, err := initproto.ParseStdinHead(f.Payload)
			must(err)
			if f.Type != initproto.FrameStdinAt || at != int64(input-left) || len(data) == 0 {
				t.Errorf("a frame of type %d with %d bytes at %d, want those at %d", f.Type, len(data), at, input-left)
				return
			}
			left -= len(data)
		}
		must(sendJSON(c, initproto.FrameExit, sandbox.ExitStatus{}))
	})
	p, err := g.Exec(t.Context(), sandbox.ProcessSpec{Argv: []string{"cat"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	ready, sent := make(chan bool), make(chan error, 1)
	first := true
	if err := p.OpenStdin(1, func(int64, bool) {
		if first {
			first = false
			close(ready)
		}
	}); err != nil {
		t.Fatal(err)
	}
	go func() {
		<-ready
		_, err := p.WriteStdin(make([]byte, input))
		sent <- err
	}()
	n := 0
	for {
		o, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		n += len(o.Data)
	}
	if err := <-sent; err != nil || n != pieces*initproto.MaxData {
		t.Errorf("%d bytes read, sending: %v", n, err)
	}
}
