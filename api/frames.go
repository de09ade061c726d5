package api

import (
	"encoding/binary"

	"github.com/sandboxd/sandboxd/sandbox"
)

// A process stream is one WebSocket (RFC 6455) per reader:
//
//	client                                server
//	  text  ProcessSpec (exec only)  ──►
//	                                 ◄──  text  {"type":"started","process":{…}}
//	  bin   [0] stdin bytes          ──►
//	                                 ◄──  text  {"type":"stdin","bytes":N}     N taken in all
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

// Bounds of a process stream, in bytes.
const (
	StdinWindow   = 1 << 20   // stdin in flight
	MaxStdinFrame = 64 << 10  // data of one stdin frame
	MaxFrame      = 512 << 10 // any message
)

// frameStdin is the kind of a stdin frame; output frames have their stream.
const frameStdin = 0

// outputHeader is the kind and the offset.
const outputHeader = 1 + 8

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
	b = append(b, byte(stream))
	b = binary.BigEndian.AppendUint64(b, uint64(offset))
	return append(b, data...)
}

// ParseOutput splits an output frame; false when it is not one. The data
// shares b's memory.
func ParseOutput(b []byte) (stream sandbox.Stream, offset int64, data []byte, ok bool) {
	if len(b) < outputHeader || (b[0] != byte(sandbox.Stdout) && b[0] != byte(sandbox.Stderr)) {
		return 0, 0, nil, false
	}
	off := int64(binary.BigEndian.Uint64(b[1:]))
	if off < 0 {
		return 0, 0, nil, false
	}
	return sandbox.Stream(b[0]), off, b[outputHeader:], true
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
