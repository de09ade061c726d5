package main

import (
	"io"
	"os"

	"github.com/spf13/cobra"
)

func (c *cli) imageCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Manage images",
		Long: "An image is what a sandbox's files begin as. 'host' is this machine's own system, read-only.",
	}
	cmd.AddCommand(c.imageImportCmd(), c.imageLsCmd(), c.imageInspectCmd(), c.imageRmCmd())
	return cmd
}

func (c *cli) imageImportCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "import NAME [FILE]",
		Short: "Make an image of a tar archive",
		Long: `Make an image of a root file system in a tar archive, plain or compressed; from
standard input if FILE is - or absent. An image of the same name is replaced;
sandboxes made of the old one keep it.`,
		Example: `  sandbox image import debian:12 rootfs.tar.zst
  debootstrap --variant=minbase bookworm root && tar c -C root . | sandbox image import debian:12`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			src := c.in
			if len(args) == 2 && args[1] != "-" {
				f, err := os.Open(args[1])
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
			img, err := cl.ImportImage(cmd.Context(), args[0], src)
			if err != nil {
				return err
			}
			return c.show(img, func(w io.Writer) error { return line(w, img.Name+"  "+img.Digest+"  "+size(img.SizeBytes)) })
		},
	}
}

func (c *cli) imageLsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the images", Example: "  sandbox image ls", Args: cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			images, err := cl.Images(cmd.Context())
			if err != nil {
				return err
			}
			return c.show(images, func(w io.Writer) error {
				return columns(w, "NAME\tKIND\tDIGEST\tSIZE\tFILES\tCREATED", func(row func(string, ...any)) {
					for _, i := range images {
						row("%s\t%s\t%s\t%s\t%d\t%s", i.Name, i.Kind, clip(i.Digest, 20), size(i.SizeBytes), i.Files, ago(i.CreatedAt))
					}
				})
			})
		},
	}
}

func (c *cli) imageInspectCmd() *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Show everything about an image", Example: "  sandbox image inspect host", Args: cobra.ExactArgs(1),
		ValidArgsFunction: c.completeImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			img, err := cl.Image(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if c.output == "table" {
				c.output = "yaml"
			}
			return c.show(img, nil)
		},
	}
}

func (c *cli) imageRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME…", Short: "Remove images", Example: "  sandbox image rm debian:12", Args: cobra.MinimumNArgs(1),
		Long:              "Remove images. Sandboxes made of them keep what they need; the space is freed with the last.",
		ValidArgsFunction: c.completeImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(name string) error { return cl.RemoveImage(cmd.Context(), name) })
		},
	}
}
