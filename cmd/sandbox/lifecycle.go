package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

// moveCmd is a command that does one thing to each sandbox named.
func (c *cli) moveCmd(verb, short, long, example string, do func(*client.Client, context.Context, string) (sandbox.Sandbox, error)) *cobra.Command {
	return &cobra.Command{
		Use: verb + " SANDBOX…", Short: short, Long: long, Example: example,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(ref string) error {
				sb, err := do(cl, cmd.Context(), ref)
				if err != nil {
					return err
				}
				return c.showLine(sb, "%s", sb.ID)
			})
		},
	}
}

func (c *cli) pauseCmd() *cobra.Command {
	return c.moveCmd("pause", "Freeze a sandbox; memory is kept",
		"Freeze every process of a sandbox. It uses no CPU and keeps its memory; 'sandbox resume' lets it go on.",
		"  sandbox pause dev", (*client.Client).Pause)
}

func (c *cli) resumeCmd() *cobra.Command {
	return c.moveCmd("resume", "Let a paused sandbox go on", "Let a sandbox that was paused go on where it was.",
		"  sandbox resume dev", (*client.Client).Resume)
}

func (c *cli) stopCmd() *cobra.Command {
	return c.moveCmd("stop", "End a sandbox's processes; files are kept",
		"End every process of a sandbox and keep its files. 'sandbox start' runs it again, 'sandbox rm' ends it for good.",
		"  sandbox stop dev", (*client.Client).Stop)
}

func (c *cli) startCmd() *cobra.Command {
	return c.moveCmd("start", "Run a stopped sandbox again", "Run a stopped sandbox again, with the files it had. Its commands are not started again.",
		"  sandbox start dev", (*client.Client).Start)
}

func (c *cli) rmCmd() *cobra.Command {
	var all bool
	var labels []string
	cmd := c.moveCmd("rm", "End sandboxes and delete their files",
		`End sandboxes: their processes are killed and their files deleted. The record,
with the end reason, the usage and the last output, stays ('sandbox ls -a').
Repeating it does no harm.`,
		`  sandbox rm dev
  sandbox rm sb4k sbq2
  sandbox rm --all -l team=infra`, (*client.Client).Remove)
	cmd.Use = "rm [flags] SANDBOX…"
	remove := cmd.RunE
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if all != (len(args) == 0) {
			return usage("name the sandboxes, or give --all")
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !all {
			return remove(cmd, args)
		}
		want, err := parseLabels(labels)
		if err != nil {
			return err
		}
		cl, err := c.client()
		if err != nil {
			return err
		}
		for sb, err := range cl.All(cmd.Context(), sandbox.Filter{Labels: want}) {
			if err != nil {
				return err
			}
			args = append(args, string(sb.ID))
		}
		if len(args) == 0 {
			return nil
		}
		return remove(cmd, args)
	}
	cmd.Flags().BoolVar(&all, "all", false, "every living sandbox, or with -l every one that matches")
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "with --all: only those with label k=v; repeatable")
	return cmd
}

func (c *cli) lsCmd() *cobra.Command {
	var all, quiet bool
	var labels, statuses []string
	var name string
	var limit int
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"},
		Short: "List sandboxes, newest first",
		Long:  "List the living sandboxes, newest first; with -a also those that have ended, and why. Where they are of several owners, a last column says whose.",
		Example: `  sandbox ls
  sandbox ls -a --limit 20
  sandbox ls -l team=infra --status running -o json
  sandbox ls -q`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f := sandbox.Filter{All: all, Name: name}
			var err error
			if f.Labels, err = parseLabels(labels); err != nil {
				return err
			}
			for _, s := range statuses {
				f.Statuses = append(f.Statuses, sandbox.Status(s))
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			items := []sandbox.Sandbox{}
			for sb, err := range cl.All(cmd.Context(), f) {
				if err != nil {
					return err
				}
				if items = append(items, sb); len(items) == limit {
					break
				}
			}
			if quiet {
				return names(c, items, func(sb sandbox.Sandbox) string { return string(sb.ID) })
			}
			return c.show(items, func(w printer) error { return c.sandboxTable(w, items) })
		},
	}
	fl := cmd.Flags()
	fl.BoolVarP(&all, "all", "a", false, "ended ones, too")
	fl.BoolVarP(&quiet, "quiet", "q", false, "ids only")
	fl.StringArrayVarP(&labels, "label", "l", nil, "only those with label k=v; repeatable")
	fl.StringSliceVar(&statuses, "status", nil, "only these statuses, as running,paused")
	fl.StringVar(&name, "name", "", "only this name")
	fl.IntVar(&limit, "limit", 0, "at most this many; 0 means all")
	return cmd
}

func (c *cli) sandboxTable(w printer, items []sandbox.Sandbox) error {
	several := false
	for _, sb := range items {
		several = several || sb.Owner != items[0].Owner
	}
	rows := func(row func(string, ...any)) {
		for _, sb := range items {
			deadline := "-"
			if sb.Deadline != nil && !sb.Status.Terminal() {
				deadline = "in " + time.Until(*sb.Deadline).Round(time.Second).String()
			}
			cells := []any{sb.ID, dash(sb.Spec.Name), dash(sb.Spec.Image), sb.Status, dash(string(sb.Reason)), ago(sb.CreatedAt), deadline}
			if several {
				row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", append(cells, dash(sb.Owner))...)
			} else {
				row("%s\t%s\t%s\t%s\t%s\t%s\t%s", cells...)
			}
		}
	}
	if several {
		return columns(w, "ID\tNAME\tIMAGE\tSTATUS\tREASON\tCREATED\tDEADLINE\tOWNER", rows)
	}
	return columns(w, "ID\tNAME\tIMAGE\tSTATUS\tREASON\tCREATED\tDEADLINE", rows)
}
