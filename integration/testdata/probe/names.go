package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"
)

// question is one for a name server, with labels of any bytes.
type question struct {
	ID     int      `json:"id"`
	Labels [][]byte `json:"labels"`
	Type   uint16   `json:"type"`
	Class  uint16   `json:"class,omitempty"` // 0: IN
	TCP    bool     `json:"tcp,omitempty"`
	Opcode uint8    `json:"opcode,omitempty"`
}

// reply is what it said: its code, and the addresses in it.
type reply struct {
	ID      int          `json:"id"`
	Rcode   int          `json:"rcode"` // -1: none
	Answers int          `json:"answers"`
	Addrs   []netip.Addr `json:"addrs"`
	TC      bool         `json:"tc"`
	Error   string       `json:"error,omitempty"`
}

// questions asks a server the questions in a file, one after another.
func questions(server, path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var list []question
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	out := make([]reply, len(list))
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	for i, q := range list {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			r, err := q.ask(server)
			if err != nil {
				r = reply{Rcode: -1, Error: err.Error()}
			}
			r.ID = q.ID
			out[i] = r
		})
	}
	wg.Wait()
	return json.NewEncoder(os.Stdout).Encode(out)
}

func (q question) message() []byte {
	m := []byte{byte(q.ID >> 8), byte(q.ID), 1 | q.Opcode<<3, 0, 0, 1, 0, 0, 0, 0, 0, 0} // recursion desired
	for _, l := range q.Labels {
		m = append(append(m, byte(len(l))), l...)
	}
	m = binary.BigEndian.AppendUint16(append(m, 0), q.Type)
	return binary.BigEndian.AppendUint16(m, max(q.Class, 1))
}

func (q question) ask(server string) (reply, error) {
	network := "udp4"
	if q.TCP {
		network = "tcp4"
	}
	c, err := net.DialTimeout(network, server, 5*time.Second)
	if err != nil {
		return reply{}, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(7 * time.Second))
	m := q.message()
	buf := make([]byte, 65536)
	if q.TCP {
		if _, err := c.Write(append([]byte{byte(len(m) >> 8), byte(len(m))}, m...)); err != nil {
			return reply{}, err
		}
		if _, err := io.ReadFull(c, buf[:2]); err != nil {
			return reply{}, err
		}
		buf = buf[:binary.BigEndian.Uint16(buf)]
		_, err = io.ReadFull(c, buf)
	} else {
		if _, err := c.Write(m); err != nil {
			return reply{}, err
		}
		var n int
		n, err = c.Read(buf)
		buf = buf[:n]
	}
	if err != nil {
		return reply{}, err
	}
	return readReply(buf)
}

// readReply finds the addresses in an answer (RFC 1035, 4.1).
func readReply(m []byte) (r reply, err error) {
	defer func() {
		if recover() != nil {
			err = errors.New("the reply ends too early")
		}
	}()
	r.Rcode, r.TC = int(m[3]&15), m[2]&2 != 0
	at := 12
	name := func() {
		for m[at] != 0 {
			if m[at]&0xc0 != 0 {
				at++
				break
			}
			at += 1 + int(m[at])
		}
		at++
	}
	for range binary.BigEndian.Uint16(m[4:]) {
		name()
		at += 4
	}
	r.Answers = int(binary.BigEndian.Uint16(m[6:]))
	for range r.Answers {
		name()
		kind, n := binary.BigEndian.Uint16(m[at:]), int(binary.BigEndian.Uint16(m[at+8:]))
		at += 10
		if data := m[at : at+n]; kind == 1 || kind == 28 {
			a, ok := netip.AddrFromSlice(data)
			if !ok {
				return r, fmt.Errorf("an address of %d bytes", n)
			}
			r.Addrs = append(r.Addrs, a)
		}
		at += n
	}
	return r, nil
}
