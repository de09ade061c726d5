package api

import (
	"encoding/binary"

	"github.com/sandboxd/sandboxd/sandbox"
)

// A process stream is one WebSocket (RFC 6455) per reader:
//
//	client                                server
//	  text  ProcessSpec (exec), RunRequest (run)  ──►
//	                                 ◄──  text  {"type":"started","process":{…}}
//	  bin   [0] stdin bytes          ──►
//	                                 ◄──  text  {"type":"stdin","bytes":N}     N taken of this client's
//	  text  {"type":"close-stdin"}   ──►
//	  text  {"type":"resize",…}      ──►
//	  text  {"type":"signal",…}      ──►
//	                                 ◄──  bin   [1|2] [offset, 8 bytes] output bytes
//	                                 ◄──  text  {"type":"dropped","bytes":N,"offset":O}
//	                                 ◄──  text  {"type":"heartbeat"}           every 15 s
//	                                 ◄──  text  {"type":"exit","exit":{…}}     then close 1000
//	                                 ◄──  text  {"type":"error","problem":{…}} then close
//
// The client holds back stdin beyond StdinWindow bytes not yet told as
// taken: the server can then read its side without ever waiting for the
// process, so signals and closes arrive however full the pipe is. Anything
// but "exit" and "error" before the close means the connection broke: attach
// again at the offset after the last byte received.
//
// A client that sends no more than one request uses POST instead, and gets
// the server's half of the same messages as the body of the response:
//
//	kind, 1 byte: FrameText or FrameBinary
//	length of the message, 4 bytes, big endian
//	the message
//
// A body that ends before "exit" or "error" broke off.

// Bounds of a process stream, in bytes.
const (
	StdinWindow   = 1 << 20   // stdin in flight
	MaxStdinFrame = 64 << 10  // data of one stdin frame
	MaxFrame      = 512 << 10 // any message, but for the texts below
	MaxText       = 16 << 20  // "started", which repeats what the client sent
)

// StreamContentType is the content type of a process stream over POST.
const StreamContentType = "application/vnd.sandboxd.stream"

// The kinds of frames of a process stream over POST.
const (
	FrameText   = 1 // a Message as JSON
	FrameBinary = 2 // an output frame
)

// FrameHeader is the length of what stands before each message, in bytes.
const FrameHeader = 1 + 4

// PutFrameHeader writes the header of a message of n bytes to b.
func PutFrameHeader(b []byte, kind byte, n int) {
	b[0] = kind
	binary.BigEndian.PutUint32(b[1:FrameHeader], uint32(n))
}

// ParseFrameHeader reads a header; false when it is none or announces a
// message longer than its kind may be.
func ParseFrameHeader(b []byte) (kind byte, n int, ok bool) {
	if len(b) < FrameHeader {
		return 0, 0, false
	}
	size := binary.BigEndian.Uint32(b[1:FrameHeader])
	switch {
	case b[0] == FrameText && size <= MaxText, b[0] == FrameBinary && size <= MaxFrame:
		return b[0], int(size), true
	}
	return 0, 0, false
}

// frameStdin is the kind of a stdin frame; output frames have their stream.
const frameStdin = 0

// OutputHeader is the length of what stands before the data of an output
// frame: the stream and the offset.
const OutputHeader = 1 + 8

// The types of a Message.
const (
	MsgStarted    = "started"
	MsgStdin      = "stdin"
	MsgCloseStdin = "close-stdin"
	MsgResize     = "resize"
	MsgSignal     = "signal"
	MsgDropped    = "dropped"
	MsgHeartbeat  = "heartbeat"
	MsgExit       = "exit"
	MsgError      = "error"
)

// Message is one text message of a process stream. Which fields are set
// follows from the type.
type Message struct {
	Type    string              `json:"type"`
	Process *sandbox.Process    `json:"process,omitempty"`
	Sandbox *sandbox.Sandbox    `json:"sandbox,omitempty"` // with started, of run
	Bytes   int64               `json:"bytes,omitempty"`
	Offset  int64               `json:"offset,omitempty"`
	Closed  bool                `json:"closed,omitempty"` // with stdin: the process takes no more
	Cols    uint16              `json:"cols,omitempty"`
	Rows    uint16              `json:"rows,omitempty"`
	Signal  string              `json:"signal,omitempty"`
	Exit    *sandbox.ExitStatus `json:"exit,omitempty"`
	Problem *Problem            `json:"problem,omitempty"`
}

// AppendOutput appends an output frame to b.
func AppendOutput(b []byte, stream sandbox.Stream, offset int64, data []byte) []byte {
	return append(AppendOutputHeader(b, stream, offset), data...)
}

// AppendOutputHeader appends an output frame without its data.
func AppendOutputHeader(b []byte, stream sandbox.Stream, offset int64) []byte {
	return binary.BigEndian.AppendUint64(append(b, byte(stream)), uint64(offset))
}

// ParseOutput splits an output frame; false when it is not one. The data
// shares b's memory.
func ParseOutput(b []byte) (stream sandbox.Stream, offset int64, data []byte, ok bool) {
	if len(b) < OutputHeader || (b[0] != byte(sandbox.Stdout) && b[0] != byte(sandbox.Stderr)) {
		return 0, 0, nil, false
	}
	off := int64(binary.BigEndian.Uint64(b[1:]))
	if off < 0 {
		return 0, 0, nil, false
	}
	return sandbox.Stream(b[0]), off, b[OutputHeader:], true
}

// AppendStdin appends a stdin frame to b.
func AppendStdin(b, data []byte) []byte {
	return append(append(b, frameStdin), data...)
}

// ParseStdin returns the data of a stdin frame; false when it is not one or
// too long. The data shares b's memory.
func ParseStdin(b []byte) ([]byte, bool) {
	if len(b) < 1 || b[0] != frameStdin || len(b) > 1+MaxStdinFrame {
		return nil, false
	}
	return b[1:], true
}
