package main

import (
	"github.com/sandboxd/sandboxd/bench/report"
)

// goal is one figure to be reached. docs/PERFORMANCE.md says where it comes
// from.
type goal struct {
	text  string
	unit  string
	value func(*report.Report) (float64, bool)
	least bool // at least the limit; otherwise at most
	limit float64
	// needs says why a report lacks the value.
	needs string
}

const (
	atMost  = false
	atLeast = true
)

// times compares medians of rounds: how far we are ahead of a contestant.
func times(scenario, contestant string) func(*report.Report) (float64, bool) {
	return func(r *report.Report) (float64, bool) { return r.Times(scenario, report.Us, contestant) }
}

// overFloor is how many times the host's own time we take.
func overFloor(scenario string) func(*report.Report) (float64, bool) {
	return func(r *report.Report) (float64, bool) { return r.Times(scenario, report.Floor, report.Us) }
}

// stat picks one figure of a series.
func stat(scenario, contestant string, pick func(report.Stats) float64) func(*report.Report) (float64, bool) {
	return func(r *report.Report) (float64, bool) {
		s := r.Find(scenario, contestant)
		if s == nil || len(s.Samples) == 0 {
			return 0, false
		}
		return pick(s.Stats()), true
	}
}

func med(s report.Stats) float64 { return s.Median }

func ours(scenario string) func(*report.Report) (float64, bool) {
	return stat(scenario, report.Us, med)
}

// crowded picks the figure at 1,000 idle sandboxes, of which only a full run
// has them.
func crowded(scenario string) func(*report.Report) (float64, bool) {
	return stat(scenario, at(1000), med)
}

// best is the most lives a second of one contestant, over the numbers of
// clients.
func best(r *report.Report, contestant string) (float64, bool) {
	most := 0.0
	for _, sc := range r.Scenarios {
		if s := r.Find(sc.Name, contestant); s != nil && len(sc.Name) > len("churn-") && sc.Name[:len("churn-")] == "churn-" {
			most = max(most, s.Stats().Median)
		}
	}
	return most, most > 0
}

const notRun = "the scenario was not run"

var goals = []goal{
	{"warm create → first byte: median at most 5 ms", "ms", ours("create-warm"), atMost, 5, notRun},
	{"warm create → first byte: 99th percentile at most 15 ms", "ms", stat("create-warm", report.Us, func(s report.Stats) float64 { return s.P99 }), atMost, 15, notRun},
	{"warm: at least 8 times faster than runc run", relative, times("create-warm", "runc"), atLeast, 8, notRun},
	{"warm: at least twice as fast as crun run", relative, times("create-warm", "crun"), atLeast, 2, notRun},
	{"warm: no slower than bwrap", relative, times("create-warm", "bwrap"), atLeast, 1, notRun},
	{"fresh image → first byte: median at most 5 ms", "ms", ours("create-fresh"), atMost, 5, notRun},
	{"fresh: at least 8 times faster than runc run", relative, times("create-fresh", "runc"), atLeast, 8, notRun},
	{"fresh: at least twice as fast as crun run", relative, times("create-fresh", "crun"), atLeast, 2, notRun},
	{"fresh: no slower than bwrap", relative, times("create-fresh", "bwrap"), atLeast, 1, notRun},
	{"fork of a snapshot → first byte: median at most 5 ms", "ms", ours("create-fork"), atMost, 5, notRun},
	{"fork of a snapshot: at least 8 times faster than runc run", relative, times("create-fork", "runc"), atLeast, 8, notRun},
	{"fork of a snapshot: at least twice as fast as crun run", relative, times("create-fork", "crun"), atLeast, 2, notRun},
	{"fork of a snapshot: no slower than bwrap", relative, times("create-fork", "bwrap"), atLeast, 1, notRun},
	{"fork, until it runs: at most 10 ms", "ms", ours("fork"), atMost, 10, notRun},
	{"100 forks of one snapshot, all running: at most 1 s", "s", ours("forks"), atMost, 1, notRun},
	{"rollback: at most 10 ms", "ms", ours("rollback"), atMost, 10, notRun},
	{"snapshot of an idle sandbox that wrote much: at most 3 times that of one that wrote nothing", relative, func(r *report.Report) (float64, bool) {
		return r.Times("snapshot", emptyUpper, fullUpper)
	}, atMost, 3, notRun},
	{"snapshot of a sandbox at work: at least 5 times faster than cp -a", relative, times("snapshot-live", cpReflink), atLeast, 5, notRun},
	{"snapshot of a sandbox at work, again, after 1 file in 100 changed: at least 5 times faster than cp -a", relative, times("snapshot-again", cpReflink), atLeast, 5, notRun},
	{"cold create → first byte: median at most 25 ms", "ms", ours("create-cold"), atMost, 25, notRun},
	{"cold: not slower than runc run", relative, times("create-cold", "runc"), atLeast, 1, notRun},
	{"exec of /bin/true: at most 2.5 times the host's fork, exec and wait", relative, overFloor("exec"), atMost, 2.5, notRun},
	{"exec: at least 10 times faster than runc exec", relative, times("exec", "runc"), atLeast, 10, notRun},
	{"exec: at least twice as fast as crun exec", relative, times("exec", "crun"), atLeast, 2, notRun},
	{"burst of 100: at most 0.6 s", "s", ours("burst"), atMost, 0.6, notRun},
	{"churn: at least 80 lives a second on 2 cores", "/s", func(r *report.Report) (float64, bool) { return best(r, report.Us) }, atLeast, 80, notRun},
	{"churn: at least twice runc's best", relative, func(r *report.Report) (float64, bool) {
		us, ok := best(r, report.Us)
		runc, has := best(r, "runc")
		return us / max(runc, 1e-9), ok && has
	}, atLeast, 2, notRun},
	{"reset: at most 5 ms", "ms", ours("reset"), atMost, 5, notRun},
	{"removal: the request at most 3 ms", "ms", ours("destroy"), atMost, 3, notRun},
	{"questions of 200 clients: at least 3,000 answers a second", "/s", ours("asks"), atLeast, 3000, notRun},
	{"questions at 3,000 a second: 99th percentile at most 25 ms", "ms", ours("asks-latency"), atMost, 25, notRun},
	{"1,000 idle: at most 1.6 MiB each, all told", "MiB", crowded("density-memory"), atMost, 1.6, onlyFull},
	{"1,000 idle: create at most 1.5 times as slow as beside none", relative, func(r *report.Report) (float64, bool) {
		then, ok := crowded("density-latency")(r)
		before, had := stat("density-latency", at(0), med)(r)
		return then / max(before, 1e-9), ok && had
	}, atMost, 1.5, onlyFull},
	{"1,000 idle: daemon at most 150 MiB resident", "MiB", crowded("density-rss"), atMost, 150, onlyFull},
	{"1,000 idle: at most 2 % of a core", "%", crowded("density-cpu"), atMost, 2, onlyFull},
	{"output through exec: at least 500 MB/s", "MB/s", ours("stream"), atLeast, 500, notRun},
	{"file of 1 GiB (quick run: 128 MiB) in: at least 300 MB/s", "MB/s", ours("file-up"), atLeast, 300, notRun},
	{"file of 1 GiB (quick run: 128 MiB) out: at least 300 MB/s", "MB/s", ours("file-down"), atLeast, 300, notRun},
	{"20 network rules, beside the largest crowd with as many: create at most 1.3 times that without rules", relative, ruledOver, atMost, 1.3, notRun},
	{"TCP out of a sandbox: at least 0.9 of a bare pair of links", relative, times("forward", veth), atLeast, 0.9, notRun},
	{"TCP out of a sandbox: at least 0.9 of a router without rules", relative, times("forward", router), atLeast, 0.9, notRun},
	{"TCP out of a sandbox: at least 0.9 of a router that masquerades and no more", relative, times("forward", masq), atLeast, 0.9, notRun},
	{"round trips beside one that floods at its limit: 99th percentile at most 3 times that at rest", relative, times("neighbour", besideBucket), atMost, 3, notRun},
	{"round trips beside one that floods without limit: at most 3 times", relative, times("neighbour", besideFlood), atMost, 3, notRun},
}

// relative is the unit of the goals that hold on any machine.
const relative = "×"

// emulated is why a run in a virtual machine says nothing about the others.
const emulated = "emulated machine"

const onlyFull = "1,000 idle sandboxes are part of a full run only"

// judge holds a report against the goals.
func judge(r *report.Report) []report.Verdict {
	var out []report.Verdict
	for _, g := range goals {
		v := report.Verdict{Goal: g.text, Unit: g.unit, Outcome: report.NotJudged, Why: g.needs}
		if value, ok := g.value(r); ok {
			v.Value, v.Why, v.Outcome = value, "", report.Missed
			if r.Mode == modeVM && g.unit != relative {
				v.Outcome, v.Why = report.NotJudged, emulated
			} else if g.least && value >= g.limit || !g.least && value <= g.limit {
				v.Outcome = report.Met
			}
		}
		out = append(out, v)
	}
	return out
}
