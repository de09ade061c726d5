package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// flowReport is what one flow lived through.
type flowReport struct {
	Local    string `json:"local"`
	Sent     int    `json:"sent"`
	Answered int    `json:"answered"`
	Error    string `json:"error,omitempty"` // what ended it before its time
}

const flowMessage = 64 // bytes

// flow keeps one flow busy and reads its echo, for a time or until SIGTERM.
func flow(target, length string) error {
	network, addr, ok := strings.Cut(target, "/")
	d, err := time.ParseDuration(length)
	if !ok || err != nil {
		return fmt.Errorf("flow %q %q: %w", target, length, err)
	}
	c, err := net.DialTimeout(network, addr, 5*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	fmt.Fprintln(os.Stderr, c.LocalAddr())
	r := flowReport{Local: c.LocalAddr().String()}
	var answered atomic.Int64
	failed := make(chan error, 1)
	go func() {
		buf := make([]byte, flowMessage)
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				failed <- err
				return
			}
			answered.Add(1)
		}
	}()
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGTERM)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	msg := make([]byte, flowMessage)
	for end := time.Now().Add(d); time.Now().Before(end) && r.Error == ""; {
		select {
		case <-told:
			end = time.Now()
		case err := <-failed:
			r.Error = err.Error()
		case <-tick.C:
			binary.BigEndian.PutUint64(msg, uint64(r.Sent))
			_ = c.SetWriteDeadline(time.Now().Add(time.Second))
			if _, err := c.Write(msg); err != nil {
				r.Error = err.Error()
				break
			}
			r.Sent++
		}
	}
	for end := time.Now().Add(2 * time.Second); r.Error == "" && int(answered.Load()) < r.Sent && time.Now().Before(end); {
		time.Sleep(time.Millisecond) //nolint:forbidigo // the poll itself
	}
	r.Answered = int(answered.Load())
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}
