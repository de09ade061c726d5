package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) snapshotCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "snapshot", Aliases: []string{"snap"}, Short: "Freeze files, and compare them",
		Long: `A snapshot is the frozen files of a sandbox, with the spec it had. It never changes
and outlives its sandbox. 'sandbox fork' makes sandboxes of it, 'sandbox rollback'
puts its sandbox back on it. Memory and processes are no part of it.`,
	}
	cmd.AddCommand(c.snapshotCreateCmd(), c.snapshotLsCmd(), c.snapshotInspectCmd(), c.snapshotRmCmd(), c.diffCmd(), c.snapshotExportCmd(), c.snapshotImportCmd())
	return cmd
}

func (c *cli) snapshotCreateCmd() *cobra.Command {
	var req sandbox.SnapshotRequest
	cmd := &cobra.Command{
		Use: "create [flags] SANDBOX", Short: "Freeze the files of a sandbox",
		Long: `Freeze the files of a running, paused or stopped sandbox. Where no command runs in
it that takes the same few milliseconds whatever was written; else its processes
are held for a moment while its files are copied, by reference where the volume can.

A snapshot outlives a crash of the daemon from the moment it is told, and a power
cut from a second later; --sync waits for that.`,
		Example: `  sandbox snapshot create dev
  sandbox snapshot create dev --name before-upgrade -m "all tests green"`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.persistent(&req.IdempotencyKey)
			if err != nil {
				return err
			}
			s, err := cl.Snapshot(cmd.Context(), args[0], req)
			if err != nil {
				return err
			}
			return c.showLine(s, "%s", s.ID)
		},
	}
	cmd.Flags().StringVarP(&req.Name, "name", "n", "", "name, unique among snapshots")
	cmd.Flags().StringVarP(&req.Comment, "message", "m", "", "what it is, for people")
	cmd.Flags().BoolVar(&req.Sync, "sync", false, "return only when it is on disk")
	addKey(cmd, &req.IdempotencyKey)
	return cmd
}

func (c *cli) snapshotLsCmd() *cobra.Command {
	var of string
	var kinds []string
	var quiet bool
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"}, Short: "List snapshots, newest first",
		Example: "  sandbox snapshot ls\n  sandbox snapshot ls --sandbox dev --kind manual,scheduled",
		Args:    cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			want := make([]sandbox.SnapshotKind, len(kinds))
			for i, k := range kinds {
				want[i] = sandbox.SnapshotKind(k)
			}
			all, err := cl.Snapshots(cmd.Context(), of, want...)
			if err != nil {
				return err
			}
			if quiet {
				return names(c, all, func(s sandbox.Snapshot) string { return string(s.ID) })
			}
			return c.show(all, func(w printer) error { return snapshotTable(w, all) })
		},
	}
	cmd.Flags().StringVar(&of, "sandbox", "", "of this sandbox only")
	cmd.Flags().StringSliceVar(&kinds, "kind", nil, "only these kinds: manual, fork, auto, scheduled")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "ids only")
	return cmd
}

func snapshotTable(w printer, all []sandbox.Snapshot) error {
	return columns(w, "ID\tNAME\tSANDBOX\tKIND\tSIZE\tFILES\tCREATED\tCOMMENT", func(row func(string, ...any)) {
		for _, s := range all {
			row("%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s", s.ID, dash(s.Name), dash(first(s.Spec.Name, string(s.Sandbox))), s.Kind, size(s.SizeBytes), s.Files, ago(s.CreatedAt), dash(clip(oneLine(s.Comment), 40)))
		}
	})
}

func first(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// oneLine is a text of several lines as one.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

func (c *cli) snapshotInspectCmd() *cobra.Command {
	return &cobra.Command{
		Use: "inspect SNAPSHOT", Short: "Show everything about a snapshot", Example: "  sandbox snapshot inspect before-upgrade", Args: cobra.ExactArgs(1),
		ValidArgsFunction: c.completeSnapshot,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.SnapshotOf(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if c.output == "table" {
				c.output = "yaml"
			}
			return c.show(s, nil)
		},
	}
}

func (c *cli) snapshotRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm SNAPSHOT…", Short: "Forget snapshots", Example: "  sandbox snapshot rm before-upgrade", Args: cobra.MinimumNArgs(1),
		Long:              "Forget snapshots. Sandboxes made of them stay as they are; the space is freed with the last that needs it.",
		ValidArgsFunction: c.completeSnapshot,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(ref string) error {
				s, err := cl.RemoveSnapshot(cmd.Context(), ref)
				if err != nil {
					return err
				}
				return c.showLine(s, "%s", s.ID)
			})
		},
	}
}

// maxDiff is how many changes are shown unless asked otherwise.
const maxDiff = 10000

func (c *cli) diffCmd() *cobra.Command {
	limit := maxDiff
	cmd := &cobra.Command{
		Use: "diff [flags] [FROM] TO", Short: "Show how files differ",
		Long: `Show which files were added (A), changed (C) or removed (R) from one state to another.
TO is a snapshot or a living sandbox; FROM is a snapshot, or, left out, what TO
began with. Only what was written since they parted is looked at.`,
		Example: `  sandbox snapshot diff dev                 # since it was created
  sandbox snapshot diff before-upgrade dev`,
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: c.completeSnapshot,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			if limit < 1 {
				return usage("--limit %d: use 1 or more", limit)
			}
			from, to := "", args[0]
			if len(args) == 2 {
				from, to = args[0], args[1]
			}
			all, more, err := cl.Diff(cmd.Context(), from, to, limit)
			if err != nil {
				return err
			}
			if more {
				c.complain(fmt.Errorf("there are more than %d changes: --limit shows more", limit))
			}
			return c.show(all, func(w printer) error {
				for _, ch := range all {
					if err := w.printf("%.1s %s\n", strings.ToUpper(string(ch.Kind)), quoted(ch.Path)); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", maxDiff, "at most this many changes")
	return cmd
}

// quoted is a path fit for a terminal: one with control characters in it is
// written as a Go string.
func quoted(path string) string {
	if q := strconv.Quote(path); q != `"`+path+`"` && plain(path) != path {
		return q
	}
	return path
}

func (c *cli) forkCmd() *cobra.Command {
	var req sandbox.ForkRequest
	var env, labels, volumes []string
	var noVolumes bool
	var nf netFlags
	cmd := &cobra.Command{
		Use: "fork [flags] SNAPSHOT|SANDBOX", Short: "Make sandboxes that begin with frozen files",
		Long: `Make sandboxes that begin with the files of a snapshot, or of a sandbox as it is now,
with the same image, environment, limits, network policy and volumes. They share what
they do not write, and their volumes: give each its own, or none, to keep them apart.
Network flags say the whole policy, in place of the snapshot's.`,
		Example: `  sandbox fork dev --name try
  sandbox fork before-upgrade -n 100 --name worker`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeSnapshot,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if req.Count < 1 {
				return usage("--count %d: use 1 or more", req.Count)
			}
			if req.Env, err = parseEnv(env, os.Getenv); err != nil {
				return err
			}
			if len(labels) > 0 {
				if req.Labels, err = parseLabels(labels); err != nil {
					return err
				}
			}
			if noVolumes || len(volumes) > 0 {
				mounts, err := parseMounts(volumes)
				if err != nil {
					return err
				}
				if mounts = append([]sandbox.VolumeMount{}, mounts...); noVolumes && len(mounts) > 0 {
					return usage("either --volume or --no-volumes")
				}
				req.Volumes = &mounts
			}
			if nf.given() {
				p, err := nf.over(sandbox.NetworkPolicy{}, c.in)
				if err != nil {
					return err
				}
				req.Network = &p
			}
			cl, err := c.persistent(&req.IdempotencyKey)
			if err != nil {
				return err
			}
			made, err := cl.Fork(cmd.Context(), args[0], req)
			if err != nil {
				return err
			}
			var failed error
			for _, f := range made {
				if f.Sandbox == nil {
					c.complain(fmt.Errorf("%s (%s)", f.Error, f.Code))
					failed = exitError(exitTrouble)
					continue
				}
				if err := c.showLine(f.Sandbox, "%s", f.Sandbox.ID); err != nil {
					return err
				}
			}
			return failed
		},
	}
	fl := cmd.Flags()
	fl.IntVarP(&req.Count, "count", "n", 1, "how many")
	fl.StringVar(&req.Name, "name", "", "name; of several, NAME-1, NAME-2, …")
	fl.StringArrayVarP(&env, "env", "e", nil, "variable laid over those of the snapshot: K=V; repeatable")
	fl.StringArrayVarP(&labels, "label", "l", nil, "label in place of those of the snapshot: k=v; repeatable")
	fl.StringArrayVarP(&volumes, "volume", "v", nil, "mount in place of those of the snapshot, as with 'sandbox run'; repeatable")
	fl.BoolVar(&noVolumes, "no-volumes", false, "mount none")
	_ = cmd.RegisterFlagCompletionFunc("volume", c.completeMount) // the flag was just added
	nf.add(cmd)
	addKey(cmd, &req.IdempotencyKey)
	fl.BoolVar(&req.NeedsAll, "all-or-none", false, "where one cannot be made, remove the others again")
	return cmd
}

func (c *cli) branchCmd() *cobra.Command {
	cmd := c.forkCmd()
	cmd.Use, cmd.Short = "branch [flags] POINT", "Go on from a restore point in another sandbox"
	cmd.Long = `Make a sandbox that goes on from a restore point ('sandbox log' shows them), while the
one it is of stays as it is. The same as 'sandbox fork'.`
	cmd.Example = "  sandbox branch sn4k2 --name other-way"
	return cmd
}

func (c *cli) rollbackCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rollback SANDBOX SNAPSHOT", Short: "Put a sandbox back on a snapshot's files, in place",
		Long: `Put a sandbox back on the files of a snapshot. What was written since is gone, and its
processes are killed. Id, address, name, limits and deadline stay.`,
		Example: "  sandbox rollback dev before-upgrade", Args: cobra.ExactArgs(2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return c.completeSandbox(cmd, args, word)
			}
			return c.completeSnapshot(cmd, args, word)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			sb, err := cl.Rollback(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return c.showLine(sb, "%s", sb.ID)
		},
	}
}

func (c *cli) undoCmd() *cobra.Command {
	return &cobra.Command{
		Use: "undo SANDBOX [N]", Short: "Put a sandbox back by one or more restore points",
		Long: `Undo the last N changes of a sandbox's files, 1 if left out. What changed since the
last snapshot counts as one; then each snapshot before it; the files it began with
are the last. With --auto-snapshot at its creation, each command that changed files
is one. Processes are killed.`,
		Example: "  sandbox undo dev\n  sandbox undo dev 3", Args: cobra.RangeArgs(1, 2), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			steps := 1
			if len(args) == 2 {
				n, err := strconv.Atoi(args[1])
				if err != nil || n < 1 {
					return usage("%q is no number of steps: use 1 or more", args[1])
				}
				steps = n
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			sb, err := cl.Undo(cmd.Context(), args[0], steps)
			if err != nil {
				return err
			}
			return c.showLine(sb, "%s", sb.ID)
		},
	}
}

func (c *cli) logCmd() *cobra.Command {
	return &cobra.Command{
		Use: "log SANDBOX", Short: "Show the restore points a sandbox can go back to",
		Long:    "Show the snapshots a sandbox's files came through, newest first. 'sandbox undo' goes back, 'sandbox branch' goes on from one elsewhere.",
		Example: "  sandbox log dev", Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			h, err := cl.History(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.show(h, func(w printer) error { return historyTable(w, h) })
		},
	}
}

func historyTable(w printer, h sandbox.History) error {
	return columns(w, "UNDO\tPOINT\tKIND\tCREATED\tCOMMENT", func(row func(string, ...any)) {
		step := 0
		next := func() string { step++; return strconv.Itoa(step) }
		if h.Changed {
			row("-\t(now)\t\t\tchanged since")
		}
		for i, p := range h.Points {
			n := "-"
			if i > 0 || h.Changed {
				n = next()
			}
			row("%s\t%s\t%s\t%s\t%s", n, p.ID, p.Kind, ago(p.CreatedAt), dash(clip(oneLine(p.Comment), 60)))
		}
		n := "-"
		if len(h.Points) > 0 || h.Changed {
			n = next()
		}
		row("%s\t(first)\t\t\twhat it began with", n)
	})
}

func (c *cli) resetCmd() *cobra.Command {
	var only []string
	cmd := c.moveCmd("reset", "Give a sandbox its first files again",
		`Kill every process of a sandbox and give it the files it began with again: those of
its image, or of the snapshot it was made of. What was written in it is gone. Id,
address, name, limits and deadline stay.

With --only, just these paths get their first content again, what was not there
then is removed, and processes go on.`,
		"  sandbox reset dev\n  sandbox reset dev --only /etc --only /srv/data", (*client.Client).Reset)
	whole := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(only) == 0 {
			return whole(cmd, args)
		}
		cl, err := c.client()
		if err != nil {
			return err
		}
		return each(c, args, func(ref string) error {
			sb, err := cl.ResetPaths(cmd.Context(), ref, only...)
			if err != nil {
				return err
			}
			return c.showLine(sb, "%s", sb.ID)
		})
	}
	cmd.Flags().StringArrayVar(&only, "only", nil, "reset this path only; repeatable")
	return cmd
}

func (c *cli) snapshotExportCmd() *cobra.Command {
	return &cobra.Command{
		Use: "export SNAPSHOT [FILE]", Short: "Write a snapshot as an archive for another host",
		Long: `Write a snapshot, with the layers it stands on, as a tar archive that 'sandbox snapshot
import' takes; to standard output if FILE is - or absent. For an image of it, see
'sandbox image export'. Sockets and device nodes are left out.`,
		Example: "  sandbox snapshot export before-upgrade | ssh other sandbox snapshot import", Args: cobra.RangeArgs(1, 2),
		ValidArgsFunction: c.completeSnapshot,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			out := c.out
			if len(args) == 2 && args[1] != "-" {
				f, cerr := os.Create(args[1])
				if cerr != nil {
					return cerr
				}
				defer func() {
					if err = errors.Join(err, f.Close()); err != nil {
						_ = os.Remove(args[1]) // half of an archive is none
					}
				}()
				out = f
			} else if isTerminal(c.out) {
				return usage("standard output is a terminal: name a file, or pipe it somewhere")
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			r, err := cl.ExportSnapshot(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			_, err = io.Copy(out, r)
			return errors.Join(err, r.Close())
		},
	}
}

func (c *cli) snapshotImportCmd() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "import [flags] [FILE]", Short: "Make a snapshot of an exported one",
		Long:    "Make a snapshot of the archive 'sandbox snapshot export' wrote, here or on another host; from standard input if FILE is - or absent.",
		Example: "  sandbox snapshot import --name carried snapshot.tar", Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			src := c.in
			if len(args) == 1 && args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer func() { _ = f.Close() }() // read only
				src = f
			} else if isTerminal(c.in) {
				return usage("standard input is a terminal: name the archive, or pipe it in")
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.ImportSnapshot(cmd.Context(), name, src)
			if err != nil {
				return err
			}
			return c.showLine(s, "%s", s.ID)
		},
	}
	cmd.Flags().StringVarP(&name, "name", "n", "", "name, unique among snapshots; the one it had if not given")
	return cmd
}
