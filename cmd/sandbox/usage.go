package main

import (
	"fmt"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) usageCmd() *cobra.Command {
	var by, from, to string
	cmd := &cobra.Command{
		Use:   "usage [flags] [SANDBOX]",
		Short: "Report what was used in a span of time",
		Long: `Report what sandboxes used from one time to another, by the daemon's ledger: all of
them, or the one named, also one that is long gone, by its id. Spans that meet leave
nothing out and count nothing twice. Memory and disk are amounts held for an hour.
-o json has whole numbers.`,
		Example: `  sandbox usage dev
  sandbox usage --by owner --from 720h
  sandbox usage --by label:team --from 2026-05-01T00:00:00Z --to 2026-06-01T00:00:00Z -o json`,
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			q := sandbox.UsageQuery{By: by}
			ref := ""
			if len(args) > 0 {
				ref = args[0]
			}
			var err error
			if q.From, err = parseBound("--from", from, time.Now()); err != nil {
				return err
			}
			if q.To, err = parseBound("--to", to, time.Now()); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			r, err := cl.UsageReport(cmd.Context(), ref, q)
			if err != nil {
				return err
			}
			return c.show(r, func(w printer) error { return usageTable(w, r) })
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&by, "by", "", "a line for each: sandbox, owner, project, image or label:KEY")
	fl.StringVar(&from, "from", "", "begin then: a duration ago, as 24h, or a time, as 2026-01-31T12:00:00Z (default: the beginning)")
	fl.StringVar(&to, "to", "", "end before then, likewise (default: now)")
	return cmd
}

// parseBound reads one end of a span of time; nothing means no time.
func parseBound(flag, s string, now time.Time) (time.Time, error) {
	t, err := parseSince(s, now)
	if err != nil {
		return t, usage("%s %q: use a duration ago, as 24h, or a time, as 2026-01-31T12:00:00Z", flag, s)
	}
	return t, nil
}

func usageTable(w printer, r sandbox.UsageReport) error {
	return columns(w, "KEY\tSANDBOXES\tSTARTS\tCPU\tMEMORY·H\tDISK·H\tREAD/WRITTEN\tNET IN/OUT\tRUNNING\tPAUSED\tSTOPPED", func(row func(string, ...any)) {
		show := func(key string, l sandbox.UsageLine) {
			m := l.Meters
			row("%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", key, l.Sandboxes, m.Starts, inTime(m.CPU/1000), hours(m.Memory), hours(m.Storage),
				size(m.IORead)+" / "+size(m.IOWrite), size(m.NetRx)+" / "+size(m.NetTx), inTime(m.Running), inTime(m.Paused), inTime(m.Stopped))
		}
		for _, l := range r.Lines {
			if r.By != "" {
				show(dash(l.Key), l)
			}
		}
		show("total", r.Total)
	})
}

// hours prints KiB times seconds as an amount held for an hour.
func hours(kibSeconds int64) string {
	if kibSeconds == 0 {
		return "-"
	}
	return units.BytesSize(float64(kibSeconds) * 1024 / 3600)
}

// inTime prints milliseconds.
func inTime(ms int64) string {
	switch {
	case ms == 0:
		return "-"
	case ms < 60_000:
		return fmt.Sprintf("%.2fs", float64(ms)/1000)
	}
	return (time.Duration(ms) * time.Millisecond).Round(time.Second).String()
}
