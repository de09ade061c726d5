package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/bench/report"
)

// How many clients ask at once, each over a connection of its own, and how
// often all of them together where they do not ask as fast as they can.
const (
	askers   = 200
	askPaceN = 3000 // a second
)

// asks measures questions about one sandbox over the unix socket: how many are
// answered, and how long each takes at a fixed pace. The floor is a server that
// does nothing but send the same answer.
func asks(ctx context.Context, b *bench, d *daemon, id string) (err error) {
	us := asker{socket: strings.TrimPrefix(d.socket, "unix://"), path: "/v1/sandboxes/" + id}
	answer, err := us.once(ctx)
	if err != nil {
		return err
	}
	floor := asker{socket: filepath.Join(b.dir, "floor.sock"), path: us.path}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "unix", floor.socket)
	if err != nil {
		return err
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(answer) // the asker tells
	})}
	go func() { _ = srv.Serve(ln) }() // until it is closed
	defer func() { err = errors.Join(err, srv.Close()) }()

	length := 2 * b.plan.netSlice
	cs := func(do func(asker, context.Context) (float64, error)) []contestant {
		return []contestant{
			{report.Floor, func(ctx context.Context) (float64, error) { return do(floor, ctx) }},
			{report.Us, func(ctx context.Context) (float64, error) { return do(us, ctx) }},
		}
	}
	note := fmt.Sprintf("%d clients, GET of one sandbox; floor: net/http with the same bytes, in the measuring program", askers)
	err = b.rounds(ctx, setting{name: "asks", title: "Questions answered a second", unit: "/s", more: true, note: note},
		b.plan.netRounds, 1, b.settled, cs(func(a asker, ctx context.Context) (float64, error) {
			times, took, err := a.all(ctx, length, 0)
			return float64(len(times)) / took.Seconds(), err
		})...)
	if err != nil {
		return err
	}
	return b.rounds(ctx, setting{
		name: "asks-latency", unit: "ms", note: note,
		title: fmt.Sprintf("Answer to a question at %d a second, 99th percentile", askPaceN),
	}, b.plan.netRounds, 1, b.settled, cs(func(a asker, ctx context.Context) (float64, error) {
		times, _, err := a.all(ctx, length, time.Second*askers/askPaceN)
		if err != nil {
			return 0, err
		}
		slices.Sort(times)
		return float64(times[len(times)*99/100]) / float64(time.Millisecond), nil
	})...)
}

// asker is where to ask what.
type asker struct{ socket, path string }

// conn is one client's connection.
type askerConn struct {
	net.Conn
	r       *bufio.Reader
	request []byte
}

func (a asker) dial(ctx context.Context) (*askerConn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", a.socket)
	if err != nil {
		return nil, err
	}
	return &askerConn{c, bufio.NewReader(c), []byte("GET " + a.path + " HTTP/1.1\r\nHost: sandboxd\r\n\r\n")}, nil
}

func (c *askerConn) ask() ([]byte, error) {
	if _, err := c.Write(c.request); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.300s", resp.Status, body)
	}
	return body, errors.Join(err, resp.Body.Close())
}

func (a asker) once(ctx context.Context) ([]byte, error) {
	c, err := a.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.ask()
}

// all has the clients ask for a while, each once in every pace or, with none,
// as fast as it can. Times count from when a question was due: one that has to
// wait for the answer before it is late.
func (a asker) all(ctx context.Context, length, pace time.Duration) (times []time.Duration, took time.Duration, err error) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	begin := time.Now()
	for i := range askers {
		wg.Go(func() {
			mine, err := a.some(ctx, begin.Add(pace*time.Duration(i)/askers), begin.Add(length), pace)
			mu.Lock()
			defer mu.Unlock()
			times = append(times, mine...)
			if err != nil {
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	took = time.Since(begin)
	if len(errs) > 0 {
		return nil, took, errs[0]
	}
	return times, took, nil
}

func (a asker) some(ctx context.Context, due, end time.Time, pace time.Duration) (times []time.Duration, err error) {
	c, err := a.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	for ; due.Before(end) && ctx.Err() == nil; due = due.Add(pace) {
		if pace == 0 {
			if due = time.Now(); !due.Before(end) {
				break
			}
		} else if err := pause(ctx, time.Until(due)); err != nil {
			return nil, err
		}
		if _, err := c.ask(); err != nil {
			return nil, err
		}
		times = append(times, time.Since(due))
	}
	return times, ctx.Err()
}
