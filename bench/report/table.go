package report

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Text writes every scenario with min, median, p95 and the ratio to us, then
// the goals.
func (r *Report) Text(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, sc := range r.Scenarios {
		series := r.Of(sc.Name)
		if len(series) == 0 {
			continue
		}
		fmt.Fprintf(tw, "\n%s (%s)\n", sc.Title, sc.Name)
		if sc.Note != "" {
			fmt.Fprintf(tw, "  %s\n", sc.Note)
		}
		fmt.Fprintln(tw, "\tn\tmin\tmedian\tp95\tp99\t\tus\t")
		for _, s := range series {
			st, ratio := s.Stats(), ""
			if times, ok := r.Times(sc.Name, Us, s.Contestant); ok && s.Contestant != Us {
				ratio = number(times) + "x"
			}
			fmt.Fprintf(tw, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t\n", s.Contestant, st.N,
				number(st.Min), number(st.Median), number(st.P95), number(st.P99), s.Unit, ratio)
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	fmt.Fprintln(w, "\nThe column 'us': how many times as long as sandboxd, or how many times less; above 1 we are ahead (median of the rounds' ratios).")
	fmt.Fprintln(w, r.company())
	for _, n := range r.Host.Notes {
		fmt.Fprintf(w, "%s\n", n)
	}
	for _, s := range r.Skipped {
		fmt.Fprintf(w, "\nnot measured: %s: %s\n", s.Scenario, s.Why)
	}
	return r.goals(w)
}

// company says how much of the machine others had meanwhile.
func (r *Report) company() string {
	s := fmt.Sprintf("%.0f %% of the processors' time went to programs that are not part of the run, and to the kernel's own threads.", 100*r.Host.OthersShare)
	if r.Host.OthersShare > 0.1 {
		s += " That is much: only the ratios tell something, and they roughly."
	}
	return s
}

// mark begins the line of a goal.
var mark = map[Outcome]string{Met: "met    ", Missed: "MISSED ", NotJudged: "-      "}

func (r *Report) goals(w io.Writer) error {
	if len(r.Goals) == 0 {
		return nil
	}
	fmt.Fprintln(w, "\nGoals")
	for _, g := range r.Goals {
		found := number(g.Value) + " " + g.Unit
		if g.Outcome == NotJudged {
			found = "not judged: " + g.Why
		}
		if _, err := fmt.Fprintf(w, "  %s %s: %s\n", mark[g.Outcome], g.Goal, found); err != nil {
			return err
		}
	}
	return nil
}

// columns are the contestants of the Markdown table.
var columns = []string{Us, "runc", "crun", "bwrap", Floor}

// Markdown writes the medians as one table, with the ratio to us in brackets,
// and the goals as another.
func (r *Report) Markdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, Linux %s, %d × %s; %s run of %s.\n", r.Host.System, r.Host.Kernel, r.Host.CPUs, r.Host.CPU,
		r.Mode, r.Started.UTC().Format("2006-01-02 15:04 UTC"))
	fmt.Fprint(&b, "Medians; in brackets how many times as long as sandboxd (or how many times less).\n")
	fmt.Fprintln(&b, r.company())
	for _, n := range r.Host.Notes {
		fmt.Fprintf(&b, "%s\n", n)
	}
	fmt.Fprintln(&b)
	fmt.Fprintf(&b, "| | %s |\n|---|%s\n", strings.Join(columns, " | "), strings.Repeat("---:|", len(columns)))
	for _, sc := range r.Scenarios {
		cells := make([]string, len(columns))
		unit := ""
		for i, c := range columns {
			s := r.Find(sc.Name, c)
			if s == nil {
				cells[i] = "–"
				continue
			}
			unit = s.Unit
			cells[i] = number(s.Stats().Median)
			if times, ok := r.Times(sc.Name, Us, c); ok && c != Us {
				cells[i] += " (" + number(times) + "×)"
			}
		}
		if unit != "" {
			fmt.Fprintf(&b, "| %s, %s | %s |\n", sc.Title, unit, strings.Join(cells, " | "))
		}
	}
	r.others(&b)
	if len(r.Goals) > 0 {
		fmt.Fprint(&b, "\n| goal | found | |\n|---|---:|---|\n")
	}
	for _, g := range r.Goals {
		found := number(g.Value) + " " + g.Unit
		if g.Outcome == NotJudged {
			found = g.Why
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", g.Goal, found, g.Outcome)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// others lists the medians of those who have no column.
func (r *Report) others(b *strings.Builder) {
	fmt.Fprintln(b)
	for _, sc := range r.Scenarios {
		var found []string
		for _, s := range r.Of(sc.Name) {
			if !slices.Contains(columns, s.Contestant) {
				found = append(found, fmt.Sprintf("%s %s %s", s.Contestant, number(s.Stats().Median), s.Unit))
			}
		}
		if len(found) > 0 {
			fmt.Fprintf(b, "- %s: %s\n", sc.Title, strings.Join(found, "; "))
		}
	}
}

// number writes three significant digits, and all of a large number.
func number(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v >= 100 || v <= -100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10 || v <= -10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case v >= 1 || v <= -1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}
