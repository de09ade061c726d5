package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

func (c *cli) ownerCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "owner", Short: "Manage owners: their roles and quotas",
		Long: `An owner is whose things are: a name with API keys, or uid:N, a user of the daemon's
machine on its socket. The role bounds what its keys may do, the quota what it may
have. Administrators alone manage owners.`,
	}
	cmd.AddCommand(c.ownerLsCmd(), c.ownerSetCmd(), c.ownerRmCmd())
	return cmd
}

// quotaWords is a quota in a few words.
func quotaWords(q api.Quota) string {
	var parts []string
	add := func(some bool, format string, args ...any) {
		if some {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	add(q.Sandboxes > 0, "%d sandboxes", q.Sandboxes)
	add(q.CPUs > 0, "%g cpus", q.CPUs)
	add(q.MemoryBytes > 0, "%s memory", units.BytesSize(float64(q.MemoryBytes)))
	add(q.DiskBytes > 0, "%s disk", units.BytesSize(float64(q.DiskBytes)))
	add(q.LifetimeSeconds > 0, "%s lifetime", time.Duration(q.LifetimeSeconds)*time.Second)
	add(q.IdleSeconds > 0, "%s idle", time.Duration(q.IdleSeconds)*time.Second)
	add(q.PerMinute > 0, "%d requests/min", q.PerMinute)
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

func (c *cli) showOwners(v any, all []api.Owner) error {
	return c.show(v, func(w printer) error {
		return columns(w, "OWNER\tROLE\tKEYS\tSTATE\tQUOTA", func(row func(string, ...any)) {
			for _, o := range all {
				state := "enabled"
				if o.Disabled {
					state = "disabled"
				}
				row("%s\t%s\t%d\t%s\t%s", o.Name, o.Role, o.Keys, state, quotaWords(o.Quota))
			}
		})
	})
}

func (c *cli) ownerLsCmd() *cobra.Command {
	return c.plainCmd(&cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the owners", Args: cobra.NoArgs, Example: "  sandbox owner ls",
	}, func(cmd *cobra.Command, cl *client.Client, _ []string) error {
		all, err := cl.Owners(cmd.Context())
		if err != nil {
			return err
		}
		return c.showOwners(all, all)
	})
}

func (c *cli) ownerRmCmd() *cobra.Command {
	return c.plainCmd(&cobra.Command{
		Use: "rm OWNER…", Short: "Forget owners and revoke their keys", Args: cobra.MinimumNArgs(1),
		Long: `Forget owners and revoke their keys. What they have stays, for administrators to see
and remove, and for whoever gets the name next: 'sandbox owner set NAME --disable'
keeps the name taken instead.`,
		Example: "  sandbox owner rm alice",
	}, func(cmd *cobra.Command, cl *client.Client, args []string) error {
		return each(c, args, func(name string) error { return cl.RemoveOwner(cmd.Context(), name) })
	})
}

func (c *cli) ownerSetCmd() *cobra.Command {
	var role, memory, disk string
	var disable, enable bool
	var sandboxes, perMinute int
	var cpus float64
	var lifetime, idle time.Duration
	cmd := &cobra.Command{
		Use: "set [flags] OWNER", Short: "Change an owner, or make one", Args: cobra.ExactArgs(1),
		Long: `Change an owner, or make one: a name, or uid:N for a user on the socket. What is not
given stays as it is; 0 takes a bound away. A new role brings its usual quota along,
unless the quota was set apart. Requests in flight are cut where the role changed or
the owner was disabled. --disable and --enable make no owner.`,
		Example: `  sandbox owner set alice --max-sandboxes 20 --max-memory 64g
  sandbox owner set uid:1000 --role viewer
  sandbox owner set alice --disable`,
	}
	f := cmd.Flags()
	f.StringVar(&role, "role", "", "admin, operator, developer or viewer")
	f.BoolVar(&disable, "disable", false, "let none of its keys work")
	f.BoolVar(&enable, "enable", false, "let its keys work again")
	f.IntVar(&sandboxes, "max-sandboxes", 0, "living sandboxes")
	f.Float64Var(&cpus, "max-cpus", 0, "sum of their cpu limits")
	f.StringVar(&memory, "max-memory", "", "sum of their memory limits, as 64g")
	f.StringVar(&disk, "max-disk", "", "sum of the disk limits, of volumes and of snapshots, as 100g")
	f.DurationVar(&lifetime, "max-lifetime", 0, "of one sandbox, as 24h")
	f.DurationVar(&idle, "max-idle", 0, "after which an idle sandbox is stopped, as 1h")
	f.IntVar(&perMinute, "requests-per-minute", 0, "of all its keys together")
	cmd.MarkFlagsMutuallyExclusive("disable", "enable")
	return c.plainCmd(cmd, func(cmd *cobra.Command, cl *client.Client, args []string) error {
		change := api.OwnerChange{Role: access.Role(role)}
		if disable || enable {
			change.Disabled = &disable
		}
		var q api.QuotaChange
		given := f.Changed
		if given("max-sandboxes") {
			q.Sandboxes = &sandboxes
		}
		if given("max-cpus") {
			q.CPUs = &cpus
		}
		for _, size := range []struct {
			flag, text string
			to         **int64
		}{{"max-memory", memory, &q.MemoryBytes}, {"max-disk", disk, &q.DiskBytes}} {
			if !given(size.flag) {
				continue
			}
			n, err := units.RAMInBytes(size.text)
			if err != nil {
				return usage("--%s %q: use a size, as 64g", size.flag, size.text)
			}
			*size.to = &n
		}
		for _, d := range []struct {
			flag string
			d    time.Duration
			to   **int64
		}{{"max-lifetime", lifetime, &q.LifetimeSeconds}, {"max-idle", idle, &q.IdleSeconds}} {
			if given(d.flag) {
				s := int64(d.d / time.Second)
				*d.to = &s
			}
		}
		if given("requests-per-minute") {
			q.PerMinute = &perMinute
		}
		if q != (api.QuotaChange{}) {
			change.Quota = &q
		}
		o, err := cl.SetOwner(cmd.Context(), args[0], change)
		if err != nil {
			return err
		}
		return c.showOwners(o, []api.Owner{o})
	})
}
