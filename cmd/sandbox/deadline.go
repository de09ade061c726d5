package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) timeoutCmd() *cobra.Command {
	var (
		action string
		extend bool
	)
	cmd := &cobra.Command{
		Use: "timeout [flags] SANDBOX [DURATION | none]", Short: "Change when a sandbox's lifetime is over",
		Long: `Change when a living sandbox's lifetime is over, counted from now, and what
becomes of it then: it ends, or is paused (its memory is kept), or stopped (its
files are kept). A sandbox that was paused or stopped at its deadline has its
whole lifetime again once it is resumed or started.`,
		Example: `  sandbox timeout dev 30m
  sandbox timeout --extend dev 2h            # a later deadline stays
  sandbox timeout --on-timeout pause dev 1h
  sandbox timeout dev none`,
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := sandbox.DeadlineRequest{AtLeast: extend, OnDeadline: sandbox.DeadlineAction(action)}
			if len(args) > 1 {
				ttl, err := parseLifetime(args[1])
				if err != nil {
					return err
				}
				req.TTLSeconds = &ttl
			}
			if err := req.Validate(); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			sb, err := cl.SetDeadline(cmd.Context(), args[0], req)
			if err != nil {
				return err
			}
			until := "none"
			if sb.Deadline != nil {
				until = sb.Deadline.Local().Format(time.DateTime)
			}
			return c.showLine(sb, "%s %s", sb.ID, until)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&action, "on-timeout", "", "what becomes of it then: end, pause or stop")
	fl.BoolVar(&extend, "extend", false, "never shorten: a later deadline stays")
	return cmd
}

// parseLifetime reads a duration, in whole seconds, or none.
func parseLifetime(text string) (int64, error) {
	if text == "none" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, usage("lifetime %.40q: write it as 90s, 30m or 24h, or none", text)
	}
	return seconds(d), nil
}
