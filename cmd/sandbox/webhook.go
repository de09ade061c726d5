package main

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) webhookCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "webhook", Short: "Manage webhooks: who is told of events by HTTP",
		Long: `A webhook gets the events it asks for as a signed POST: each at least once, those of
one sandbox in order. A receiver that does not answer is tried again, less and less
often, for a day; one that refuses an event, ten times. What is given up is kept as a
dead letter. Addresses that are not public must be permitted in the daemon's
configuration (webhooks.allow_private).`,
	}
	dead := &cobra.Command{Use: "dead", Short: "Look at events that were given up, and try them again"}
	dead.AddCommand(c.webhookDeadLsCmd(), c.webhookDeadRetryCmd())
	cmd.AddCommand(c.webhookCreateCmd(), c.webhookLsCmd(), c.webhookRmCmd(), c.webhookTestCmd(), dead)
	return cmd
}

func (c *cli) webhookCreateCmd() *cobra.Command {
	var req sandbox.WebhookRequest
	var of, secretFile string
	var labels []string
	cmd := &cobra.Command{
		Use: "create [flags] URL", Short: "Have events posted to a URL from now on",
		Long: `Have events posted to a URL from now on. The secret of the signatures is printed
this once; Sandboxd-Signature holds 't=SECONDS,v1=HEX', the HMAC-SHA256 of
'SECONDS.BODY' under it.`,
		Example: `  sandbox webhook create https://ci.example.com/hook --events 'sandbox.*,process.exited'
  sandbox webhook create https://ops.example.com/hook --label team=search
  sandbox webhook create https://ops.example.com/hook --sandbox dev --secret-file key`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			req.URL = args[0]
			if secretFile != "" {
				if req.Secret, err = c.readSecret(secretFile); err != nil {
					return err
				}
			}
			for _, l := range labels {
				k, v, ok := strings.Cut(l, "=")
				if !ok || k == "" {
					return usage("--label %q: use KEY=VALUE", l)
				}
				if req.Filter.Labels == nil {
					req.Filter.Labels = map[string]string{}
				}
				req.Filter.Labels[k] = v
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			if of != "" {
				sb, err := cl.Sandbox(cmd.Context(), of)
				if err != nil {
					return err
				}
				req.Filter.Sandbox = sb.ID
			}
			if err := req.Validate(); err != nil {
				return err
			}
			w, err := cl.CreateWebhook(cmd.Context(), req)
			if err != nil {
				return err
			}
			return c.show(w, func(out printer) error { return out.printf("%s\nsecret: %s\n", w.ID, w.Secret) })
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&req.Filter.Events, "events", nil, "only these types, with * for any characters, as 'sandbox.*'; repeatable")
	f.StringVar(&of, "sandbox", "", "only of this sandbox")
	f.StringVar(&req.Filter.Owner, "owner", "", "only of sandboxes of this owner")
	f.StringArrayVar(&labels, "label", nil, "only of sandboxes with this label, as KEY=VALUE; repeatable")
	f.StringVar(&secretFile, "secret-file", "", "read the secret from this file; without it one is drawn")
	return cmd
}

func (c *cli) webhookLsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the webhooks, and how they do", Args: cobra.NoArgs,
		Example: "  sandbox webhook ls", ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.Webhooks(cmd.Context())
			if err != nil {
				return err
			}
			return c.show(all, func(out printer) error {
				return columns(out, "ID\tURL\tEVENTS\tOWNER\tWAITING\tDEAD\tLAST ERROR", func(row func(string, ...any)) {
					for _, w := range all {
						events := "all"
						if len(w.Filter.Events) > 0 {
							events = strings.Join(w.Filter.Events, ",")
						}
						owner := w.Owner
						if w.Project != "" {
							owner = w.Project
						}
						row("%s\t%s\t%s\t%s\t%d\t%d\t%s", w.ID, clip(w.URL, 60), clip(events, 40), dash(owner), w.Waiting, w.Dead, dash(w.LastError))
					}
				})
			})
		},
	}
}

func (c *cli) webhookRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm WEBHOOK…", Short: "Forget webhooks, with what they were still to be told", Example: "  sandbox webhook rm wh2ab3cd4ef5gh",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(id string) error { return cl.RemoveWebhook(cmd.Context(), id) })
		},
	}
}

func (c *cli) webhookTestCmd() *cobra.Command {
	return &cobra.Command{
		Use: "test WEBHOOK", Short: "Send one message now, and tell what the receiver said", Example: "  sandbox webhook test wh2ab3cd4ef5gh",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			r, err := cl.TestWebhook(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if err := c.showDeliveries([]sandbox.Delivery{r}); err != nil {
				return err
			}
			return undelivered([]sandbox.Delivery{r})
		},
	}
}

func (c *cli) webhookDeadLsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "ls WEBHOOK", Aliases: []string{"list"}, Short: "List the events that were given up", Example: "  sandbox webhook dead ls wh2ab3cd4ef5gh",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.DeadLetters(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.show(all, func(out printer) error {
				return columns(out, "SEQ\tTYPE\tSANDBOX\tHAPPENED\tTRIES\tERROR", func(row func(string, ...any)) {
					for _, l := range all {
						row("%d\t%s\t%s\t%s\t%d\t%s", l.Event.Seq, l.Event.Type, dash(string(l.Event.Sandbox)), ago(l.Event.Time), l.Attempts, l.Error)
					}
				})
			})
		},
	}
}

func (c *cli) webhookDeadRetryCmd() *cobra.Command {
	return &cobra.Command{
		Use: "retry WEBHOOK [SEQ…]", Short: "Try events that were given up once more, now",
		Long: "Try events that were given up once more: those named by their numbers or, without\nany, the oldest hundred. Those that are taken leave the list.",
		Example: `  sandbox webhook dead retry wh2ab3cd4ef5gh
  sandbox webhook dead retry wh2ab3cd4ef5gh 4711`,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			var seqs []int64
			for _, a := range args[1:] {
				n, err := strconv.ParseInt(a, 10, 64)
				if err != nil {
					return usage("%q is no number of an event: 'sandbox webhook dead ls' shows them", a)
				}
				seqs = append(seqs, n)
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.RetryDeadLetters(cmd.Context(), args[0], seqs...)
			if err != nil {
				return err
			}
			if err := c.showDeliveries(all); err != nil {
				return err
			}
			return undelivered(all)
		},
	}
}

func (c *cli) showDeliveries(all []sandbox.Delivery) error {
	return c.show(all, func(out printer) error {
		return columns(out, "MESSAGE\tTYPE\tSTATUS\tTOOK\tERROR", func(row func(string, ...any)) {
			for _, r := range all {
				row("%s\t%s\t%d\t%d ms\t%s", r.ID, r.Type, r.Status, r.TookMS, dash(r.Error))
			}
		})
	})
}

// undelivered is an error where an attempt failed.
func undelivered(all []sandbox.Delivery) error {
	n := 0
	for _, r := range all {
		if !r.OK {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return sandbox.Errorf(sandbox.ErrUnavailable, "not_delivered", "%d of %d were not taken by the receiver", n, len(all))
}
