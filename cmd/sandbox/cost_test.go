package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
)

func TestCost(t *testing.T) {
	w := newWorld(t)
	id := strings.TrimSpace(w.ok("create", "--name", "dev", "--project", "prj_a"))
	if out := w.ok("cost", "add", "dev", "--meter", "model.tokens", "--qty", "2000000", "--key", "k"); out != "0.3\n" {
		t.Errorf("cost add: %q", out)
	}
	w.ok("cost", "add", "dev", "--meter", "model.tokens", "--qty", "2000000", "--key", "k")
	w.ok("revenue", "add", "--project", "prj_a", "--amount", "0.75")
	if out := w.ok("cost", "ls"); !strings.Contains(out, "2000000 model.tokens") || strings.Count(out, "\n") != 3 || !strings.Contains(out, "project prj_a") {
		t.Errorf("cost ls: %s", out)
	}
	if out := w.ok("cost", "ls", "--kind", "revenue", "-n", "0"); strings.Contains(out, "tokens") {
		t.Errorf("cost ls --kind: %s", out)
	}
	if out := w.ok("cost", "report", "--by", "sandbox"); !strings.Contains(out, id) || !strings.Contains(out, "150.00%") {
		t.Errorf("cost report: %s", out)
	}
	if out := w.ok("cost", "report", "--by", "sandbox", "-o", "csv"); !strings.Contains(out, id+",0,EUR,0,0.3,0.3,0.75,0.45,15000,") || !strings.HasPrefix(out, "key,") {
		t.Errorf("as csv: %s", out)
	}
	if out := w.ok("cost", "report", "--chart"); !strings.Contains(out, "====") {
		t.Errorf("as bars: %s", out)
	}
	if out := w.ok("cost", "prices"); !strings.Contains(out, "0.15 EUR for each 1000000 token") {
		t.Errorf("prices: %s", out)
	}
	file := filepath.Join(t.TempDir(), "r.html")
	w.ok("cost", "report", "--by", "sandbox", "--html", file, "--from", "48h")
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if s := string(page); !strings.Contains(s, id) || strings.Count(s, "<svg") != 5 || !strings.Contains(s, "<rect") || strings.Contains(s, "http") || strings.Contains(s, "src=") || strings.Contains(s, "<script") {
		t.Errorf("page: %s", s)
	}
	for name, args := range map[string][]string{
		"(usage)": {"ls", "-o", "csv"}, "(invalid_scope)": {"cost", "add", "--amount", "1"}, "(invalid_amount)": {"cost", "add", "dev", "--amount", "1e3"},
		"(invalid_quantity)": {"cost", "add", "dev", "--meter", "x", "--qty", "-1"}, "(invalid_entry)": {"revenue", "add", "dev"},
		"(invalid_project)": {"create", "--project", "shop"},
	} {
		if code, _, errs := w.run("", args...); code != 125 || !strings.Contains(errs, name) {
			t.Errorf("%v: exit %d, %s; want %s", args, code, errs, name)
		}
	}
}

func TestStepsOf(t *testing.T) {
	to := time.Date(2026, 5, 1, 12, 30, 0, 0, time.UTC)
	for _, span := range []time.Duration{time.Minute, time.Hour, 25 * time.Hour, 9 * 24 * time.Hour, 100 * 24 * time.Hour, 3000 * 24 * time.Hour, 200 * 365 * 24 * time.Hour} {
		from := to.Add(-span)
		steps := stepsOf(from, to)
		if n := len(steps); n < 2 || n > maxSteps || !steps[0].Equal(from) || !steps[n-1].Equal(to) {
			t.Errorf("%s: %d steps", span, n)
		}
		for i := range steps[1:] {
			if !steps[i].Before(steps[i+1]) {
				t.Fatalf("%s: %s, %s", span, steps[i], steps[i+1])
			}
		}
	}
}

// TestPlotOf: what is below nothing hangs below the line, all stays inside, and
// nothing overflows.
func TestPlotOf(t *testing.T) {
	var over []cost.Statement
	for _, n := range []cost.Nano{0, 1, cost.MaxNano, cost.MinNano + 1, -1} {
		over = append(over, cost.Statement{Total: cost.StatementLine{Cost: cost.SumOf(n)}})
	}
	p := plotOf("x", over, func(l cost.StatementLine) (int64, string) { return int64(drawn(l.Cost)), l.Cost.String() })
	for i, b := range p.Bars {
		if b.Y < 0 || b.Y+b.Height > plotHeight+2 || (b.Height == 0) != (i == 0) || i > 2 && b.Y != p.Zero {
			t.Errorf("bar %d: %+v, nothing is at %d", i, b, p.Zero)
		}
	}
	for _, c := range []struct {
		values      []cost.Nano
		least, most string
	}{{[]cost.Nano{3, 5, 4}, "0.000000003", "0.000000005"}, {[]cost.Nano{-3, -5}, "-0.000000005", "-0.000000003"}, {[]cost.Nano{7}, "0.000000007", "0.000000007"}, {[]cost.Nano{0, 0}, "0", "0"}, {nil, "", ""}} {
		over = nil
		for _, n := range c.values {
			over = append(over, cost.Statement{From: time.Unix(0, 0), To: time.Unix(3600, 0), Total: cost.StatementLine{Cost: cost.SumOf(n)}})
		}
		p := plotOf("x", over, func(l cost.StatementLine) (int64, string) { return int64(drawn(l.Cost)), l.Cost.String() })
		if p.Least != c.least || p.Most != c.most || len(p.Bars) != len(c.values) || (p.To == "1970-01-01 01:00") != (len(over) > 0) {
			t.Errorf("%v: %+v", c.values, p)
		}
	}
	if share(1, cost.MaxNano) != 1 || share(cost.MaxNano, cost.MaxNano) != 40 || share(-1, 5) != 0 || share(0, 0) != 0 {
		t.Error("bars of a chart have the wrong length")
	}
	bp := int64(-5)
	if got := percent(&bp); got != "-0.05%" {
		t.Errorf("%q", got)
	}
	if cell("=1+1") != "'=1+1" || cell("prj_a") != "prj_a" {
		t.Error("cells")
	}
}
