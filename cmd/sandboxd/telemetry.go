package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/internal/trace"
	"github.com/sandboxd/sandboxd/metrics"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/state"
	"github.com/sandboxd/sandboxd/webhook"
)

// The fits of those who tell.
var (
	_ runtime.Observer = observer{}
	_ server.Watcher   = watcher{}
)

// telemetryConfig is about who is told what the daemon does.
type telemetryConfig struct {
	Endpoint string  `yaml:"otlp_endpoint"` // URL of an OpenTelemetry collector; empty: no traces
	Sample   float64 `yaml:"sample"`        // the part of requests drawn
}

// lastTraces is how long the daemon's end waits for the collector.
const lastTraces = 3 * time.Second

func (c config) traces(log *slog.Logger) trace.Config {
	return trace.Config{Endpoint: c.Telemetry.Endpoint, Sample: c.Telemetry.Sample, Version: version, Log: log}
}

// telemetry is told what the daemon does.
type telemetry struct {
	metrics *metrics.Registry
	traces  *trace.Tracer // nil: off
	whole   map[runtime.Work]bool
	read    atomic.Pointer[func(context.Context) (metrics.Reading, error)] // nil until open
}

func newTelemetry(ctx context.Context, c config, log *slog.Logger) (*telemetry, error) {
	traces, err := trace.Open(ctx, c.traces(log))
	if err != nil {
		return nil, fmt.Errorf("telemetry: %w", err)
	}
	t := &telemetry{traces: traces, whole: map[runtime.Work]bool{}}
	var works []string
	for _, w := range runtime.Works() {
		works, t.whole[w] = append(works, string(w)), true
	}
	t.metrics = metrics.New(metrics.Config{
		Version: version, Works: works, Log: log,
		Read: func(ctx context.Context) (metrics.Reading, error) {
			read := t.read.Load()
			if read == nil {
				return metrics.Reading{}, errors.New("the daemon is starting")
			}
			return (*read)(ctx)
		},
	})
	return t, nil
}

// close sends the last traces.
func (t *telemetry) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), lastTraces)
	defer cancel()
	return t.traces.Close(ctx)
}

// observer is told by the managers what they work at.
type observer struct{ *telemetry }

// Begin times a work and draws it; its parts are only drawn.
func (o observer) Begin(ctx context.Context, w runtime.Work) (context.Context, func(error)) {
	ctx, drawn := o.traces.Work(ctx, string(w))
	if !o.whole[w] {
		return ctx, drawn
	}
	began := time.Now()
	return ctx, func(err error) {
		o.metrics.Work(string(w), time.Since(began), err)
		drawn(err)
	}
}

// watcher is told by the API what it is asked.
type watcher struct{ *telemetry }

// Expect names the operations to count.
func (w watcher) Expect(operations []string) { w.metrics.Expect(operations...) }

// Begin draws a request.
func (w watcher) Begin(ctx context.Context, r *http.Request, id string) context.Context {
	return w.traces.Request(ctx, r, id)
}

// End counts a request, and ends its drawing.
func (w watcher) End(ctx context.Context, operation string, status int) {
	w.metrics.Request(operation, status)
	w.traces.Answer(ctx, operation, status)
}

// open begins to answer those who ask, and returns what ends that.
func (t *telemetry) open(ctx context.Context, c config, w *worlds, hooks *webhook.Desk) (func(), error) {
	r, err := newReader(ctx, c, w, hooks)
	if err != nil {
		return nil, err
	}
	read := r.read
	t.read.Store(&read)
	if c.MetricsListen == "" {
		return func() {}, nil
	}
	ln, err := net.Listen("tcp", c.MetricsListen)
	if err != nil {
		return nil, fmt.Errorf("listen for scrapes on %s: %w; choose another metrics_listen", c.MetricsListen, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", t.metrics.Handler())
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10}
	go func() { _ = srv.Serve(ln) }() // until Close
	return func() { _ = srv.Close() }, nil
}

func (c config) checkTelemetry() (errs []error) {
	if err := c.traces(nil).Check(); err != nil {
		errs = append(errs, fmt.Errorf("telemetry: %w", err))
	}
	if c.MetricsListen == "" {
		return errs
	}
	at, err := netip.ParseAddrPort(c.MetricsListen)
	if err != nil || !at.Addr().IsLoopback() {
		errs = append(errs, fmt.Errorf("metrics_listen %.80q: use a loopback address and a port, as 127.0.0.1:9464: whoever reaches it is not asked who they are", c.MetricsListen))
	}
	return errs
}

// reader finds out what there is, when somebody scrapes.
type reader struct {
	c     config
	w     *worlds
	hooks *webhook.Desk

	mu   sync.Mutex
	seen map[string]int64 // number of the last event counted, by world; guarded by mu
}

func newReader(ctx context.Context, c config, w *worlds, hooks *webhook.Desk) (*reader, error) {
	r := &reader{c: c, w: w, hooks: hooks, seen: map[string]int64{}}
	last, err := w.parts.db.LastEventSeq(ctx)
	r.seen[worldLab] = last
	if _, db := w.promoted(); err == nil && db != nil {
		r.seen[worldProduction], err = db.LastEventSeq(ctx)
	}
	return r, err
}

// The worlds' names in metrics.
const (
	worldLab        = "lab"
	worldProduction = "production"
)

func (r *reader) read(ctx context.Context) (metrics.Reading, error) {
	hooks := r.hooks.Stats()
	reading := metrics.Reading{
		Connections: server.Connections(), Webhooks: hooks.Webhooks, WebhookWaiting: hooks.Waiting,
		WebhookDelivered: hooks.Delivered, WebhookFailed: hooks.Failed, WebhookGivenUp: hooks.Died,
	}
	lab, dead, err := r.world(ctx, worldLab, r.w.m, r.w.parts.db, filepath.Join(r.c.StateDir, "sandboxd.db"))
	errs := []error{err}
	reading.Worlds, reading.WebhookDeadLettersKept = append(reading.Worlds, lab), dead
	if m, db := r.w.promoted(); m != nil {
		far, _, err := r.world(ctx, worldProduction, m, db, r.w.database())
		reading.Worlds = append(reading.Worlds, far)
		errs = append(errs, err)
	}
	for name, dir := range map[string]string{"state": r.c.StateDir, "volume": filepath.Join(r.c.StateDir, "volume")} {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			errs = append(errs, fmt.Errorf("look at the file system of %s: %w", dir, err))
			continue
		}
		size := uint64(st.Bsize) //nolint:gosec // a block is never of negative size
		reading.Disks = append(reading.Disks, metrics.Disk{Name: name, Total: st.Blocks * size, Free: st.Bavail * size, Inodes: st.Files, FreeInos: st.Ffree})
	}
	return reading, errors.Join(errs...)
}

// world reads what there is of one world, and how many dead letters it keeps.
func (r *reader) world(ctx context.Context, name string, m *runtime.Manager, db *state.DB, file string) (metrics.World, int64, error) {
	s := m.Stats()
	w := metrics.World{
		Name: name, Living: s.Living, Ended: s.Ended, Pool: s.Pool, Used: s.Used, ByBudget: s.ByBudget, Spent: s.Spent,
	}
	for _, end := range []string{"", "-wal", "-shm"} {
		if fi, err := os.Stat(file + end); err == nil { // the latter two come and go
			w.Database += fi.Size()
		}
	}
	n, err := db.Counts(ctx)
	if err != nil {
		return w, 0, fmt.Errorf("count what the %s world keeps: %w", name, err)
	}
	w.Records, w.Images, w.Snapshots, w.Volumes = n.Ended, n.Images, n.Snapshots, n.Volumes
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.Events, err = db.EventTypes(ctx, r.seen[name], n.LastEvent); err != nil {
		return w, n.DeadLetters, fmt.Errorf("count the events of the %s world: %w", name, err)
	}
	r.seen[name] = max(r.seen[name], n.LastEvent)
	return w, n.DeadLetters, nil
}
