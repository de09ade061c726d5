package report

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
)

// The chart's measures, in pixels.
const (
	chartWidth = 860
	labelWidth = 150
	valueWidth = 130
	rowHeight  = 22
	barHeight  = 14
	panelGap   = 26
	titleSpace = 34
	barWidth   = chartWidth - labelWidth - valueWidth
)

// colours of the bars; all others are grey.
var colours = map[string]string{Us: "#0b6e4f", Floor: "#b8b8b8"}

// Chart writes an SVG with a panel of bars for each named scenario that was
// measured: bars to the median, a whisker to the 95th percentile, values in
// words. Each panel has its own scale, from zero.
func (r *Report) Chart(w io.Writer, scenarios ...string) error {
	var body strings.Builder
	y := 58
	for _, sc := range r.Scenarios {
		for _, name := range scenarios {
			if series := r.Of(name); name == sc.Name && len(series) > 0 {
				y = panel(&body, y, sc, series)
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="system-ui, 'DejaVu Sans', Helvetica, sans-serif" font-size="12" fill="#222">`+"\n",
		chartWidth, y, chartWidth, y)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", chartWidth, y)
	fmt.Fprintf(&b, `<text x="12" y="24" font-size="16" font-weight="600">sandboxd beside runc, crun and bubblewrap</text>`+"\n")
	fmt.Fprintf(&b, `<text x="12" y="42" fill="#666">%s</text>`+"\n", escape(fmt.Sprintf(
		"medians, whiskers to the 95th percentile; %d × %s, Linux %s, %s, %s run", r.Host.CPUs, r.Host.CPU, r.Host.Kernel, r.Started.UTC().Format("2006-01-02"), r.Mode)))
	b.WriteString(body.String())
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// panel draws one scenario from y on and returns where the next one begins.
func panel(b *strings.Builder, y int, sc Scenario, series []*Series) int {
	better := "less is better"
	if series[0].More {
		better = "more is better"
	}
	fmt.Fprintf(b, `<text x="12" y="%d" font-size="13" font-weight="600">%s <tspan font-weight="400" fill="#666">%s, %s</tspan></text>`+"\n",
		y+16, escape(sc.Title), escape(series[0].Unit), better)
	longest := 0.0
	for _, s := range series {
		st := s.Stats()
		longest = max(longest, st.Median, min(st.P95, 2*st.Median)) // one wild tail must not flatten all bars
	}
	if longest <= 0 {
		longest = 1
	}
	x := func(v float64) float64 { return labelWidth + min(v/longest, 1)*barWidth }
	y += titleSpace - 8
	for _, s := range series {
		st := s.Stats()
		fill, ok := colours[s.Contestant]
		if !ok {
			fill = "#7a8fa6"
			if strings.HasPrefix(s.Contestant, Us) {
				fill = "#4f9f82"
			}
		}
		mid := y + rowHeight/2
		fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="end">%s</text>`, labelWidth-8, mid+4, escape(s.Contestant))
		fmt.Fprintf(b, `<rect x="%d" y="%d" width="%.1f" height="%d" rx="2" fill="%s"/>`, labelWidth, mid-barHeight/2, max(x(st.Median)-labelWidth, 1), barHeight, fill)
		if st.P95 > st.Median {
			fmt.Fprintf(b, `<path d="M%.1f %dH%.1fm0 -4v8" stroke="#333" fill="none"/>`, x(st.Median), mid, x(st.P95))
		}
		fmt.Fprintf(b, `<text x="%.1f" y="%d">%s</text>`+"\n", max(x(st.Median), x(st.P95))+8, mid+4, escape(number(st.Median)+" "+s.Unit))
		y += rowHeight
	}
	return y + panelGap
}

// escape makes text safe between tags.
func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder never fails
	return b.String()
}
