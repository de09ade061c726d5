package main

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/bench/report"
	"github.com/sandboxd/sandboxd/internal/linux"
)

// The sandbox of the neighbour scenario, while another floods.
const (
	besideFlood  = report.Us + " beside a flood"
	besideBucket = report.Us + " beside one at 50 Mbit/s"
)

const (
	pingBytes  = 64
	floodBytes = 1400
	// floodCheck is how many packets go out between two looks at the clock.
	floodCheck = 64
)

// neighbour measures round trips out of one sandbox while another sends as
// many packets as it can, and as many as its limit lets through.
func (b *bench) neighbour(ctx context.Context, quiet, free, limited wire) error {
	beside := func(f *wire) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) { return quiet.pings(ctx, b.plan.pings, f) }
	}
	return b.rounds(ctx, setting{
		name: "neighbour", title: "64 bytes out of a sandbox and back, 99th percentile", unit: "µs",
		note: besideFlood + ": another sends packets of 1,400 bytes without pause; " + besideBucket + ": the same with a limit",
	}, b.plan.netRounds, 1, b.settled,
		contestant{report.Us, beside(nil)}, contestant{besideFlood, beside(&free)}, contestant{besideBucket, beside(&limited)})
}

// pings returns the 99th percentile of round trips over one connection, in
// microseconds, while flood, if any, is full.
func (w wire) pings(ctx context.Context, n int, flood *wire) (p99 float64, err error) {
	near, far, err := w.connect(ctx)
	if err != nil {
		return 0, err
	}
	defer near.Close()
	defer far.Close()
	go func() { _, _ = io.Copy(far, far) }() // ends with the connection
	if flood != nil {
		ctx, cancel := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- flood.fill(ctx) }()
		defer func() {
			cancel()
			err = errors.Join(err, <-ended)
		}()
	}
	took := make([]float64, 0, n)
	buf := make([]byte, pingBytes)
	for i := -n / 10; i < n; i++ { // those before 0: the flood gets under way
		start := time.Now()
		if _, err := near.Write(buf); err != nil {
			return 0, err
		}
		if _, err := io.ReadFull(near, buf); err != nil {
			return 0, err
		}
		if i >= 0 {
			took = append(took, float64(time.Since(start).Nanoseconds())/1e3)
		}
	}
	slices.Sort(took)
	return took[len(took)*99/100], ctx.Err()
}

// fill sends packets until ctx ends.
func (w wire) fill(ctx context.Context) error {
	var c net.Conn
	if err := linux.InNetNS(w.from, func() (err error) {
		c, err = (&net.Dialer{}).DialContext(ctx, "udp4", w.addr)
		return err
	}); err != nil {
		return err
	}
	defer c.Close()
	packet := make([]byte, floodBytes)
	for ctx.Err() == nil {
		for range floodCheck {
			_ = c.SetWriteDeadline(time.Now().Add(time.Second))
			_, err := c.Write(packet) // refused: nobody listens there, as those who flood do not care
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return err
			}
		}
	}
	return nil
}
