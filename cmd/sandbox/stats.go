package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

// sample is one sandbox's usage at one time.
type sample struct {
	ID     sandbox.ID     `json:"id"`
	Name   string         `json:"name,omitempty"`
	Status sandbox.Status `json:"status"`
	Limits sandbox.Limits `json:"limits"`
	At     time.Time      `json:"at"`
	CPU    *float64       `json:"cpu_cores,omitempty"` // since the sample before
	Usage  sandbox.Usage  `json:"usage"`
}

func (c *cli) statsCmd() *cobra.Command {
	var follow bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "stats [flags] [SANDBOX…]",
		Short: "Show what sandboxes use",
		Long: `Show what sandboxes use: all living ones, if none is named. CPU is in cores over
the last interval with -f, and in seconds since the creation otherwise. What this
machine cannot count is shown as '?'.`,
		Example: `  sandbox stats
  sandbox stats -f dev
  sandbox stats -o json dev`,
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return c.repeat(cmd.Context(), follow, interval, func(before map[sandbox.ID]sample) (map[sandbox.ID]sample, error) {
				samples, err := c.sample(cmd.Context(), cl, args, before)
				if err != nil {
					return nil, err
				}
				return byID(samples), c.show(samples, func(w printer) error { return statsTable(w, samples) })
			})
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "again and again")
	cmd.Flags().DurationVar(&interval, "interval", 2*time.Second, "time between two rounds")
	return cmd
}

func (c *cli) topCmd() *cobra.Command {
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "top [flags] [SANDBOX…]",
		Short: "Watch what sandboxes use, the busiest first",
		Long: `Watch the living sandboxes, or those named, the busiest first. Ctrl-C ends it. Without
a terminal it prints one table a round.`,
		Example:           "  sandbox top\n  sandbox top --interval 5s",
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return c.repeat(cmd.Context(), true, interval, func(before map[sandbox.ID]sample) (map[sandbox.ID]sample, error) {
				samples, err := c.sample(cmd.Context(), cl, args, before)
				if err != nil {
					return nil, err
				}
				slices.SortStableFunc(samples, func(a, b sample) int { return -compareCPU(a, b) })
				return byID(samples), c.show(samples, func(printer) error { return c.screen(samples) })
			})
		},
	}
	cmd.Flags().DurationVar(&interval, "interval", 2*time.Second, "time between two rounds")
	return cmd
}

func compareCPU(a, b sample) int {
	x, y := a.Usage.CPUSeconds, b.Usage.CPUSeconds
	if a.CPU != nil && b.CPU != nil {
		x, y = *a.CPU, *b.CPU
	}
	switch {
	case x < y:
		return -1
	case x > y:
		return 1
	}
	return 0
}

// screen draws the table over the one before, on a terminal.
func (c *cli) screen(samples []sample) error {
	var b strings.Builder
	if c.onTerminal() {
		b.WriteString("\x1b[H\x1b[2J")
		rows := int(windowSize(c.out).Rows) - 3
		samples = samples[:min(len(samples), max(rows, 1))]
	}
	fmt.Fprintf(&b, "%s  %d shown\n", time.Now().Format(time.TimeOnly), len(samples))
	if err := statsTable(printer{raw: &b}, samples); err != nil {
		return err
	}
	_, err := io.WriteString(c.out, b.String())
	return err
}

func byID(samples []sample) map[sandbox.ID]sample {
	m := map[sandbox.ID]sample{}
	for _, s := range samples {
		m[s.ID] = s
	}
	return m
}

// repeat runs round once, or with again until ctx ends.
func (c *cli) repeat(ctx context.Context, again bool, interval time.Duration, round func(map[sandbox.ID]sample) (map[sandbox.ID]sample, error)) error {
	tick := time.NewTicker(max(interval, 100*time.Millisecond))
	defer tick.Stop()
	var before map[sandbox.ID]sample
	for {
		var err error
		if before, err = round(before); err != nil || !again {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil // being told to end is its ordinary end
		}
	}
}

// sample reads the usage of the sandboxes named, or of all living ones.
func (c *cli) sample(ctx context.Context, cl *client.Client, refs []string, before map[sandbox.ID]sample) ([]sample, error) {
	var boxes []sandbox.Sandbox
	if len(refs) == 0 {
		for sb, err := range cl.All(ctx, sandbox.Filter{}) {
			if err != nil {
				return nil, err
			}
			boxes = append(boxes, sb)
		}
	}
	for _, ref := range refs {
		sb, err := cl.Sandbox(ctx, ref)
		if err != nil {
			return nil, err
		}
		boxes = append(boxes, sb)
	}
	samples := make([]sample, len(boxes))
	var all sync.WaitGroup
	slots := make(chan struct{}, 8)
	for i, sb := range boxes {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			s := sample{ID: sb.ID, Name: sb.Spec.Name, Status: sb.Status, Limits: sb.Spec.Limits, Usage: sb.Usage}
			if u, err := cl.Usage(ctx, string(sb.ID)); err == nil {
				s.Usage = u // else it just ended, and the record has its last counters
			}
			s.At = time.Now()
			if b, ok := before[sb.ID]; ok && s.At.After(b.At) {
				cores := max(0, (s.Usage.CPUSeconds-b.Usage.CPUSeconds)/s.At.Sub(b.At).Seconds())
				s.CPU = &cores
			}
			samples[i] = s
		})
	}
	all.Wait()
	return samples, ctx.Err()
}

func statsTable(w printer, samples []sample) error {
	return columns(w, "ID\tNAME\tSTATUS\tCPU\tMEMORY\tPEAK\tTASKS\tDISK\tREAD/WRITTEN\tNET IN/OUT\tPACKETS\tREFUSED", func(row func(string, ...any)) {
		for _, s := range samples {
			u := s.Usage
			known := func(group, text string) string {
				if slices.Contains(u.Unknown, group) {
					return "?"
				}
				return text
			}
			cpu := fmt.Sprintf("%.2f s", u.CPUSeconds)
			if s.CPU != nil {
				cpu = fmt.Sprintf("%.2f", *s.CPU)
			}
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", s.ID, dash(s.Name), s.Status,
				known("cpu", cpu), known("memory", of(u.MemoryBytes, s.Limits.MemoryBytes)), known("memory", size(u.MemoryPeakBytes)),
				known("pids", fmt.Sprint(u.PIDs)), known("disk", of(u.DiskBytes, s.Limits.DiskBytes)),
				known("io", size(u.IOReadBytes)+" / "+size(u.IOWriteBytes)), known("net", size(u.NetRxBytes)+" / "+size(u.NetTxBytes)),
				known("net", many(u.NetRxPackets)+" / "+many(u.NetTxPackets)), known("net", many(u.NetDropped)))
		}
	})
}

// of prints an amount and, where there is one, its limit.
func of(n uint64, limit int64) string {
	if limit == 0 {
		return size(n)
	}
	return size(n) + " of " + units.BytesSize(float64(limit))
}

// many prints a number as a person reads it; 0 as a dash.
func many(n uint64) string {
	if n == 0 {
		return "-"
	}
	return units.CustomSize("%.4g%s", float64(n), 1000, []string{"", "k", "M", "G", "T", "P"})
}
