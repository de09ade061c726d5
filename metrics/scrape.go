package metrics

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Reading is what there is at a scrape, and sums since the daemon began.
type Reading struct {
	Worlds      []World
	Disks       []Disk
	Connections int64 // of the API

	Webhooks, WebhookWaiting               int
	WebhookDelivered, WebhookFailed        int64
	WebhookGivenUp, WebhookDeadLettersKept int64
}

// World is what there is of one of the daemon's worlds.
type World struct {
	Name      string // lab or production
	Living    map[sandbox.Status]int
	Ended     map[sandbox.Reason]int64 // sum
	Pool      sandbox.PoolStats
	Used      sandbox.Meters        // sum
	ByBudget  map[cost.Action]int64 // sum
	Spent     int                   // budgets
	Database  int64                 // bytes of its files
	Records   int64                 // of sandboxes that ended
	Images    int64
	Snapshots int64
	Volumes   int64
	Events    map[string]int64 // by type, since the reading before
}

// Disk is one file system the daemon keeps things on.
type Disk struct {
	Name             string // state or volume
	Total, Free      uint64 // bytes
	Inodes, FreeInos uint64
}

// kinds are the types of events, before the first dot.
var kinds = []string{
	"agent", "budget", "experiment", "image", "lab", "net", "port", "process", "project", "sandbox", "schedule", "secret", "snapshot",
	"volume", "webhook",
}

// events sums the events of all readings.
type events struct {
	mu  sync.Mutex
	sum map[[2]string]float64 // by world and kind; guarded by mu
}

func (e *events) add(worlds []World) map[[2]string]float64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sum == nil {
		e.sum = map[[2]string]float64{}
	}
	out := map[[2]string]float64{}
	for _, w := range worlds {
		for kind, n := range w.Events {
			kind, _, _ = strings.Cut(kind, ".")
			if !slices.Contains(kinds, kind) {
				kind = other
			}
			e.sum[[2]string{w.Name, kind}] += float64(n)
		}
	}
	for _, w := range worlds {
		for _, kind := range append([]string{other}, kinds...) {
			k := [2]string{w.Name, kind}
			out[k] = e.sum[k]
		}
	}
	return out
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("sandboxd_"+name, help, labels, nil)
}

var (
	sandboxesDesc = desc("sandboxes", "Sandboxes that live, by status.", "world", "status")
	endedDesc     = desc("sandboxes_ended_total", "Sandboxes that ended, by reason.", "world", "reason")
	recordsDesc   = desc("sandbox_records", "Records kept of sandboxes that ended.", "world")

	poolSizeDesc   = desc("pool_size", "Shells kept ready in quiet times.", "world")
	poolTargetDesc = desc("pool_target", "Shells wanted now: misses raise it, calm lowers it.", "world")
	poolReadyDesc  = desc("pool_ready", "Shells ready now.", "world")
	poolClaimsDesc = desc("pool_claims_total", "Sandboxes that found a ready shell (hit), or had one built (miss).", "world", "result")
	poolBuiltDesc  = desc("pool_built_total", "Shells built for the pool.", "world")
	poolSecsDesc   = desc("pool_build_seconds_total", "Time spent building them.", "world")
	poolGoneDesc   = desc("pool_gone_total", "Shells that came to nothing: failed to be built, lost their PID 1, or shed for memory.", "world", "why")

	cpuDesc     = desc("used_cpu_seconds_total", "Processor time sandboxes used.", "world")
	networkDesc = desc("used_network_bytes_total", "Bytes sandboxes received (rx) and sent (tx).", "world", "direction")
	ioDesc      = desc("used_io_bytes_total", "Bytes sandboxes read from disks and wrote to them.", "world", "direction")

	budgetActsDesc  = desc("budget_acts_total", "Sandboxes that budgets paused, stopped and resumed.", "world", "act")
	budgetSpentDesc = desc("budgets_spent", "Budgets that are spent and refuse what is new.", "world")

	imagesDesc    = desc("images", "Images kept.", "world")
	snapshotsDesc = desc("snapshots", "Snapshots kept.", "world")
	volumesDesc   = desc("volumes", "Volumes kept.", "world")
	databaseDesc  = desc("database_bytes", "Size of the database's files.", "world")
	eventsDesc    = desc("events_total", "Events written, by the first word of their type.", "world", "kind")

	diskDesc   = desc("disk_bytes", "Bytes used and free on what the daemon keeps its state on.", "disk", "state")
	inodesDesc = desc("disk_inodes", "Inodes used and free there.", "disk", "state")

	webhooksDesc    = desc("webhooks", "Webhooks there are.")
	backlogDesc     = desc("webhook_backlog", "Events known to be due at webhooks and not delivered, at most a few hundred for each.")
	attemptsDesc    = desc("webhook_attempts_total", "Events that webhooks took (delivered), attempts that failed, and events given up.", "result")
	deadLettersDesc = desc("webhook_dead_letters", "Events given up and kept.")

	connectionsDesc = desc("api_connections", "Connections to the API that are open.")
	scrapeDesc      = desc("scrape_ok", "1 where this scrape found out everything; else the daemon's log says what not.")
)

// scraper asks for what there is when it is collected.
type scraper struct{ r *Registry }

// Describe sends none: which series there are depends on the worlds.
func (s *scraper) Describe(chan<- *prometheus.Desc) {}

// Collect reads, and sends what it read.
func (s *scraper) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	reading, err := s.r.read(ctx)
	e := sender{to}
	if err != nil {
		s.r.log.Warn("read what there is, for a scrape", "err", err)
		e.gauge(scrapeDesc, 0)
	} else {
		e.gauge(scrapeDesc, 1)
	}
	for _, w := range reading.Worlds {
		e.world(w)
	}
	for k, n := range s.r.events.add(reading.Worlds) {
		e.counter(eventsDesc, n, k[0], k[1])
	}
	for _, d := range reading.Disks {
		e.gauge(diskDesc, float64(d.Total-min(d.Free, d.Total)), d.Name, "used")
		e.gauge(diskDesc, float64(d.Free), d.Name, "free")
		e.gauge(inodesDesc, float64(d.Inodes-min(d.FreeInos, d.Inodes)), d.Name, "used")
		e.gauge(inodesDesc, float64(d.FreeInos), d.Name, "free")
	}
	e.gauge(webhooksDesc, float64(reading.Webhooks))
	e.gauge(backlogDesc, float64(reading.WebhookWaiting))
	e.gauge(deadLettersDesc, float64(reading.WebhookDeadLettersKept))
	e.counter(attemptsDesc, float64(reading.WebhookDelivered), "delivered")
	e.counter(attemptsDesc, float64(reading.WebhookFailed), "failed")
	e.counter(attemptsDesc, float64(reading.WebhookGivenUp), "given_up")
	e.gauge(connectionsDesc, float64(reading.Connections))
}

type sender struct{ to chan<- prometheus.Metric }

func (e sender) gauge(d *prometheus.Desc, v float64, labels ...string) {
	e.to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (e sender) counter(d *prometheus.Desc, v float64, labels ...string) {
	e.to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
}

func (e sender) world(w World) {
	for _, s := range sandbox.Statuses() {
		if !s.Terminal() {
			e.gauge(sandboxesDesc, float64(w.Living[s]), w.Name, string(s))
		}
	}
	for _, r := range sandbox.Reasons() {
		e.counter(endedDesc, float64(w.Ended[r]), w.Name, string(r))
	}
	e.gauge(recordsDesc, float64(w.Records), w.Name)

	e.gauge(poolSizeDesc, float64(w.Pool.Size), w.Name)
	e.gauge(poolTargetDesc, float64(w.Pool.Target), w.Name)
	e.gauge(poolReadyDesc, float64(w.Pool.Ready), w.Name)
	e.counter(poolClaimsDesc, float64(w.Pool.Hits), w.Name, "hit")
	e.counter(poolClaimsDesc, float64(w.Pool.Misses), w.Name, "miss")
	e.counter(poolBuiltDesc, float64(w.Pool.Built), w.Name)
	e.counter(poolSecsDesc, w.Pool.BuildSeconds, w.Name)
	e.counter(poolGoneDesc, float64(w.Pool.Failed), w.Name, "failed")
	e.counter(poolGoneDesc, float64(w.Pool.Lost), w.Name, "lost")
	e.counter(poolGoneDesc, float64(w.Pool.Shed), w.Name, "shed")

	e.counter(cpuDesc, float64(w.Used.CPU)/1e6, w.Name)
	e.counter(networkDesc, float64(w.Used.NetRx), w.Name, "rx")
	e.counter(networkDesc, float64(w.Used.NetTx), w.Name, "tx")
	e.counter(ioDesc, float64(w.Used.IORead), w.Name, "read")
	e.counter(ioDesc, float64(w.Used.IOWrite), w.Name, "write")

	for _, a := range []cost.Action{cost.ActionPause, cost.ActionStop, cost.ActionResume} {
		e.counter(budgetActsDesc, float64(w.ByBudget[a]), w.Name, string(a))
	}
	e.gauge(budgetSpentDesc, float64(w.Spent), w.Name)

	e.gauge(imagesDesc, float64(w.Images), w.Name)
	e.gauge(snapshotsDesc, float64(w.Snapshots), w.Name)
	e.gauge(volumesDesc, float64(w.Volumes), w.Name)
	e.gauge(databaseDesc, float64(w.Database), w.Name)
}
