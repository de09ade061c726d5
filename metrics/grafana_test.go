package metrics

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"
)

// dashboard is what the test reads of one.
type dashboard struct {
	Panels []struct {
		ID      int
		Type    string
		Title   string
		Targets []struct{ Expr string }
	}
	Templating struct {
		List []struct{ Name, Query string }
	}
}

// strangers returns the metrics of a query that are not among names, and how
// many it names.
func strangers(query string, names map[string]bool) (bad []string, n int) {
	for _, name := range regexp.MustCompile(`\b(?:sandboxd|go|process)_[a-z0-9_]+`).FindAllString(query, -1) {
		n++
		if !names[name] {
			bad = append(bad, name)
		}
	}
	return bad, n
}

// TestDashboard: every metric the packaged dashboard asks for exists, with the
// labels and the values it asks by; and each of ours is on it.
func TestDashboard(t *testing.T) {
	b, err := os.ReadFile("../packaging/grafana/sandboxd.json")
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	r := stocked(nil)
	names, err := r.Names()
	if err != nil {
		t.Fatal(err)
	}
	series := scrape(t, r)
	shown := map[string]bool{}
	ids := map[int]bool{}
	label := regexp.MustCompile(`([a-z]+)(=~?|!=)"([^"$]+)"`)
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have id %d", p.ID)
		}
		ids[p.ID] = true
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q asks for nothing", p.Title)
		}
		for _, q := range p.Targets {
			bad, n := strangers(q.Expr, names)
			if len(bad) > 0 || n == 0 {
				t.Errorf("panel %q asks for %v, which are not there, by %s", p.Title, bad, q.Expr)
			}
			for name := range names {
				shown[name] = shown[name] || strings.Contains(q.Expr, name+"{")
			}
			for _, m := range label.FindAllStringSubmatch(q.Expr, -1) {
				for value := range strings.SplitSeq(m[3], "|") {
					if !strings.Contains(series, m[1]+`="`+value+`"`) {
						t.Errorf("panel %q: no series has %s=%q", p.Title, m[1], value)
					}
				}
			}
		}
	}
	for _, v := range d.Templating.List {
		if bad, _ := strangers(v.Query, names); len(bad) > 0 {
			t.Errorf("variable %s asks for %v", v.Name, bad)
		}
	}
	for name := range names {
		base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(name, "")
		if strings.HasPrefix(name, "sandboxd_") && !shown[name] && !shown[base] && !shown[base+"_bucket"] {
			t.Errorf("%s is on no panel", name)
		}
	}
	if bad, _ := strangers(`rate(sandboxd_never_heard_of_total[5m])`, names); len(bad) != 1 { // the control
		t.Errorf("a metric that does not exist was not found out: %v", bad)
	}
}
