package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) portCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "port", Short: "Reach servers in sandboxes: publish ports, open host names",
		Long: `A published port is one of this machine that leads to one of a sandbox. It stays
while the sandbox lives, stopped or not, and over restarts of the daemon. Servers
that listen on 127.0.0.1 inside are reached, too, and sandboxes without a network.

'sandbox port-forward' does the same for as long as it runs. Where the daemon is
configured to, every TCP port is reached over HTTP as well, by the host name
PORT-SANDBOX.DOMAIN, with a token ('sandbox port token') or once published with
--public.`,
	}
	cmd.AddCommand(c.portPublishCmd(), c.portLsCmd(), c.portRmCmd(), c.portTokenCmd(), c.portReleaseCmd())
	return cmd
}

func (c *cli) portPublishCmd() *cobra.Command {
	var public bool
	cmd := &cobra.Command{
		Use: "publish [flags] SANDBOX [[ADDRESS:]HOSTPORT:]PORT[/tcp|/udp]…", Short: "Listen on this machine for a port of a sandbox",
		Long: `Listen on this machine for a port of a sandbox, and print where. Without an
address that is the daemon's publish_address (127.0.0.1 unless configured): nobody
but this machine can connect. HOSTPORT 0, or none, means one that is free.`,
		Example: `  sandbox port publish dev 8080:80
  sandbox port publish dev 0.0.0.0:8080:80        for everybody who can reach this machine
  sandbox port publish dev 5353:53/udp
  sandbox port publish dev 3000 --public          by its host name, without a token`,
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			reqs, err := parsePublished(args[1:])
			if err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			for _, r := range reqs {
				r.Public = public
				p, err := cl.PublishPort(cmd.Context(), args[0], r)
				if err != nil {
					return err
				}
				if err := c.showLine(p, "%s", p.Where()); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&public, "public", false, "its host name needs no token")
	return cmd
}

// parsePublished reads ports as people write them.
func parsePublished(texts []string) ([]sandbox.PortRequest, error) {
	var reqs []sandbox.PortRequest
	for _, text := range texts {
		r, err := sandbox.ParsePort(text)
		if err != nil {
			return nil, err
		}
		reqs = append(reqs, r)
	}
	return reqs, nil
}

func (c *cli) portLsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "ls [SANDBOX]", Aliases: []string{"list"}, Short: "List published ports", Example: "  sandbox port ls\n  sandbox port ls dev", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.Ports(cmd.Context(), append(args, "")[0])
			if err != nil {
				return err
			}
			return c.show(api.PortList{Items: all}.Items, func(w printer) error {
				return columns(w, "ID\tSANDBOX\tHOST\tPORT\tPUBLIC\tERROR", func(row func(string, ...any)) {
					for _, p := range all {
						public := "-"
						if p.Public {
							public = "yes"
						}
						row("%s\t%s\t%s\t%d/%s\t%s\t%s", p.ID, p.Sandbox, p.Where(), p.Port, p.Protocol, public, dash(clip(oneLine(p.Error), 60)))
					}
				})
			})
		},
	}
}

func (c *cli) portRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm ID…", Short: "Stop listening for published ports; their connections break", Example: "  sandbox port rm po4k2…", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(id string) error {
				_, err := cl.UnpublishPort(cmd.Context(), id)
				return err
			})
		},
	}
}

func (c *cli) portTokenCmd() *cobra.Command {
	var remove bool
	cmd := &cobra.Command{
		Use: "token [--rm] SANDBOX", Short: "Make, replace or remove the token that opens a sandbox's host names",
		Long: `Make the token that opens all host names of a sandbox (PORT-SANDBOX.DOMAIN), and
print it this once. One made before opens nothing any more. A request brings it as
X-Sandbox-Token, as a bearer token, or in a browser once as ?sandbox_token=TOKEN;
the sandbox does not see it.`,
		Example: `  token=$(sandbox port token dev)
  curl -H "X-Sandbox-Token: $token" http://8080-dev.sandbox.example.com/
  sandbox port token --rm dev`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			if remove {
				return cl.RemovePortToken(cmd.Context(), args[0])
			}
			token, err := cl.NewPortToken(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.showLine(api.PortToken{Token: token}, "%s", token)
		},
	}
	cmd.Flags().BoolVar(&remove, "rm", false, "take the token away")
	return cmd
}

func (c *cli) portReleaseCmd() *cobra.Command {
	return &cobra.Command{
		Use: "release NAME", Short: "Free a host name that an owner holds, for other owners",
		Long: `Free the NAME in host names PORT-NAME.DOMAIN that an owner holds, and print whose it
was. It goes to the oldest living sandbox of that name, else to the next one made;
clients of the former owner may send their cookies there. The holder must have no
living sandbox of the name. By itself a name is free 30 days after its last sandbox
ended, or once its owner is removed. For operators.`,
		Example: "  sandbox port release shop", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			h, err := cl.ReleaseHostName(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.showLine(h, "%s", h.Owner)
		},
	}
}

// publishAll publishes the ports a create or run asked for, but for those that
// a repeated create published before, and tells where they are.
func (c *cli) publishAll(ctx context.Context, cl *client.Client, id sandbox.ID, reqs []sandbox.PortRequest) error {
	if len(reqs) == 0 {
		return nil
	}
	have, err := cl.Ports(ctx, string(id))
	if err != nil {
		return err
	}
	for _, r := range reqs {
		p, found := published(have, r)
		if !found {
			if p, err = cl.PublishPort(ctx, string(id), r); err != nil {
				return err
			}
		}
		if isTerminal(c.err) || r.HostPort == 0 {
			c.warn("port %d/%s is at %s", p.Port, p.Protocol, p.Where())
		}
	}
	return nil
}

func published(have []sandbox.Port, r sandbox.PortRequest) (sandbox.Port, bool) {
	for _, p := range have {
		if p.Port == r.Port && strings.EqualFold(p.Protocol, r.Protocol) && (r.HostPort == 0 || p.HostPort == r.HostPort) && (!r.Address.IsValid() || r.Address == p.Address) {
			return p, true
		}
	}
	return sandbox.Port{}, false
}
