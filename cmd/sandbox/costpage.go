package main

import (
	"bufio"
	"context"
	"fmt"
	"html/template"
	"os"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/cost"
)

// The page has everything in itself: no script, no font, no address.

const (
	maxSteps   = 100 // of a plot
	plotWidth  = 1000
	plotHeight = 200
	plotTime   = "2006-01-02 15:04"
	monthSpan  = 30 * 24 * time.Hour // of a page without a beginning
)

// writePage writes a report with plots over time to a file.
func (c *cli) writePage(ctx context.Context, cl *client.Client, q cost.StatementQuery, name string) error {
	if q.To.IsZero() {
		q.To = time.Now()
	}
	if q.From.IsZero() {
		q.From = q.To.Add(-monthSpan)
	}
	if !q.From.Before(q.To) {
		return usage("--from %s is not before --to %s", q.From.Format(time.RFC3339), q.To.Format(time.RFC3339))
	}
	whole, err := cl.Statement(ctx, q)
	if err != nil {
		return err
	}
	steps := stepsOf(q.From, q.To)
	each := q
	each.By = ""
	var over []cost.Statement
	for i := range steps[1:] {
		each.From, each.To = steps[i], steps[i+1]
		s, err := cl.Statement(ctx, each)
		if err != nil {
			return err
		}
		over = append(over, s)
	}
	f, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	w := bufio.NewWriter(f)
	err = page.Execute(w, pageOf(whole, over))
	if err == nil {
		err = w.Flush()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	c.warn("wrote %s", name)
	return nil
}

// stepsOf cuts a span of time into hours, days or more of them, at most
// maxSteps, that begin where such do in UTC.
func stepsOf(from, to time.Time) []time.Time {
	from, to = from.UTC(), to.UTC()
	width := time.Hour
	for _, w := range []time.Duration{time.Hour, 6 * time.Hour, 24 * time.Hour, 7 * 24 * time.Hour, monthSpan, 365 * 24 * time.Hour} {
		if width = w; to.Sub(from) <= maxSteps/2*w {
			break
		}
	}
	for to.Sub(from) > maxSteps/2*width {
		width *= 2
	}
	out := []time.Time{from}
	for t := from.Truncate(width).Add(width); t.Before(to); t = t.Add(width) {
		out = append(out, t)
	}
	return append(out, to)
}

// plot is one drawing of values over time.
type plot struct {
	Title, Least, Most string
	From, To           string
	Zero               int // where nothing is
	Bars               []column
}

type column struct {
	X, Y, Width, Height int
	Tip                 string
}

// plotOf draws values as bars from the line of nothing up or down. Whole
// numbers are enough for a drawing, and cannot lie about the sign of one.
func plotOf(title string, over []cost.Statement, value func(cost.StatementLine) (n int64, text string)) plot {
	p := plot{Title: title}
	var least, most, low, high int64 // low and high are those of the values, the others have 0 among them
	for i, s := range over {
		n, text := value(s.Total)
		least, most = min(least, n), max(most, n)
		if i == 0 || n < low {
			low, p.Least = n, text
		}
		if i == 0 || n > high {
			high, p.Most = n, text
		}
	}
	if len(over) > 0 {
		p.From, p.To = over[0].From.UTC().Format(plotTime), over[len(over)-1].To.UTC().Format(plotTime)
	}
	step := most/plotHeight - least/plotHeight + 1 // of one pixel
	p.Zero = int(most / step)
	width := plotWidth / max(1, len(over))
	for i, s := range over {
		n, text := value(s.Total)
		b := column{X: i * width, Width: max(1, width-1), Tip: s.From.UTC().Format(plotTime) + ": " + text}
		switch high := int(n / step); {
		case n > 0:
			b.Height = max(1, high)
			b.Y = p.Zero - b.Height
		case n < 0:
			b.Y, b.Height = p.Zero, max(1, -high)
		}
		p.Bars = append(p.Bars, b)
	}
	return p
}

// pageData is what the page shows.
type pageData struct {
	Title, From, To, Book, By string
	Currency                  string
	Plots                     []plot
	Lines                     []pageLine
	Total                     pageLine
}

type pageLine struct {
	cost.StatementLine
	CPU, Memory, Percent string
}

func pageOf(whole cost.Statement, over []cost.Statement) pageData {
	const day = "2006-01-02 15:04 MST"
	money := func(pick func(cost.StatementLine) cost.Sum) func(cost.StatementLine) (int64, string) {
		return func(l cost.StatementLine) (int64, string) {
			n := pick(l)
			return int64(drawn(n)), n.String() + " " + whole.Currency
		}
	}
	d := pageData{
		Title: "Costs", From: whole.From.UTC().Format(day), To: whole.To.UTC().Format(day), Book: whole.Book, By: whole.By, Currency: whole.Currency,
		Plots: []plot{
			plotOf("Cost", over, money(func(l cost.StatementLine) cost.Sum { return l.Cost })),
			plotOf("Revenue", over, money(func(l cost.StatementLine) cost.Sum { return l.Revenue })),
			plotOf("ROI", over, func(l cost.StatementLine) (int64, string) {
				if l.ROI == nil {
					return 0, "no cost"
				}
				return *l.ROI, percent(l.ROI)
			}),
			plotOf("Processor time", over, func(l cost.StatementLine) (int64, string) { return l.Meters.CPU, inTime(l.Meters.CPU / 1000) }),
			plotOf("Memory over time", over, func(l cost.StatementLine) (int64, string) {
				return l.Meters.Memory, hours(l.Meters.Memory) + " for an hour"
			}),
		},
		Total: pageLineOf("total", whole.Total),
	}
	lines := slices.Clone(whole.Lines)
	slices.SortStableFunc(lines, func(a, b cost.StatementLine) int { return b.Cost.Cmp(a.Cost) })
	for _, l := range lines {
		if whole.By != "" {
			d.Lines = append(d.Lines, pageLineOf(dash(l.Key), l))
		}
	}
	return d
}

func pageLineOf(key string, l cost.StatementLine) pageLine {
	l.Key = key
	return pageLine{StatementLine: l, Percent: percent(l.ROI), CPU: inTime(l.Meters.CPU / 1000), Memory: hours(l.Meters.Memory)}
}

var page = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{.Title}} {{.From}}</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:1040px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;width:100%}td,th{padding:.25em .6em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}
figure{margin:1.5em 0}figcaption{font-weight:600}svg{width:100%;height:auto;background:#f6f6f6}rect{fill:#3b6ea5}rect:hover{fill:#d2691e}line{stroke:#888}
small{color:#666;display:flex;justify-content:space-between}td:first-child{overflow-wrap:anywhere}tfoot td{font-weight:600}
</style></head><body>
<h1>{{.Title}}</h1>
<p>{{.From}} to {{.To}}{{if .Currency}}, in {{.Currency}}{{end}}{{if .Book}}, rated anew with {{.Book}}{{end}}</p>
{{range .Plots}}<figure><figcaption>{{.Title}}</figcaption>
<svg viewBox="0 0 1000 206" role="img" aria-label="{{.Title}}">{{range .Bars}}{{if .Height}}<rect x="{{.X}}" y="{{.Y}}" width="{{.Width}}" height="{{.Height}}"><title>{{.Tip}}</title></rect>{{end}}{{end}}<line x1="0" x2="1000" y1="{{.Zero}}" y2="{{.Zero}}"/></svg>
<small><span>{{.From}}</span><span>least {{.Least}}, most {{.Most}}</span><span>{{.To}}</span></small></figure>
{{end}}<table><thead><tr><th>{{if .By}}{{.By}}{{end}}</th><th>Sandboxes</th><th>CPU</th><th>Memory for an hour</th><th>Usage</th><th>Outside</th><th>Cost</th><th>Revenue</th><th>Profit</th><th>ROI</th></tr></thead>
<tbody>{{range .Lines}}{{template "line" .}}{{end}}</tbody><tfoot>{{template "line" .Total}}</tfoot></table>
</body></html>
{{define "line"}}<tr><td>{{.Key}}</td><td>{{.Sandboxes}}</td><td>{{.CPU}}</td><td>{{.Memory}}</td><td>{{.Usage}}</td><td>{{.Outside}}</td><td>{{.Cost}}</td><td>{{.Revenue}}</td><td>{{.Profit}}</td><td>{{.Percent}}</td></tr>
{{end}}`))
