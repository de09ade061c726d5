package mcp

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of what one answer holds of a command's output or of a file, in bytes.
const (
	defaultBytes = 32 << 10
	maxBytes     = 256 << 10
)

// piece is output of one stream.
type piece struct {
	stream sandbox.Stream
	offset int64
	data   []byte
}

// collector keeps the beginning and the end of a command's output, half of max
// each: what a command begins with tells what it does, what it ends with how
// that went.
type collector struct {
	max        int
	head, tail []piece
	headLen    int
	tailLen    int
	end        int64 // offset after the last byte seen
	dropped    int64 // lost on the way: nobody has them
}

// add takes output; it copies the data.
func (c *collector) add(out sandbox.Output) {
	c.dropped += out.Dropped
	data, offset := out.Data, out.Offset
	c.end = offset + int64(len(data))
	if n := min(c.max/2-c.headLen, len(data)); n > 0 && len(c.tail) == 0 {
		c.head = append(c.head, piece{out.Stream, offset, append([]byte(nil), data[:n]...)})
		c.headLen += n
		data, offset = data[n:], offset+int64(n)
	}
	if len(data) == 0 {
		return
	}
	c.tail = append(c.tail, piece{out.Stream, offset, append([]byte(nil), data...)})
	c.tailLen += len(data)
	for over := c.tailLen - (c.max - c.max/2); over > 0; over = c.tailLen - (c.max - c.max/2) {
		n := min(over, len(c.tail[0].data))
		c.tail[0].data = c.tail[0].data[n:]
		c.tail[0].offset += int64(n)
		c.tailLen -= n
		if len(c.tail[0].data) == 0 {
			c.tail = c.tail[1:]
		}
	}
}

// gap is the offsets of what lies between head and tail; false when nothing
// does.
func (c *collector) gap() (from, to int64, ok bool) {
	if len(c.tail) == 0 {
		return 0, 0, false
	}
	if n := len(c.head); n > 0 {
		last := c.head[n-1]
		from = last.offset + int64(len(last.data))
	}
	to = c.tail[0].offset
	return from, to, to > from
}

// text returns what was kept of one stream, or of both for 0.
func (c *collector) text(stream sandbox.Stream) string {
	var b strings.Builder
	put := func(pieces []piece) {
		for _, p := range pieces {
			if stream == 0 || p.stream == stream {
				b.Write(p.data)
			}
		}
	}
	put(c.head)
	if from, to, ok := c.gap(); ok {
		fmt.Fprintf(&b, "\n[… bytes %d to %d of the output are left out …]\n", from, to)
	}
	put(c.tail)
	return strings.ToValidUTF8(b.String(), "\uFFFD")
}

// whole cuts b where a character ends, so that two pieces of a text join
// again; bytes that are no text stay as they are.
func whole(b []byte) []byte {
	for n := 1; n <= min(utf8.UTFMax-1, len(b)); n++ {
		if c := b[len(b)-n]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-n:]) && len(b) > n {
				return b[:len(b)-n]
			}
			break
		}
	}
	return b
}
