package main

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) volumeCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "volume", Short: "Manage volumes: directories that outlive sandboxes",
		Long: `A volume is a directory with a name and limits of its own. A sandbox mounts it
('sandbox run -v NAME:/path'), and it stays when the sandbox is gone. Sandboxes
may share one. Snapshots and resets leave what is in volumes alone.`,
	}
	cmd.AddCommand(c.volumeCreateCmd(), c.volumeLsCmd(), c.volumeInspectCmd(), c.volumeSetCmd(), c.volumeRmCmd())
	return cmd
}

func (c *cli) volumeCreateCmd() *cobra.Command {
	var req sandbox.VolumeRequest
	var most sizeFlag
	var labels []string
	cmd := &cobra.Command{
		Use: "create [flags] NAME", Short: "Make a volume",
		Long: `Make an empty volume. Its directory belongs to root inside, who can give it to
another user. Limits that are not given are those a sandbox's own disk has by
default.`,
		Example: `  sandbox volume create cache --size 10g --inodes 500000
  sandbox run --rm -v cache:/v -- chown 1000:1000 /v
  sandbox run --rm -u 1000:1000 -v cache:/home/user/.cache -- make`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Name, req.SizeBytes = args[0], int64(most)
			var err error
			if req.Labels, err = parseLabels(labels); err != nil {
				return err
			}
			if err := req.Validate(); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			v, err := cl.CreateVolume(cmd.Context(), req)
			if err != nil {
				return err
			}
			return c.show(v, func(w printer) error { return line(w, v.Name) })
		},
	}
	addVolumeLimits(cmd, &most, &req.Inodes)
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "label k=v to find it by; repeatable")
	return cmd
}

func addVolumeLimits(cmd *cobra.Command, most *sizeFlag, inodes *int64) {
	cmd.Flags().Var(most, "size", "bytes it may hold, as 10g; 0 is the daemon's default")
	cmd.Flags().Int64Var(inodes, "inodes", 0, "files it may hold; 0 is the daemon's default")
}

func (c *cli) volumeSetCmd() *cobra.Command {
	var most sizeFlag
	var inodes int64
	cmd := &cobra.Command{
		Use: "set [flags] NAME", Short: "Change a volume's limits",
		Long:    "Change a volume's limits, at once also for the sandboxes that use it. 0 means the daemon's\ndefault. What it holds beyond a lower limit stays; nothing can be added then.",
		Example: "  sandbox volume set cache --size 20g", Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeVolume,
		RunE: func(cmd *cobra.Command, args []string) error {
			var ch sandbox.VolumeChange
			if cmd.Flags().Changed("size") {
				n := int64(most)
				ch.SizeBytes = &n
			}
			if cmd.Flags().Changed("inodes") {
				ch.Inodes = &inodes
			}
			if ch.SizeBytes == nil && ch.Inodes == nil {
				return usage("nothing to change: give --size or --inodes")
			}
			if err := ch.Validate(); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			v, err := cl.ChangeVolume(cmd.Context(), args[0], ch)
			if err != nil {
				return err
			}
			return c.show(v, func(w printer) error { return line(w, v.Name) })
		},
	}
	addVolumeLimits(cmd, &most, &inodes)
	return cmd
}

func (c *cli) volumeLsCmd() *cobra.Command {
	var quiet bool
	var labels []string
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"}, Short: "List the volumes", Args: cobra.NoArgs,
		Example: `  sandbox volume ls
  sandbox volume ls -q -l team=infra`,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			want, err := parseLabels(labels)
			if err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			volumes, err := cl.Volumes(cmd.Context())
			if err != nil {
				return err
			}
			volumes = slices.DeleteFunc(volumes, func(v sandbox.Volume) bool {
				for k, value := range want {
					if got, ok := v.Labels[k]; !ok || got != value {
						return true
					}
				}
				return false
			})
			if quiet {
				return names(c, volumes, func(v sandbox.Volume) string { return v.Name })
			}
			return c.show(volumes, func(w printer) error { return volumeTable(w, volumes) })
		},
	}
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "names only")
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "only those with label k=v; repeatable")
	return cmd
}

func volumeTable(w printer, volumes []sandbox.Volume) error {
	return columns(w, "NAME\tUSED\tSIZE\tFILES\tMAX FILES\tSANDBOXES\tCREATED", func(row func(string, ...any)) {
		for _, v := range volumes {
			used, files, most := size(v.UsedBytes), strconv.FormatUint(v.UsedInodes, 10), "-"
			if v.Uncounted {
				used, files = "?", "?"
			}
			if v.Inodes > 0 {
				most = strconv.FormatInt(v.Inodes, 10)
			}
			name := v.Name
			if v.Status != sandbox.VolumeReady {
				name += " (" + string(v.Status) + ")"
			}
			row("%s\t%s\t%s\t%s\t%s\t%d\t%s", name, used, size(v.SizeBytes), files, most, len(v.UsedBy), ago(v.CreatedAt))
		}
	})
}

func (c *cli) volumeInspectCmd() *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Show everything about a volume, and who uses it", Example: "  sandbox volume inspect cache", Args: cobra.ExactArgs(1),
		ValidArgsFunction: c.completeVolume,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			v, err := cl.Volume(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if c.output == "table" {
				c.output = "yaml"
			}
			return c.show(v, nil)
		},
	}
}

func (c *cli) volumeRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME…", Short: "Delete volumes and all they hold", Example: "  sandbox volume rm cache", Args: cobra.MinimumNArgs(1),
		Long:              "Delete volumes and all they hold. One that a living sandbox mounts, a stopped one too, is refused.",
		ValidArgsFunction: c.completeVolume,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(name string) error { return cl.RemoveVolume(cmd.Context(), name) })
		},
	}
}

// completeVolume offers the names of volumes.
func (c *cli) completeVolume(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return c.volumeNames(""), cobra.ShellCompDirectiveNoFileComp
}

// completeMount offers the names of volumes as the beginning of a mount.
func (c *cli) completeMount(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return c.volumeNames(":/"), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

func (c *cli) volumeNames(suffix string) []string {
	cl, err := c.client()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	volumes, err := cl.Volumes(ctx)
	if err != nil {
		return nil
	}
	var words []string
	for _, v := range volumes {
		words = append(words, v.Name+suffix)
	}
	return words
}

// parseMounts reads NAME:/path[:ro] and /host/dir:/path[:rw]. A directory of
// the host is read-only where nothing is said: to write to it is to write to
// the host.
func parseMounts(args []string) ([]sandbox.VolumeMount, error) {
	var mounts []sandbox.VolumeMount
	for _, arg := range args {
		parts := strings.Split(arg, ":")
		if len(parts) < 2 || len(parts) > 3 || parts[0] == "" {
			return nil, usage("--volume %q: use NAME:/path, NAME:/path:ro or /host/dir:/path:rw", arg)
		}
		m := sandbox.VolumeMount{Volume: parts[0], Path: parts[1]}
		mode := ""
		if len(parts) == 3 {
			if mode = parts[2]; mode != "ro" && mode != "rw" {
				return nil, usage("--volume %q: end it with :ro or :rw, or neither", arg)
			}
		}
		if strings.HasPrefix(parts[0], "/") {
			m.Volume, m.HostPath = "", parts[0]
			m.ReadOnly, m.Writable = mode != "rw", mode == "rw"
		} else {
			m.ReadOnly = mode == "ro"
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}
