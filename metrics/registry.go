package metrics

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Config is what a Registry is made of.
type Config struct {
	Version string
	Works   []string // as Work is told them
	// Read tells what there is, at each scrape. What it cannot find out it
	// leaves out, and says why.
	Read func(context.Context) (Reading, error)
	Log  *slog.Logger // nil: nowhere
}

// Bounds of a scrape.
const (
	scrapeTimeout = 10 * time.Second
	scrapesAtOnce = 4
)

// other is the label of what is on no list.
const other = "other"

// Registry holds the counters. It is safe for concurrent use.
type Registry struct {
	reg  *prometheus.Registry
	log  *slog.Logger
	read func(context.Context) (Reading, error)

	requests map[string]*[len(classes)]prometheus.Counter // by operation; nil of rare classes
	counts   *prometheus.CounterVec                       // of all
	works    map[string]map[string]prometheus.Counter     // by work and outcome
	took     map[string]prometheus.Observer               // by work

	events events
}

// classes are those of HTTP statuses, by their first digit, and last of a
// connection that ended without one.
var classes = [...]string{"1xx", "2xx", "3xx", "4xx", "5xx", "none"}

// outcomes are those of a work: ok, or the class of its error.
var outcomes = []struct {
	name  string
	class error
}{
	{"invalid", sandbox.ErrInvalid},
	{"not_found", sandbox.ErrNotFound},
	{"conflict", sandbox.ErrConflict},
	{"exhausted", sandbox.ErrExhausted},
	{"forbidden", sandbox.ErrForbidden},
	{"unsupported", sandbox.ErrUnsupported},
	{"unavailable", sandbox.ErrUnavailable},
	{"too_large", sandbox.ErrTooLarge},
	{"deadline", sandbox.ErrDeadline},
}

// ok and internal are the outcomes of no error and of one without a class.
const (
	ok       = "ok"
	internal = "internal"
)

// buckets of a work's seconds: a warm create takes milliseconds, one that
// waits for a slot or an image many seconds.
var buckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}

// New returns a registry with everything in it.
func New(c Config) *Registry {
	r := &Registry{
		reg: prometheus.NewRegistry(), log: c.Log, read: c.Read,
		requests: map[string]*[len(classes)]prometheus.Counter{},
		works:    map[string]map[string]prometheus.Counter{}, took: map[string]prometheus.Observer{},
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "sandboxd_api_requests_total", Help: "Requests that were answered, by operation of the API and class of the HTTP status.",
	}, []string{"operation", "class"})
	r.counts = requests
	r.Expect(other)
	works := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "sandboxd_work_total", Help: "What the daemon did to sandboxes, by work and outcome: ok, or the class of the error.",
	}, []string{"work", "outcome"})
	took := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "sandboxd_work_seconds", Help: "How long that took; of an exec, until the command had begun. Failures count too.", Buckets: buckets,
	}, []string{"work"})
	for _, w := range append([]string{other}, c.Works...) {
		r.took[w] = took.WithLabelValues(w)
		r.works[w] = map[string]prometheus.Counter{ok: works.WithLabelValues(w, ok), internal: works.WithLabelValues(w, internal)}
		for _, o := range outcomes {
			r.works[w][o.name] = works.WithLabelValues(w, o.name)
		}
	}
	build := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "sandboxd_build_info", Help: "1, with what this daemon is.",
		ConstLabels: prometheus.Labels{"version": c.Version, "go": runtime.Version()},
	}, func() float64 { return 1 })
	r.reg.MustRegister(requests, works, took, build, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), &scraper{r: r})
	return r
}

// Expect names operations of the API. It must not be called besides Request.
func (r *Registry) Expect(operations ...string) {
	for _, op := range operations {
		r.requests[op] = new([len(classes)]prometheus.Counter)
		for i, class := range classes {
			if class[0] == '2' || class[0] == '4' || class[0] == '5' {
				r.requests[op][i] = r.counts.WithLabelValues(op, class)
			}
		}
	}
}

// Request counts a request that was answered with an HTTP status, 0 where none
// was sent. An operation
// that was not expected is "other".
func (r *Registry) Request(operation string, status int) {
	c := r.requests[operation]
	if c == nil {
		operation, c = other, r.requests[other]
	}
	i := status/100 - 1
	if i < 0 || i >= len(classes)-1 {
		i = len(classes) - 1
	}
	if c[i] == nil {
		r.counts.WithLabelValues(operation, classes[i]).Inc()
		return
	}
	c[i].Inc()
}

// Work counts a work that ended, and how long it took.
func (r *Registry) Work(work string, took time.Duration, err error) {
	if r.works[work] == nil {
		work = other
	}
	r.works[work][outcome(err)].Inc()
	r.took[work].Observe(took.Seconds())
}

// outcome is how a work ended, in a word.
func outcome(err error) string {
	if err == nil {
		return ok
	}
	class := sandbox.ClassOf(err)
	for _, o := range outcomes {
		if errors.Is(class, o.class) {
			return o.name
		}
	}
	return internal
}

// Handler answers scrapes.
func (r *Registry) Handler() http.Handler {
	return promhttp.HandlerFor(r.reg, promhttp.HandlerOpts{
		ErrorLog: scrapeLog{r.log}, ErrorHandling: promhttp.ContinueOnError,
		MaxRequestsInFlight: scrapesAtOnce, Timeout: scrapeTimeout + time.Second, EnableOpenMetrics: true,
	})
}

// Names lists the metrics there are, as a query spells them: of a histogram
// its three series.
func (r *Registry) Names() (map[string]bool, error) {
	families, err := r.reg.Gather()
	names := map[string]bool{}
	for _, f := range families {
		names[f.GetName()] = true
		for _, m := range f.GetMetric() {
			if m.GetHistogram() != nil {
				for _, end := range []string{"_bucket", "_sum", "_count"} {
					names[f.GetName()+end] = true
				}
			}
		}
	}
	return names, err
}

// Series counts the series there are now.
func (r *Registry) Series() (n int, err error) {
	families, err := r.reg.Gather()
	for _, f := range families {
		n += len(f.GetMetric())
	}
	return n, err
}

// scrapeLog is what the handler has of a logger.
type scrapeLog struct{ log *slog.Logger }

func (l scrapeLog) Println(v ...any) {
	for i, x := range v {
		l.log.Warn("answer a scrape", "part", strconv.Itoa(i), "err", x)
	}
}
