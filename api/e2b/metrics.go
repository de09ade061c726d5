package e2b

import (
	"context"
	"math"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// metric is what a sandbox uses at one time.
type metric struct {
	Timestamp     time.Time `json:"timestamp"`
	TimestampUnix int64     `json:"timestampUnix"`
	CPUCount      int64     `json:"cpuCount"`
	CPUUsedPct    float64   `json:"cpuUsedPct"`
	MemUsed       uint64    `json:"memUsed"`
	MemTotal      int64     `json:"memTotal"`
	MemCache      uint64    `json:"memCache"`
	DiskUsed      uint64    `json:"diskUsed"`
	DiskTotal     int64     `json:"diskTotal"`
}

// samples remembers when a sandbox's processor time was last read, for the
// share of it since. Of too many it forgets all: then the share is that since
// the start.
type samples struct {
	mu   sync.Mutex
	last map[sandbox.ID]sample // guarded by mu
}

type sample struct {
	at  time.Time
	cpu uint64 // microseconds
}

const maxSamples = 4096

// since returns the sample before, and puts another in its place.
func (s *samples) since(id sandbox.ID, next sample) (before sample, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == nil || len(s.last) >= maxSamples {
		s.last = map[sandbox.ID]sample{}
	}
	before, ok = s.last[id]
	s.last[id] = next
	return before, ok
}

// metricOf reads a sandbox's counters now.
func (s *Server) metricOf(ctx context.Context, box sandbox.Sandbox) (metric, error) {
	u, err := s.m.Usage(ctx, string(box.ID))
	if err != nil {
		return metric{}, err
	}
	now := time.Now().UTC()
	l := box.Spec.Limits
	m := metric{
		Timestamp: now, TimestampUnix: now.Unix(), CPUCount: max(int64(math.Ceil(l.CPUs)), 1),
		MemUsed: u.MemoryBytes, MemTotal: l.MemoryBytes, DiskUsed: u.DiskBytes, DiskTotal: l.DiskBytes,
	}
	before, ok := s.samples.since(box.ID, sample{now, u.CPUMicros})
	if !ok && box.StartedAt != nil {
		before = sample{at: *box.StartedAt}
	}
	if took := now.Sub(before.at).Microseconds(); took > 0 && u.CPUMicros >= before.cpu {
		m.CPUUsedPct = math.Round(1e4*float64(u.CPUMicros-before.cpu)/float64(took)) / 100
	}
	return m, nil
}

// metrics tells what a sandbox uses now: one entry, where that is in the span
// asked for. A sandbox that rests has none.
func (s *Server) metrics(_ http.ResponseWriter, r *http.Request, _ string) (int, any, error) {
	box, err := s.boxOf(r)
	if err != nil {
		return 0, nil, err
	}
	q := r.URL.Query()
	start, err := unixTime(q.Get("start"), 0)
	if err != nil {
		return 0, nil, err
	}
	end, err := unixTime(q.Get("end"), math.MaxInt64)
	if err != nil {
		return 0, nil, err
	}
	out := []metric{}
	if now := time.Now().Unix(); box.Status == sandbox.StatusRunning && start <= now && now <= end {
		m, err := s.metricOf(r.Context(), box)
		if err != nil {
			return 0, nil, gone(err)
		}
		out = append(out, m)
	}
	return http.StatusOK, out, nil
}

// maxMany is how many sandboxes one request asks the metrics of.
const maxMany = 100

// metricsOfMany tells of several sandboxes; those that are not there are left
// out.
func (s *Server) metricsOfMany(_ http.ResponseWriter, r *http.Request, _ string) (int, any, error) {
	out := map[string]metric{}
	var ids []string
	for _, text := range r.URL.Query()["sandbox_ids"] {
		ids = append(ids, strings.Split(text, ",")...)
	}
	if len(ids) > maxMany {
		return 0, nil, bad("invalid_query", "%d sandbox_ids: at most %d", len(ids), maxMany)
	}
	for _, id := range ids {
		box, err := s.boxBy(r.Context(), id)
		if err != nil || box.Status != sandbox.StatusRunning {
			continue
		}
		if m, err := s.metricOf(r.Context(), box); err == nil {
			out[id] = m
		}
	}
	return http.StatusOK, map[string]any{"sandboxes": out}, nil
}
