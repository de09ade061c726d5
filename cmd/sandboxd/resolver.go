package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/sandboxd/sandboxd/gate"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/resolver"
	"github.com/sandboxd/sandboxd/sandbox"
)

// dnsPort is where the configured resolvers listen.
const dnsPort = 53

// tenants are the sandboxes of a network, in the resolver's words.
type tenants struct{ *netns.Host }

var _ resolver.Sandboxes = tenants{}

// Tenant returns who has an address.
func (n tenants) Tenant(addr netip.Addr) (resolver.Tenant, bool) {
	t, ok := n.Host.Tenant(addr)
	return resolver.Tenant(t), ok
}

// openServices opens what the daemon serves to sandboxes on the gateway's
// address, and has their questions sent there. The sandboxes must be known
// already: a stranger is refused.
func openServices(ctx context.Context, c config, p *parts, secrets gate.Secrets, tell func(sandbox.NetworkNews), log *slog.Logger, opened *closers) error {
	network := p.network
	names, err := openResolver(c, network, tell, log)
	if err != nil {
		return err
	}
	p.names = names
	opened.add(names.Close)
	web, err := openGate(c, network, names, secrets, tell, log)
	if err != nil {
		return err
	}
	opened.add(web.Close)
	if err := network.Redirect(ctx, netns.Services{DNS: names.Port(), Gate: web.Port()}); err != nil {
		return fmt.Errorf("send the questions of sandboxes to the resolver, and their web traffic to the gate: %w", err)
	}
	return nil
}

// checkNames tells whom the daemon asks for names, and how that goes.
func (d *doctor) checkNames() sandbox.Check {
	servers := d.parts.names.Upstreams()
	if len(servers) == 0 {
		return warn("names", "nobody to ask: sandboxes get no addresses of names", "set network.resolvers, or name a server in "+resolver.ResolvConf)
	}
	n := d.parts.names.Stats()
	return ok("names", fmt.Sprintf("asks %v; sandboxes asked %d times since the start: %d refused, %d too fast; %d from the cache; %d times a server failed",
		servers, n.Queries, n.Denied, n.Limited, n.CacheHits, n.UpstreamErrors))
}

// openResolver opens the resolver of sandboxes.
func openResolver(c config, network *netns.Host, tell func(sandbox.NetworkNews), log *slog.Logger) (*resolver.Server, error) {
	var upstreams []netip.AddrPort
	for _, addr := range c.Network.Resolvers {
		upstreams = append(upstreams, netip.AddrPortFrom(addr, dnsPort))
	}
	return resolver.Open(resolver.Config{
		Listen:    netip.AddrPortFrom(network.Gateway(), 0),
		Upstreams: upstreams, Pool: c.Network.Pool, Admit: c.Network.Admit, Deny: c.Network.Deny,
		Sandboxes: tenants{network}, Tell: nameNews(tell), Log: log,
	})
}
