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
func openServices(ctx context.Context, c config, network *netns.Host, secrets gate.Secrets, tell func(sandbox.NetworkNews), log *slog.Logger, opened *closers) error {
	names, err := openResolver(c, network, tell, log)
	if err != nil {
		return err
	}
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
