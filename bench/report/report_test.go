package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
)

func TestStats(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i) // not sorted
	}
	for _, c := range []struct {
		name    string
		samples []float64
		want    Stats
	}{
		{"none", nil, Stats{}},
		{"one", []float64{7}, Stats{1, 7, 7, 7, 7, 7}},
		{"even", []float64{4, 1, 2, 3}, Stats{4, 1, 2.5, 4, 4, 4}},
		{"hundred", hundred, Stats{100, 1, 50.5, 95, 99, 100}},
	} {
		if got := (Series{Samples: c.samples}).Stats(); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
	if hundred[0] != 100 {
		t.Error("Stats sorted the samples, which rounds are paired by")
	}
}

func example() *Report {
	r := &Report{Mode: "quick", Host: Host{CPU: "A & B <cpu>", CPUs: 2, Kernel: "6.1"}}
	r.Scene("create", "create → first byte", "")
	r.Scene("create", "again", "")
	r.Scene("churn", "lives a second", "")
	r.Scene("empty", "never measured", "")
	for i, ours := range []float64{2, 4, 3} {
		r.Add("create", Floor, "ms", false, 1)
		r.Add("create", Us, "ms", false, ours)
		r.Add("create", "runc", "ms", false, ours*float64(8+i)) // 8, 9, 10 times
		r.Add("create", Us+" at 250", "ms", false, 6)
	}
	r.Add("churn", Us, "/s", true, 100)
	r.Add("churn", "runc", "/s", true, 20)
	r.Goals = []Verdict{{Goal: "at most 5 ms", Value: 3, Unit: "ms", Outcome: Met}, {Goal: "reset", Outcome: NotJudged, Why: "not available yet"}}
	r.Compare()
	return r
}

func TestTimesIsPairwise(t *testing.T) {
	r := example()
	for _, c := range []struct {
		scenario, a, b string
		want           float64
		ok             bool
	}{
		{"create", Us, "runc", 9, true},
		{"create", Us, Floor, 1. / 3, true},
		{"create", Floor, Us, 3, true},
		{"churn", Us, "runc", 5, true}, // more is better: we are ahead here too
		{"churn", Us, "bwrap", 0, false},
		{"nothing", Us, "runc", 0, false},
	} {
		got, ok := r.Times(c.scenario, c.a, c.b)
		if math.Abs(got-c.want) > 1e-9 || ok != c.ok {
			t.Errorf("%s: %s against %s: %v, %v; want %v, %v", c.scenario, c.a, c.b, got, ok, c.want, c.ok)
		}
	}
	if len(r.Scenarios) != 3 || r.Scenarios[0].Title != "create → first byte" {
		t.Errorf("scenarios: %+v", r.Scenarios)
	}
}

func TestJSONIsReadBack(t *testing.T) {
	var b bytes.Buffer
	if err := example().JSON(&b); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Series []struct {
			Scenario, Contestant string
			Median               float64
			Samples              []float64
		}
		Ratios []Ratio
	}
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if s := got.Series[1]; s.Contestant != Us || s.Median != 3 || len(s.Samples) != 3 {
		t.Errorf("our series: %+v", s)
	}
	if len(got.Ratios) != 4 {
		t.Errorf("ratios: %+v", got.Ratios)
	}
}

func TestTables(t *testing.T) {
	var text, markdown bytes.Buffer
	if err := errors.Join(example().Text(&text), example().Markdown(&markdown)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"create → first byte", "9.00x", "met", "not judged: not available yet"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, text.String())
		}
	}
	for _, want := range []string{"| create → first byte, ms | 3.00 | 30.0 (9.00×) |", "| reset | not available yet | not judged |", "- create → first byte: sandboxd at 250 6.00 ms"} {
		if !strings.Contains(markdown.String(), want) {
			t.Errorf("the Markdown lacks %q:\n%s", want, markdown.String())
		}
	}
	if strings.Contains(text.String()+markdown.String(), "never measured") {
		t.Error("a scenario without a sample is shown")
	}
}

func TestChartIsXML(t *testing.T) {
	var b bytes.Buffer
	if err := example().Chart(&b, "create", "churn", "empty"); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "A &amp; B &lt;cpu&gt;") {
		t.Error("text is not escaped")
	}
	if n := strings.Count(b.String(), "<rect"); n != 1+4+2 {
		t.Errorf("%d rectangles, want the ground and six bars", n)
	}
	for d := xml.NewDecoder(&b); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}
