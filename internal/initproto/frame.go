package initproto

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// One operation has a stream connection to itself, so each has its own
// back-pressure and an ill-behaved one harms only itself:
//
//	daemon                                            PID 1
//	  │ Request {version, op, args} (+ descriptors)     │
//	  ├────────────────────────────────────────────────▶│
//	  │              Response {…}   or   Error {class…} │
//	  │◀────────────────────────────────────────────────┤
//	  │ Stdin, StdinEnd                Output …, Exit   │  exec, attach
//	  │ StdinOpen, StdinAt …                 Taken …    │
//	  │ Upload…, UploadEnd                    Response  │  write, tar-in (a second Response at the end)
//	  │                                  Data…, End     │  read, tar-out
//	  │                                  Item…, End     │  list, processes
//	  │                                  Item…          │  events, watch: until either side hangs up
//	  │ (hang up)                                       │
//	  └────────────────────────────────────────────────▶│
//
// After the first Response an Error frame may still end a stream.
//
// A request may ask to keep the connection. Where PID 1 does, an Idle frame
// follows the last one of an operation that ended well, and the next Request,
// again with descriptors, may be sent once it was read. PID 1 may leave out
// Idle, and then hangs up as ever; it never hangs up after it. Input still on
// its way to a process that has ended is dropped.
//
// Standard input that must come exactly once is sent with StdinOpen, the number
// of a sender's session with the process, and then StdinAt, data with its offset
// in that session. PID 1 drops what lies below the bytes the session's process
// has taken, and answers each of both with Taken: that number, and 1 where the
// process takes no more. A sender whose connection broke opens its session again
// on another one, and goes on there. Input of a connection without a session is
// taken as it comes.
//
// One frame:
//
//	┌──────┬───────────────┬──────────────┐
//	│ type │ length        │ payload      │
//	│ 1 B  │ 4 B, big end. │ length bytes │
//	└──────┴───────────────┴──────────────┘
//
// The first payload byte of Output follows a 17-byte head: stream (1), offset
// (8, big endian), bytes missing just before it (8, big endian).

// Version is spoken by both sides; each refuses any other.
const Version = 1

// FrameType tells what a frame carries. The high bit marks PID 1's frames.
type FrameType byte

// The frame types.
const (
	FrameRequest   FrameType = 0x01
	FrameStdin     FrameType = 0x02
	FrameStdinEnd  FrameType = 0x03
	FrameUpload    FrameType = 0x04
	FrameUploadEnd FrameType = 0x05
	FrameStdinOpen FrameType = 0x06
	FrameStdinAt   FrameType = 0x07

	FrameResponse FrameType = 0x81
	FrameError    FrameType = 0x82
	FrameItem     FrameType = 0x83
	FrameOutput   FrameType = 0x84
	FrameExit     FrameType = 0x85
	FrameData     FrameType = 0x86
	FrameEnd      FrameType = 0x87
	FrameIdle     FrameType = 0x88
	FrameTaken    FrameType = 0x89
)

// Bounds.
const (
	HeaderSize  = 5
	OutputHead  = 17
	StdinHead   = 8 // of StdinAt and StdinOpen
	TakenSize   = 9
	MaxControl  = 1 << 20   // Request, Response
	MaxItem     = 64 << 10  // Item, Exit, Error
	MaxData     = 256 << 10 // Stdin, Upload, Data; Output without its head
	MaxFDs      = 64        // descriptors with a request
	growAtOnce  = 64 << 10  // a payload is believed in steps of this size
	maxOutFrame = MaxData + OutputHead
)

// Side is one end of a connection.
type Side bool

// The sides.
const (
	Daemon Side = false
	Init   Side = true
)

var limits = map[FrameType]int{
	FrameRequest: MaxControl, FrameStdin: MaxData, FrameStdinEnd: 0, FrameUpload: MaxData, FrameUploadEnd: 0,
	FrameResponse: MaxControl, FrameError: MaxItem, FrameItem: MaxItem, FrameOutput: maxOutFrame,
	FrameExit: MaxItem, FrameData: MaxData, FrameEnd: 0, FrameIdle: 0,
	FrameStdinOpen: StdinHead, FrameStdinAt: StdinHead + MaxData, FrameTaken: TakenSize,
}

// ErrFrame is wrapped by every error about a frame that breaks the rules.
var ErrFrame = errors.New("protocol violation")

// Frame is one decoded frame. Payload is valid until the next ReadFrame that
// is given the same buffer.
type Frame struct {
	Type    FrameType
	Payload []byte
}

// ReadFrame reads one frame sent by from, into buf where it is large enough.
// A frame of an unknown type, of the other side, or over its type's bound is
// ErrFrame, told before its payload is read. The end of the stream before a
// frame is io.EOF, inside one io.ErrUnexpectedEOF.
func ReadFrame(r io.Reader, from Side, buf []byte) (Frame, error) {
	t, n, err := ReadHeader(r, from)
	if err != nil {
		return Frame{}, err
	}
	payload, err := ReadPayload(r, n, buf)
	if err != nil {
		return Frame{}, err
	}
	return Frame{Type: t, Payload: payload}, nil
}

// ReadHeader reads the beginning of a frame: its type, and how many bytes of
// payload follow, which are within the type's bound. Errors as ReadFrame.
func ReadHeader(r io.Reader, from Side) (FrameType, int, error) {
	var head [HeaderSize]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, 0, err
	}
	t := FrameType(head[0])
	limit, known := limits[t]
	if !known || (t&0x80 != 0) != bool(from) {
		return 0, 0, fmt.Errorf("%w: frame type %#02x is not one the other side sends", ErrFrame, head[0])
	}
	n := int64(binary.BigEndian.Uint32(head[1:]))
	if n > int64(limit) {
		return 0, 0, fmt.Errorf("%w: frame type %#02x of %d bytes, at most %d", ErrFrame, head[0], n, limit)
	}
	return t, int(n), nil
}

// ReadPayload reads the n bytes after a frame's beginning, into buf where it
// is large enough. The end of the stream is io.ErrUnexpectedEOF.
func ReadPayload(r io.Reader, n int, buf []byte) ([]byte, error) {
	p, err := readPayload(r, n, buf)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return p, err
}

// readPayload grows its buffer with the bytes that really come, so that a
// length alone buys no memory.
func readPayload(r io.Reader, n int, buf []byte) ([]byte, error) {
	if n <= cap(buf) {
		_, err := io.ReadFull(r, buf[:n])
		return buf[:n], err
	}
	p := make([]byte, 0, min(n, growAtOnce))
	for len(p) < n {
		step := min(n-len(p), growAtOnce)
		if cap(p)-len(p) < step {
			grown := make([]byte, len(p), min(n, 2*cap(p)+step))
			copy(grown, p)
			p = grown
		}
		if _, err := io.ReadFull(r, p[len(p):len(p)+step]); err != nil {
			return nil, err
		}
		p = p[:len(p)+step]
	}
	return p, nil
}

// AppendFrame appends a whole frame to b. It refuses what ReadFrame would.
func AppendFrame(b []byte, t FrameType, payload []byte) ([]byte, error) {
	limit, known := limits[t]
	if !known || len(payload) > limit {
		return b, fmt.Errorf("%w: sending frame type %#02x of %d bytes, at most %d", ErrFrame, byte(t), len(payload), limit)
	}
	b = append(b, byte(t))
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...), nil
}

// PutHeader writes the header of a frame whose n payload bytes follow.
func PutHeader(b []byte, t FrameType, n int) {
	b[0] = byte(t)
	binary.BigEndian.PutUint32(b[1:HeaderSize], uint32(n))
}

// AppendTaken appends a whole Taken frame.
func AppendTaken(b []byte, total int64, closed bool) []byte {
	b = append(b, byte(FrameTaken), 0, 0, 0, TakenSize)
	b = binary.BigEndian.AppendUint64(b, uint64(total))
	if closed {
		return append(b, 1)
	}
	return append(b, 0)
}

// ParseTaken takes a Taken payload apart.
func ParseTaken(p []byte) (total int64, closed bool, err error) {
	if len(p) != TakenSize {
		return 0, false, fmt.Errorf("%w: taken frame of %d bytes", ErrFrame, len(p))
	}
	if total = int64(binary.BigEndian.Uint64(p)); total < 0 {
		return 0, false, fmt.Errorf("%w: %d bytes taken", ErrFrame, total)
	}
	return total, p[8] != 0, nil
}

// ParseStdinHead reads the number at the beginning of StdinOpen and StdinAt.
func ParseStdinHead(p []byte) (n int64, rest []byte, err error) {
	if len(p) < StdinHead || p[0]&0x80 != 0 {
		return 0, nil, fmt.Errorf("%w: input frame of %d bytes", ErrFrame, len(p))
	}
	return int64(binary.BigEndian.Uint64(p)), p[StdinHead:], nil
}

// PutOutputHead writes the head of an Output payload.
func PutOutputHead(b []byte, stream byte, offset, dropped int64) {
	b[0] = stream
	binary.BigEndian.PutUint64(b[1:9], uint64(offset))
	binary.BigEndian.PutUint64(b[9:17], uint64(dropped))
}

// ParseOutput takes an Output payload apart. Negative or overflowing numbers
// and unknown streams are ErrFrame.
func ParseOutput(p []byte) (stream byte, offset, dropped int64, data []byte, err error) {
	if len(p) < OutputHead {
		return 0, 0, 0, nil, fmt.Errorf("%w: output frame of %d bytes", ErrFrame, len(p))
	}
	stream = p[0]
	offset = int64(binary.BigEndian.Uint64(p[1:9]))
	dropped = int64(binary.BigEndian.Uint64(p[9:17]))
	data = p[OutputHead:]
	if stream < 1 || stream > 2 || offset < 0 || dropped < 0 || dropped > offset || offset > 1<<62 {
		return 0, 0, 0, nil, fmt.Errorf("%w: output frame of stream %d at %d after %d missing bytes", ErrFrame, stream, offset, dropped)
	}
	return stream, offset, dropped, data, nil
}
