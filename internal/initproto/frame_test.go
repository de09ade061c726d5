package initproto

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestFramesSurviveTheWire(t *testing.T) {
	sizes := []int{0, 1, growAtOnce - 1, growAtOnce, growAtOnce + 1, 3*growAtOnce + 7, MaxControl}
	for ft, limit := range limits {
		for _, n := range sizes {
			payload := bytes.Repeat([]byte{byte(n)}, n)
			wire, err := AppendFrame(nil, ft, payload)
			if n > limit {
				if !errors.Is(err, ErrFrame) {
					t.Fatalf("type %#x: %d bytes accepted over the bound %d", ft, n, limit)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			f, err := ReadFrame(bytes.NewReader(wire), ft&0x80 != 0, nil)
			if err != nil || f.Type != ft || !bytes.Equal(f.Payload, payload) {
				t.Fatalf("type %#x, %d bytes: got type %#x, %d bytes, %v", ft, n, f.Type, len(f.Payload), err)
			}
		}
	}
}

func TestReadFrameRefuses(t *testing.T) {
	good, _ := AppendFrame(nil, FrameStdin, []byte("abc"))
	cases := map[string]struct {
		wire []byte
		from Side
		want error
	}{
		"unknown type":        {[]byte{0x7f, 0, 0, 0, 0}, Daemon, ErrFrame},
		"the other direction": {good, Init, ErrFrame},
		"over its bound":      {binary.BigEndian.AppendUint32([]byte{byte(FrameStdin)}, MaxData+1), Daemon, ErrFrame},
		"absurd length":       {[]byte{byte(FrameRequest), 0xff, 0xff, 0xff, 0xff}, Daemon, ErrFrame},
		"cut in the header":   {good[:3], Daemon, io.ErrUnexpectedEOF},
		"cut in the payload":  {good[:6], Daemon, io.ErrUnexpectedEOF},
		"nothing at all":      {nil, Daemon, io.EOF},
	}
	for name, c := range cases {
		if _, err := ReadFrame(bytes.NewReader(c.wire), c.from, nil); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
	}
	if _, err := ReadFrame(bytes.NewReader(good), Daemon, nil); err != nil {
		t.Errorf("the control frame itself: %v", err)
	}
}

func TestLengthAloneBuysNoMemory(t *testing.T) {
	head := binary.BigEndian.AppendUint32([]byte{byte(FrameRequest)}, MaxControl)
	got := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			_, _ = ReadFrame(bytes.NewReader(head), Daemon, nil)
		}
	}).AllocedBytesPerOp()
	if got > 2*growAtOnce {
		t.Errorf("a header that claims %d bytes and sends none cost %d bytes", MaxControl, got)
	}
}

func TestErrorsCrossTheWire(t *testing.T) {
	for _, class := range sandbox.Classes() {
		in := sandbox.Errorf(class, "some_code", "about %d things", 3)
		b, _ := json.Marshal(FromError(in))
		var e Error
		if err := json.Unmarshal(b, &e); err != nil {
			t.Fatal(err)
		}
		out := e.Err()
		if !errors.Is(sandbox.ClassOf(out), class) || sandbox.CodeOf(out) != "some_code" || out.Error() != in.Error() {
			t.Errorf("%v came back as %v, %s, %q", class, sandbox.ClassOf(out), sandbox.CodeOf(out), out)
		}
	}
	hostile := Error{Class: "made up", Code: "Nasty Code", Detail: "\x1b]0;owned\x07" + strings.Repeat("x", 1<<20)}.Err()
	if !errors.Is(sandbox.ClassOf(hostile), sandbox.ErrUnavailable) || sandbox.CodeOf(hostile) != "guest_error" ||
		strings.ContainsAny(hostile.Error(), "\x1b\x07") || len(hostile.Error()) > 2*maxDetail {
		t.Errorf("hostile error was let through: %.100q", hostile.Error())
	}
}

func fuzzSide(f *testing.F, from Side) {
	for ft := range limits {
		wire, _ := AppendFrame(nil, ft, nil)
		f.Add(append(wire, wire...))
	}
	out := make([]byte, OutputHead+1)
	PutOutputHead(out, 1, 5, 2)
	wire, _ := AppendFrame(nil, FrameOutput, out)
	f.Add(wire)
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		for {
			fr, err := ReadFrame(r, from, nil)
			if err != nil {
				return
			}
			if len(fr.Payload) > limits[fr.Type] || (fr.Type&0x80 != 0) != bool(from) {
				t.Fatalf("frame %#x of %d bytes got through", fr.Type, len(fr.Payload))
			}
			checkPayload(t, fr)
		}
	})
}

func checkPayload(t *testing.T, fr Frame) {
	switch fr.Type {
	case FrameOutput:
		stream, off, dropped, data, err := ParseOutput(fr.Payload)
		if err == nil && (stream < 1 || stream > 2 || off < 0 || dropped < 0 || dropped > off || len(data) > MaxData) {
			t.Fatalf("output %d %d %d %d", stream, off, dropped, len(data))
		}
	case FrameError:
		var e Error
		if json.Unmarshal(fr.Payload, &e) == nil {
			if err := e.Err(); sandbox.ClassOf(err) == nil {
				t.Fatalf("error without class: %v", err)
			}
		}
	case FrameRequest:
		var r Request
		_ = json.Unmarshal(fr.Payload, &r)
	}
}

func FuzzFramesFromDaemon(f *testing.F) { fuzzSide(f, Daemon) }
func FuzzFramesFromInit(f *testing.F)   { fuzzSide(f, Init) }
