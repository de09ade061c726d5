package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
)

func (c *cli) scheduleCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "schedule", Short: "Repeat snapshots and resets",
		Long: `A schedule takes a snapshot of a sandbox, or resets it, whenever a cron expression
comes due. It goes with the sandbox. Runs missed while the daemon was down are not
made up for.`,
	}
	cmd.AddCommand(c.scheduleAddCmd(), c.scheduleLsCmd(), c.scheduleRmCmd())
	return cmd
}

func (c *cli) scheduleAddCmd() *cobra.Command {
	var req api.ScheduleRequest
	var keepFor time.Duration
	cmd := &cobra.Command{
		Use: "add [flags] SANDBOX snapshot|reset CRON", Short: "Add a schedule",
		Long: `Take a snapshot of a sandbox, or reset it, whenever CRON comes due: five fields
(minute, hour, day of the month, month, day of the week) in UTC, or with TZ=ZONE
before them, or @hourly, @daily, @weekly, @monthly, @every DURATION.

A reset that finds a process running does nothing that time, unless --force.`,
		Example: `  sandbox schedule add dev snapshot '0 * * * *' --keep 24
  sandbox schedule add dev snapshot @daily --keep-for 720h
  sandbox schedule add ci reset 'TZ=Europe/Berlin 0 3 * * *'`,
		Args: cobra.ExactArgs(3), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Action, req.Cron, req.KeepFor = args[1], args[2], seconds(keepFor)
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.AddSchedule(cmd.Context(), args[0], req)
			if err != nil {
				return err
			}
			return c.showLine(s, "%s", s.ID)
		},
	}
	cmd.Flags().IntVar(&req.Keep, "keep", 0, "of snapshots: how many are kept, the newest; 0: all")
	cmd.Flags().DurationVar(&keepFor, "keep-for", 0, "of snapshots: how long each is kept; 0: for good")
	cmd.Flags().BoolVar(&req.Force, "force", false, "of resets: also while a process runs")
	return cmd
}

func (c *cli) scheduleLsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "ls [SANDBOX]", Aliases: []string{"list"}, Short: "List schedules", Example: "  sandbox schedule ls", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.Schedules(cmd.Context(), append(args, "")[0])
			if err != nil {
				return err
			}
			return c.show(all, func(w printer) error {
				return columns(w, "ID\tSANDBOX\tACTION\tCRON\tNEXT\tRUNS\tSKIPPED\tLAST ERROR", func(row func(string, ...any)) {
					for _, s := range all {
						row("%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s", s.ID, s.Sandbox, s.Action, s.Cron, s.NextAt.Local().Format(time.DateTime), s.Runs, s.Skipped, dash(clip(oneLine(s.LastError), 40)))
					}
				})
			})
		},
	}
}

func (c *cli) scheduleRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm SCHEDULE…", Short: "End schedules; what they made stays", Example: "  sandbox schedule rm sc4k2…", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(id string) error { return cl.RemoveSchedule(cmd.Context(), id) })
		},
	}
}
