package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) inspectCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "inspect SANDBOX…",
		Short: "Show everything about a sandbox",
		Long: `Show a sandbox's record: its spec with the daemon's defaults filled in, which
limits this machine enforces and why not, its usage and, once it has ended, why.
Prints YAML unless -o json is given.`,
		Example: `  sandbox inspect dev
  sandbox inspect -o json dev | jq '.[0].enforcement'`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			found := []sandbox.Sandbox{}
			err = each(c, args, func(ref string) error {
				sb, err := cl.Sandbox(cmd.Context(), ref)
				if err == nil {
					found = append(found, sb)
				}
				return err
			})
			if c.output == "table" {
				c.output = "yaml"
			}
			if len(found) == 0 {
				return err
			}
			return errors.Join(c.show(found, nil), err)
		},
	}
}

func (c *cli) logsCmd() *cobra.Command {
	var follow bool
	var offset int64
	cmd := &cobra.Command{
		Use:   "logs [flags] SANDBOX [PROCESS]",
		Short: "Print what a process wrote",
		Long: `Print the output kept of a process: of the last one started, if none is named.
Of a sandbox that has stopped or ended it is the end of its output. Both streams
are printed as they were written, stdout to stdout and stderr to stderr.`,
		Example: `  sandbox logs dev
  sandbox logs -f dev p3
  sandbox logs --offset 1048576 dev p3`,
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: c.completeProcess,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return c.logs(cmd.Context(), cl, args, offset, follow)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the process ends")
	cmd.Flags().Int64Var(&offset, "offset", -1, "first byte wanted; -1 means the oldest kept")
	return cmd
}

func (c *cli) logs(ctx context.Context, cl *client.Client, args []string, offset int64, follow bool) error {
	sb, err := cl.Sandbox(ctx, args[0])
	if err != nil {
		return err
	}
	ref := string(sb.ID)
	var id sandbox.ProcessID
	if len(args) == 2 {
		id = sandbox.ProcessID(args[1])
	} else if sb.Status.Terminal() || sb.Status == sandbox.StatusStopped {
		b, err := cl.LastOutput(ctx, ref)
		if err == nil {
			_, err = c.out.Write(b)
		}
		return err
	} else {
		procs, err := cl.Processes(ctx, ref)
		if err != nil {
			return err
		}
		if len(procs) == 0 {
			return sandbox.Errorf(sandbox.ErrNotFound, "no_process", "no process was started in sandbox %s yet: 'sandbox exec %s -- …' does", ref, args[0])
		}
		id = slices.MaxFunc(procs, func(a, b sandbox.Process) int { return a.StartedAt.Compare(b.StartedAt) }).ID
	}
	if follow && sb.Status == sandbox.StatusRunning {
		p, err := cl.Attach(ctx, ref, id, offset)
		if err != nil {
			return err
		}
		defer func() { _ = p.Close() }() // reading only
		_, err = c.copyOutput(p)
		return err
	}
	r, err := cl.Output(ctx, ref, id, offset, false)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // read only
	_, err = io.Copy(c.out, r)
	return err
}

func (c *cli) psCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "ps SANDBOX",
		Short: "List the processes started in a sandbox",
		Long: `List the processes started through the daemon in a sandbox, ended ones too. What
they started themselves is not in the list: 'sandbox exec SANDBOX -- ps' shows it.`,
		Example:           "  sandbox ps dev",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			procs, err := cl.Processes(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.show(procs, func(w printer) error {
				return columns(w, "ID\tPID\tSTATUS\tUSER\tSTARTED\tOUTPUT\tCOMMAND", func(row func(string, ...any)) {
					for _, p := range procs {
						row("%s\t%d\t%s\t%s\t%s\t%s\t%s", p.ID, p.PID, processStatus(p), dash(p.User), ago(p.StartedAt), size(p.Output.End), clip(strings.Join(p.Argv, " "), 60))
					}
				})
			})
		},
	}
}

func processStatus(p sandbox.Process) string {
	switch {
	case p.Exit == nil:
		return "running"
	case p.Exit.OOM:
		return "oom"
	case p.Exit.TimedOut:
		return "timeout"
	case p.Exit.Signal != "":
		return p.Exit.Signal
	}
	return fmt.Sprintf("exit %d", p.Exit.Code)
}

// clip shortens text for a table.
func clip(s string, n int) string {
	s = strings.ReplaceAll(s, "\n", " ")
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

func (c *cli) eventsCmd() *cobra.Command {
	var follow bool
	var since, ref string
	var limit int
	cmd := &cobra.Command{
		Use:   "events [flags]",
		Short: "Print what happened",
		Long: `Print what happened on this daemon, oldest first: of the last hour unless --since
is given; with -f go on with what comes. A broken connection is made again without
a gap.`,
		Example: `  sandbox events --since 24h
  sandbox events -f                          # from now on
  sandbox events -f --since 10m --sandbox dev -o json`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			q := client.EventQuery{Sandbox: ref}
			if since == "" && !follow {
				since = "1h"
			}
			if q.Since, err = parseSince(since, time.Now()); err != nil {
				return err
			}
			if follow {
				return cl.Follow(cmd.Context(), q, c.event)
			}
			return c.pastEvents(cmd.Context(), cl, q, limit)
		},
	}
	fl := cmd.Flags()
	fl.BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	fl.StringVar(&since, "since", "", "begin then: a duration ago, as 10m, or a time, as 2026-01-31T12:00:00Z")
	fl.StringVar(&ref, "sandbox", "", "only of this sandbox")
	fl.IntVar(&limit, "limit", 0, "at most this many; 0 means all")
	return cmd
}

// parseSince reads a duration before now, or a time; nothing means no time.
func parseSince(s string, now time.Time) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return t, usage("--since %q: use a duration, as 10m, or a time, as 2026-01-31T12:00:00Z", s)
	}
	return t, nil
}

func (c *cli) pastEvents(ctx context.Context, cl *client.Client, q client.EventQuery, limit int) error {
	q.Limit = sandbox.MaxPage
	for n := 0; ; {
		events, next, err := cl.Events(ctx, q)
		if err != nil || len(events) == 0 {
			return err
		}
		for _, e := range events {
			if err := c.event(e); err != nil {
				return err
			}
			if n++; n == limit {
				return nil
			}
		}
		q.After, q.Since = next, time.Time{}
	}
}

func (c *cli) event(e sandbox.Event) error {
	text := ""
	for _, k := range slices.Sorted(maps.Keys(e.Data)) {
		text += "  " + k + "=" + clip(e.Data[k], 80)
	}
	return c.showLine(e, "%s  %-14s  %-22s  %s%s", e.Time.Local().Format("2006-01-02 15:04:05.000"), dash(string(e.Sandbox)), e.Type, dash(e.Actor), text)
}

// isStdout reports whether the output is this program's own terminal.
func (c *cli) onTerminal() bool { f, ok := c.out.(*os.File); return ok && isTerminal(f) }
