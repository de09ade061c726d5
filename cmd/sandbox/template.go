package main

import (
	"strconv"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) templateCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "template", Short: "Name what sandboxes are made of, for clients of the E2B SDK",
		Long: `A template is a name for an image or a snapshot, with the limits its sandboxes
have. Clients of the E2B SDK create sandboxes by template; 'base' is the one they
mean when they name none. Your own come before those others share with you.`,
	}
	cmd.AddCommand(c.templateSetCmd(), c.templateLsCmd(), c.templateRmCmd())
	return cmd
}

func (c *cli) templateSetCmd() *cobra.Command {
	var (
		req          sandbox.TemplateRequest
		memory, disk sizeFlag
	)
	cmd := &cobra.Command{
		Use: "set [flags] NAME IMAGE|SNAPSHOT", Short: "Make a template, or change one",
		Long: `Make a template of an image or a snapshot, or have one mean something else. Limits
that are left out are the daemon's defaults. Sandboxes that exist stay as they are.`,
		Example: `  sandbox template set base debian:12
  sandbox template set base base --cpus 2 --memory 1g --disk 5g
  sandbox template set --private mine sn4qkq2m3v7abc`,
		Args: cobra.ExactArgs(2), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Name, req.Source = args[0], args[1]
			req.Limits.MemoryBytes, req.Limits.DiskBytes = int64(memory), int64(disk)
			if err := req.Validate(); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			t, err := cl.SetTemplate(cmd.Context(), req)
			if err != nil {
				return err
			}
			return c.showLine(t, "%s", t.Name)
		},
	}
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.Float64Var(&req.Limits.CPUs, "cpus", 0, "CPU cores, as 0.5 or 2")
	fl.Var(&memory, "memory", "memory, as 512m or 2g")
	fl.Var(&disk, "disk", "bytes it may write, as 2g")
	fl.Int64Var(&req.Limits.PIDs, "pids", 0, "processes and threads at one time")
	fl.BoolVar(&req.Private, "private", false, "for you alone; others see it otherwise, if you are an operator")
	return cmd
}

func (c *cli) templateLsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List your templates and the shared ones", Example: "  sandbox template ls",
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.Templates(cmd.Context())
			if err != nil {
				return err
			}
			return c.show(all, func(w printer) error {
				return columns(w, "NAME\tOF\tCPUS\tMEMORY\tDISK\tOWNER\tSHARED\tCHANGED", func(row func(string, ...any)) {
					for _, t := range all {
						row("%s\t%s\t%s\t%s\t%s\t%s\t%v\t%s", t.Name, t.Image+string(t.Snapshot), limitText(t.Limits.CPUs),
							sizeText(t.Limits.MemoryBytes), sizeText(t.Limits.DiskBytes), dash(t.Owner), !t.Private, ago(t.UpdatedAt))
					}
				})
			})
		},
	}
}

func limitText(n float64) string {
	if n == 0 {
		return "-"
	}
	return strconv.FormatFloat(n, 'g', -1, 64)
}

func sizeText(n int64) string {
	if n == 0 {
		return "-"
	}
	return units.BytesSize(float64(n))
}

func (c *cli) templateRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME…", Short: "Forget templates of yours", Long: "Forget templates of yours. The images, snapshots and sandboxes stay.",
		Example: "  sandbox template rm mine", Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(name string) error {
				if err := cl.RemoveTemplate(cmd.Context(), name); err != nil {
					return err
				}
				return line(c.printer(c.out), name)
			})
		},
	}
}
