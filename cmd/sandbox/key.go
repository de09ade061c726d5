package main

import (
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// plainCmd is a command that takes a client.
func (c *cli) plainCmd(cmd *cobra.Command, run func(cmd *cobra.Command, cl *client.Client, args []string) error) *cobra.Command {
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cl, err := c.client()
		if err != nil {
			return err
		}
		return run(cmd, cl, args)
	}
	return cmd
}

func (c *cli) whoamiCmd() *cobra.Command {
	return c.plainCmd(&cobra.Command{
		Use: "whoami", Short: "Show who the daemon takes you for", Args: cobra.NoArgs, Example: "  sandbox whoami",
	}, func(cmd *cobra.Command, cl *client.Client, _ []string) error {
		who, err := cl.Whoami(cmd.Context())
		if err != nil {
			return err
		}
		return c.show(who, func(w printer) error {
			return w.printf("owner  %s\nrole   %s\nkey    %s\nfrom   %s\nquota  %s\n", who.Owner, who.Role, dash(who.Key), who.From, quotaWords(who.Quota))
		})
	})
}

func (c *cli) keyCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "key", Short: "Manage API keys: make, list, revoke",
		Long: `An API key lets its holder use the daemon over TLS as its owner, with at most the
owner's role. Give it as SANDBOX_KEY, with SANDBOX_HOST=https://… and SANDBOX_CA.
Administrators alone manage keys; root on the daemon's machine is one.`,
	}
	cmd.AddCommand(c.keyCreateCmd(), c.keyLsCmd(), c.keyRevokeCmd())
	return cmd
}

func (c *cli) keyCreateCmd() *cobra.Command {
	var req api.KeyRequest
	var role string
	var expires time.Duration
	cmd := c.plainCmd(&cobra.Command{
		Use: "create [flags] OWNER", Short: "Make an API key and print it, this once", Args: cobra.ExactArgs(1),
		Long: `Make an API key and print it. Nobody can read it again: keep it now. An owner that is
not there is made, with the usual quota of the role.`,
		Example: `  sandbox key create alice
  sandbox key create ci --role developer --name 'build farm' --expires 720h`,
	}, func(cmd *cobra.Command, cl *client.Client, args []string) error {
		req.Owner, req.Role = args[0], access.Role(role)
		if expires < 0 {
			return usage("--expires %s: use a time to come, as 720h", expires)
		}
		if expires > 0 {
			at := time.Now().Add(expires).UTC().Truncate(time.Second)
			req.ExpiresAt = &at
		}
		k, err := cl.CreateKey(cmd.Context(), req)
		if err != nil {
			return err
		}
		return c.show(k, func(w printer) error {
			c.say("%s of %s, %s; the key is shown this once:\n", k.ID, k.Owner, k.Role)
			return line(w, k.Secret)
		})
	})
	f := cmd.Flags()
	f.StringVar(&role, "role", "", "admin, operator, developer or viewer; the owner's when absent, of a new owner developer")
	f.StringVar(&req.Name, "name", "", "a name for people")
	f.DurationVar(&expires, "expires", 0, "let it work this long, as 720h; without, until it is revoked")
	return cmd
}

func (c *cli) keyLsCmd() *cobra.Command {
	var owner string
	var all bool
	cmd := c.plainCmd(&cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the API keys", Args: cobra.NoArgs, Example: "  sandbox key ls --owner alice",
	}, func(cmd *cobra.Command, cl *client.Client, _ []string) error {
		keys, err := cl.Keys(cmd.Context(), owner)
		if err != nil {
			return err
		}
		shown := []access.Key{}
		for _, k := range keys {
			if all || keyState(k) == "good" {
				shown = append(shown, k)
			}
		}
		return c.show(shown, func(w printer) error {
			return columns(w, "ID\tOWNER\tROLE\tBEGINS\tNAME\tCREATED\tUSED\tSTATE", func(row func(string, ...any)) {
				for _, k := range shown {
					used := "never"
					if k.UsedAt != nil {
						used = ago(*k.UsedAt)
					}
					row("%s\t%s\t%s\t%s…\t%s\t%s\t%s\t%s", k.ID, k.Owner, k.Role, k.Begins, dash(k.Name), ago(k.CreatedAt), used, keyState(k))
				}
			})
		})
	})
	cmd.Flags().StringVar(&owner, "owner", "", "only of this owner")
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also those that work no longer")
	return cmd
}

func keyState(k access.Key) string {
	switch {
	case k.RevokedAt != nil:
		return "revoked"
	case k.ExpiresAt != nil && time.Now().After(*k.ExpiresAt):
		return "expired"
	}
	return "good"
}

func (c *cli) keyRevokeCmd() *cobra.Command {
	return c.plainCmd(&cobra.Command{
		Use: "revoke KEY…", Aliases: []string{"rm"}, Short: "Make keys work no more, at once and for good", Args: cobra.MinimumNArgs(1),
		Long:    "Make keys, by their ids, work no more. What is in flight with them is cut.",
		Example: "  sandbox key revoke key_2ab3cd4ef5gh6ij7",
	}, func(cmd *cobra.Command, cl *client.Client, args []string) error {
		return each(c, args, func(id string) error {
			_, err := cl.RevokeKey(cmd.Context(), id)
			return err
		})
	})
}

func (c *cli) auditCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "audit", Short: "Show who changed what, and check that nobody changed that"}
	cmd.AddCommand(c.auditLsCmd(), c.auditVerifyCmd())
	return cmd
}

func (c *cli) auditLsCmd() *cobra.Command {
	var q access.AuditQuery
	cmd := c.plainCmd(&cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List who changed what, the newest first", Args: cobra.NoArgs,
		Example: "  sandbox audit ls --owner alice --limit 20\n  sandbox audit ls --object sb2ab3cd4ef5gh",
	}, func(cmd *cobra.Command, cl *client.Client, _ []string) error {
		page, err := cl.Audit(cmd.Context(), q)
		if err != nil {
			return err
		}
		return c.show(page, func(w printer) error {
			return columns(w, "SEQ\tTIME\tOWNER\tROLE\tFROM\tOPERATION\tOBJECT\tSTATUS\tCODE\tREQUEST", func(row func(string, ...any)) {
				for _, e := range page.Items {
					row("%d\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s", e.Seq, e.Time.Format(time.RFC3339), e.Owner, e.Role, e.From, e.Operation, dash(clip(e.Object, 60)), e.Status, dash(e.Code), e.Request)
				}
			})
		})
	})
	f := cmd.Flags()
	f.StringVar(&q.Owner, "owner", "", "only what this owner did")
	f.StringVar(&q.Object, "object", "", "only what was about this, as its caller named it")
	f.Int64Var(&q.Before, "before", 0, "only rows before this number")
	f.IntVar(&q.Limit, "limit", 100, "at most this many, up to 1000")
	return cmd
}

func (c *cli) auditVerifyCmd() *cobra.Command {
	return c.plainCmd(&cobra.Command{
		Use: "verify [SEQ HASH]", Short: "Compute the chain of the audit anew; exit with 1 where it is broken", Args: cobra.MatchAll(cobra.MaximumNArgs(2), evenArgs),
		Long: `Compute the chain of the audit anew, and tell the first row that is not as it was
written. Note the head it prints somewhere else, and give it back later: only so is
it seen that the newest rows were cut off, or all of them made anew.`,
		Example: "  sandbox audit verify\n  sandbox audit verify 4711 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
	}, func(cmd *cobra.Command, cl *client.Client, args []string) error {
		var seq int64
		var hash string
		if len(args) == 2 {
			var err error
			if seq, err = strconv.ParseInt(args[0], 10, 64); err != nil || seq < 1 {
				return usage("%q is no number of a row", args[0])
			}
			hash = args[1]
		}
		check, err := cl.VerifyAudit(cmd.Context(), seq, hash)
		if err != nil {
			return err
		}
		if err := c.show(check, func(w printer) error {
			if !check.OK {
				return w.printf("BROKEN at row %d: %s\n", check.BrokenAt, check.Detail)
			}
			if check.Detail != "" {
				if err := line(w, check.Detail); err != nil {
					return err
				}
			}
			return w.printf("ok: %d rows, %d displaced\nhead: %d %s\n", check.Rows, check.Displaced, check.Last, check.Head)
		}); err != nil {
			return err
		}
		if !check.OK {
			return exitError(1)
		}
		return nil
	})
}

func evenArgs(_ *cobra.Command, args []string) error {
	if len(args) == 1 {
		return usage("give both the number of a row and its hash, or neither")
	}
	return nil
}
