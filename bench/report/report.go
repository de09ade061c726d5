package report

import (
	"encoding/json"
	"io"
	"slices"
	"strings"
	"time"
)

// The contestants that tables and ratios know by name.
const (
	Us    = "sandboxd"
	Floor = "host"
)

// Report is one run.
type Report struct {
	Schema    int        `json:"schema"`
	Mode      string     `json:"mode"` // full, quick or vm
	Started   time.Time  `json:"started"`
	Seconds   float64    `json:"seconds"`
	Host      Host       `json:"host"`
	Scenarios []Scenario `json:"scenarios"`
	Series    []*Series  `json:"series"`
	Ratios    []Ratio    `json:"ratios"`
	Goals     []Verdict  `json:"goals"`
	Skipped   []Skip     `json:"skipped,omitempty"`
}

// Host tells where the run took place.
type Host struct {
	Kernel      string            `json:"kernel"`
	System      string            `json:"system"`
	CPU         string            `json:"cpu"`
	CPUs        int               `json:"cpus"`
	MemoryMiB   int64             `json:"memory_mib"`
	Cgroup      string            `json:"cgroup"`
	LoadBefore  string            `json:"load_before"`
	LoadAfter   string            `json:"load_after"`
	OthersShare float64           `json:"others_cpu_share"` // of all cpu time, used by processes that are not the run's
	Versions    map[string]string `json:"versions"`
	Notes       []string          `json:"notes,omitempty"` // what the reader of the figures must know
}

// Scenario is one thing that was measured, for several contestants.
type Scenario struct {
	Name  string `json:"name"`
	Title string `json:"title"`
	Note  string `json:"note,omitempty"`
}

// Ratio compares a contestant with us: how many times as long it takes, or
// how many times as much we achieve; above 1 we are ahead. It is the median
// of the ratios of each round.
type Ratio struct {
	Scenario   string  `json:"scenario"`
	Contestant string  `json:"contestant"`
	Times      float64 `json:"times"`
}

// Verdict is one goal and how it was met.
type Verdict struct {
	Goal    string  `json:"goal"`
	Value   float64 `json:"value"`
	Unit    string  `json:"unit"`
	Outcome Outcome `json:"outcome"`
	Why     string  `json:"why,omitempty"`
}

// Outcome is how a goal came out.
type Outcome string

// The outcomes.
const (
	Met       Outcome = "met"
	Missed    Outcome = "missed"
	NotJudged Outcome = "not judged"
)

// Skip is a scenario that did not take place.
type Skip struct {
	Scenario string `json:"scenario"`
	Why      string `json:"why"`
}

// Scene adds a scenario; adding it again changes nothing.
func (r *Report) Scene(name, title, note string) {
	if !slices.ContainsFunc(r.Scenarios, func(s Scenario) bool { return s.Name == name }) {
		r.Scenarios = append(r.Scenarios, Scenario{name, title, note})
	}
}

// Add adds a sample.
func (r *Report) Add(scenario, contestant, unit string, more bool, sample float64) {
	s := r.Find(scenario, contestant)
	if s == nil {
		s = &Series{Scenario: scenario, Contestant: contestant, Unit: unit, More: more}
		r.Series = append(r.Series, s)
	}
	s.Samples = append(s.Samples, sample)
}

// Find returns a series, or nil.
func (r *Report) Find(scenario, contestant string) *Series {
	for _, s := range r.Series {
		if s.Scenario == scenario && s.Contestant == contestant {
			return s
		}
	}
	return nil
}

// Of returns the series of one scenario in the order they were added, the
// floor and ours first.
func (r *Report) Of(scenario string) []*Series {
	var out []*Series
	for _, s := range r.Series {
		if s.Scenario == scenario {
			out = append(out, s)
		}
	}
	slices.SortStableFunc(out, func(a, b *Series) int { return rank(a) - rank(b) })
	return out
}

func rank(s *Series) int {
	switch {
	case s.Contestant == Floor:
		return 0
	case strings.HasPrefix(s.Contestant, Us):
		return 1
	}
	return 2
}

// Times returns how far contestant a is ahead of b; false when one of them
// was not measured.
func (r *Report) Times(scenario, a, b string) (float64, bool) {
	x, y := r.Find(scenario, a), r.Find(scenario, b)
	if x == nil || y == nil {
		return 0, false
	}
	if x.More {
		x, y = y, x
	}
	times := pairwise(*y, *x)
	return times, times > 0
}

// Compare fills in the ratios of everyone to us.
func (r *Report) Compare() {
	r.Ratios = nil
	for _, s := range r.Series {
		if times, ok := r.Times(s.Scenario, Us, s.Contestant); ok && s.Contestant != Us {
			r.Ratios = append(r.Ratios, Ratio{s.Scenario, s.Contestant, round(times)})
		}
	}
}

// JSON writes the whole report.
func (r *Report) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(r)
}
