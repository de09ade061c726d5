package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
)

func (c *cli) operationCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "operation", Aliases: []string{"op"}, Short: "Look at work that takes long, wait for it, cancel it",
		Long: `Pulls, pushes and builds are operations while they last, and for a day after. Those
begun with --detach go on by themselves. With the daemon they end, and are forgotten:
whatever one was to make is there whole then, or not at all.`,
	}
	cmd.AddCommand(c.operationLsCmd(), c.operationWaitCmd(), c.operationCancelCmd())
	return cmd
}

// began tells of an operation that goes on by itself.
func (c *cli) began(o api.Operation, err error) error {
	if err != nil {
		return err
	}
	return c.show(o, func(w printer) error { return line(w, o.ID) })
}

func (c *cli) operationLsCmd() *cobra.Command {
	var status string
	cmd := &cobra.Command{
		Use: "ls [flags]", Short: "List operations: under way, and ended in the last day", Example: "  sandbox operation ls --status running",
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.Operations(cmd.Context(), api.OperationStatus(status))
			if err != nil {
				return err
			}
			return c.show(all, func(out printer) error {
				return columns(out, "ID\tKIND\tOF\tOWNER\tSTATUS\tTOOK\tWHY", func(row func(string, ...any)) {
					for _, o := range all {
						end, why := time.Now(), ""
						if o.EndedAt != nil {
							end = *o.EndedAt
						}
						if o.Problem != nil {
							why = o.Problem.Detail
						}
						row("%s\t%s\t%s\t%s\t%s\t%s\t%s", o.ID, o.Kind, dash(clip(o.Subject, 60)), o.Owner, o.Status,
							end.Sub(o.CreatedAt).Round(time.Second), dash(clip(why, 80)))
					}
				})
			})
		},
	}
	cmd.Flags().StringVar(&status, "status", "", "only running, succeeded, failed or cancelled ones")
	return cmd
}

func (c *cli) operationWaitCmd() *cobra.Command {
	return &cobra.Command{
		Use: "wait OPERATION", Short: "Wait until an operation has ended; fails if that did", Example: "  sandbox operation wait op2ab3cd4ef5gh",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			o, err := cl.WaitOperation(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if o.Problem != nil {
				return o.Problem.Err()
			}
			return c.show(o, func(w printer) error { return line(w, string(o.Status)) })
		},
	}
}

func (c *cli) operationCancelCmd() *cobra.Command {
	return &cobra.Command{
		Use: "cancel OPERATION…", Short: "Cancel operations", Example: "  sandbox operation cancel op2ab3cd4ef5gh",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(id string) error {
				_, err := cl.CancelOperation(cmd.Context(), id)
				return err
			})
		},
	}
}
