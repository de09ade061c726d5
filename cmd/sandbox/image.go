package main

import (
	"github.com/spf13/cobra"
)

func (c *cli) imageCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Manage images",
		Long: `An image is what a sandbox's files begin as. 'host' is this machine's own system,
read-only; others come from registries, archives and OCI layouts, or are built.

Names are local, or say where an image came from. A short name means what docker
means by it where no image has it as it is: alpine is docker.io/library/alpine:latest.`,
	}
	cmd.AddCommand(c.imageBuildCmd(), c.imagePullCmd(), c.imagePushCmd(), c.imageImportCmd(), c.imageExportCmd(), c.imageLsCmd(), c.imageInspectCmd(),
		c.imageTagCmd(), c.imageRmCmd(), c.imagePruneCmd())
	return cmd
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
			return c.show(images, func(w printer) error {
				return columns(w, "NAME\tKIND\tDIGEST\tSIZE\tFILES\tCREATED", func(row func(string, ...any)) {
					for _, i := range images {
						row("%s\t%s\t%s\t%s\t%d\t%s", i.Name, i.Kind, clip(i.Digest, 19), size(i.SizeBytes), i.Files, ago(i.CreatedAt))
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
