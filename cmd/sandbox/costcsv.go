package main

import (
	"encoding/csv"
	"io"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/cost"
)

// outputCSV is an --output that some commands have besides the others; they
// carry it as annotation.
const outputCSV = "csv"

// statementCSV writes a line for each key. A cell that a spreadsheet would take
// for a formula gets a quote in front; control characters stand as their codes.
func statementCSV(w io.Writer, s cost.Statement) error {
	cw := csv.NewWriter(w)
	_ = cw.Write([]string{ // the writer keeps its error
		"key", "sandboxes", "currency", "usage", "outside", "cost", "revenue", "profit", "roi_bp",
		"cpu_usec", "memory_kib_s", "storage_kib_s", "net_rx_bytes", "net_tx_bytes", "io_read_bytes", "io_write_bytes",
		"running_ms", "paused_ms", "stopped_ms", "other_ms", "starts",
	})
	for _, l := range s.Lines {
		roi := ""
		if l.ROI != nil {
			roi = strconv.FormatInt(*l.ROI, 10)
		}
		row := []string{
			cell(l.Key), strconv.FormatInt(l.Sandboxes, 10), s.Currency,
			l.Usage.String(), l.Outside.String(), l.Cost.String(), l.Revenue.String(), l.Profit.String(), roi,
		}
		for _, v := range l.Meters.Values() {
			row = append(row, strconv.FormatInt(v, 10))
		}
		_ = cw.Write(row)
	}
	cw.Flush()
	return cw.Error()
}

func cell(s string) string {
	if s != "" && strings.ContainsRune("=+-@", rune(s[0])) {
		s = "'" + s
	}
	return plain(s)
}
