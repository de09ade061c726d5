package main

import (
	"context"
	"log/slog"
	"net/netip"
	"strings"

	"github.com/sandboxd/sandboxd/gate"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/resolver"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/sandbox"
)

var (
	_ gate.Sandboxes = gated{}
	_ gate.Names     = gateNames{}
	_ gate.Secrets   = (*runtime.Manager)(nil)
)

// gated are the sandboxes of a network, in the gate's words.
type gated struct{ *netns.Host }

// Tenant returns who has an address.
func (n gated) Tenant(addr netip.Addr) (gate.Tenant, bool) {
	t, ok := n.Host.Tenant(addr)
	return gate.Tenant(t), ok
}

// gateNames is the resolver, in the gate's words.
type gateNames struct{ *resolver.Server }

// Lookup returns the addresses of a name as the sandbox itself would get them.
func (n gateNames) Lookup(ctx context.Context, t gate.Tenant, name string) ([]netip.Addr, error) {
	return n.Server.Lookup(ctx, resolver.Tenant(t), name)
}

// openGate opens the web gate of sandboxes.
func openGate(c config, network *netns.Host, names *resolver.Server, secrets gate.Secrets, tell func(sandbox.NetworkNews), log *slog.Logger) (*gate.Server, error) {
	return gate.Open(gate.Config{
		Listen: netip.AddrPortFrom(network.Gateway(), 0), Sandboxes: gated{network}, Names: gateNames{names}, Secrets: secrets,
		Pool: c.Network.Pool, Admit: c.Network.Admit, Deny: c.Network.Deny, Tell: gateNews(tell), Log: log,
	})
}

// gateNews tells what the gate judged on.
func gateNews(tell func(sandbox.NetworkNews)) func(gate.Event) {
	return func(e gate.Event) {
		n := sandbox.NetworkNews{
			Sandbox: e.Sandbox, Type: sandbox.EventNetDenied, Protocol: e.Kind, Dest: e.Host, Port: e.Port, Why: e.Code,
			Detail: map[string]string{"step": "gate"},
		}
		if e.Permitted {
			n.Type, n.Why = sandbox.EventNetAllowed, e.Rule
		}
		if n.Dest == "" {
			n.Dest, n.Port = e.Origin.Addr().String(), e.Origin.Port()
		}
		for key, value := range map[string]string{
			"rule": e.Rule, "method": e.Method, "path": e.Path, "code": e.Code, "detail": e.Detail, "secrets": strings.Join(e.Secrets, " "),
		} {
			if value != "" {
				n.Detail[key] = value
			}
		}
		tell(n)
	}
}
