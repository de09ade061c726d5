package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

// netFaultCmd disturbs a network on purpose.
func (c *cli) netFaultCmd() *cobra.Command {
	var latency, jitter, lasts time.Duration
	var loss lossFlag
	var limit rateFlag
	var partition, clearIt bool
	cmd := &cobra.Command{
		Use: "fault [flags] SANDBOX", Short: "Disturb a sandbox's network on purpose",
		Long: `Disturb a sandbox's network, to see how what runs in it bears that. The flags given
replace an earlier fault; without any, the present one is shown.

Latency and jitter are of the round trip: half falls to each way. Loss and rate are
for each way. A partition loses everything, and tells nobody. A fault ends after
--for, with --clear, when the sandbox stops, and when the daemon restarts.`,
		Example: `  sandbox net fault dev --latency 200ms --jitter 20ms --loss 5%
  sandbox net fault dev --partition --for 30s
  sandbox net fault dev --clear`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			f := sandbox.NetworkFault{
				LatencyMS: millis(latency), JitterMS: millis(jitter), LossPercent: float64(loss),
				RateBPS: uint64(limit), Partition: partition, Seconds: seconds(lasts),
			}
			switch {
			case clearIt && cmd.Flags().NFlag() > 1+inherited(cmd):
				return usage("--clear ends a fault: it goes with no other flag")
			case clearIt:
				return cl.ClearFault(cmd.Context(), args[0])
			case f == sandbox.NetworkFault{}:
				f, err = cl.Fault(cmd.Context(), args[0])
			default:
				f, err = cl.SetFault(cmd.Context(), args[0], f)
			}
			if err != nil {
				return err
			}
			return c.show(f, func(w printer) error { return line(w, faultWords(f)) })
		},
	}
	fl := cmd.Flags()
	fl.DurationVar(&latency, "latency", 0, "added to the round trip, as 200ms")
	fl.DurationVar(&jitter, "jitter", 0, "how much the latency varies, as 20ms")
	fl.Var(&loss, "loss", "share of packets lost each way, as 5%")
	fl.Var(&limit, "rate", "bits a second each way, as 1mbit")
	fl.BoolVar(&partition, "partition", false, "let nothing pass")
	fl.DurationVar(&lasts, "for", 0, "how long, as 5m; 0: until --clear")
	fl.BoolVar(&clearIt, "clear", false, "end the fault")
	return cmd
}

// inherited counts the flags given that belong to every command.
func inherited(cmd *cobra.Command) (n int) {
	for _, name := range []string{"host", "output"} {
		if cmd.Flags().Changed(name) {
			n++
		}
	}
	return n
}

// millis rounds up: a latency of 500µs must not become none.
func millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}

// faultWords tells a fault in words.
func faultWords(f sandbox.NetworkFault) string {
	var words []string
	add := func(set bool, format string, args ...any) {
		if set {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	if f.Partition {
		words = append(words, "partition")
	} else {
		add(f.LatencyMS > 0, "%d ms more round trip", f.LatencyMS)
		add(f.JitterMS > 0, "%d ms of jitter", f.JitterMS)
		add(f.LossPercent > 0, "%s%% lost each way", strconv.FormatFloat(f.LossPercent, 'f', -1, 64))
		add(f.RateBPS > 0, "%s each way", rate(f.RateBPS))
	}
	if len(words) == 0 {
		return "no fault"
	}
	if f.Until != nil {
		words = append(words, "until "+f.Until.Local().Format(time.DateTime))
	}
	return strings.Join(words, ", ")
}

// lossFlag is a share given as 5% or 0.5%.
type lossFlag float64

func (l *lossFlag) String() string {
	if *l == 0 {
		return ""
	}
	return strconv.FormatFloat(float64(*l), 'f', -1, 64) + "%"
}

func (l *lossFlag) Set(v string) error {
	n, err := strconv.ParseFloat(strings.TrimSuffix(v, "%"), 64)
	if err != nil || !(n >= 0 && n <= 100) {
		return usage("%q is not a share: use 0%% to 100%%, as 5%%", v)
	}
	*l = lossFlag(n)
	return nil
}

// Type names the value in --help.
func (l *lossFlag) Type() string { return "percent" }
