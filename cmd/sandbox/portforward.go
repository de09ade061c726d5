package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/duplex"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) portForwardCmd() *cobra.Command {
	return &cobra.Command{
		Use: "port-forward SANDBOX [[ADDRESS:]LOCALPORT:]PORT…", Short: "Lead local ports to a sandbox while this command runs",
		Long: `Listen on this machine, on 127.0.0.1 unless ADDRESS says otherwise, and lead each
connection through the daemon to a TCP port of the sandbox. Nothing is published,
and nothing stays once the command ends. LOCALPORT is that of the sandbox unless
given; 0 means one that is free.`,
		Example: `  sandbox port-forward dev 8080           http://127.0.0.1:8080
  sandbox port-forward dev 9000:80 5432   two at once`,
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			reqs, err := parseForwards(args[1:])
			if err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			sb, err := cl.Sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.forward(cmd.Context(), cl, string(sb.ID), reqs)
		},
	}
}

// parseForwards reads ports to be forwarded: like those to be published, but
// on this machine, and by default under the same number.
func parseForwards(texts []string) ([]sandbox.PortRequest, error) {
	reqs, err := parsePublished(texts)
	if err != nil {
		return nil, err
	}
	for i, text := range texts {
		r := &reqs[i]
		if r.Protocol != sandbox.ProtocolTCP {
			return nil, usage("port %q: only tcp can be forwarded; 'sandbox port publish' takes udp, too", text)
		}
		if !r.Address.IsValid() {
			r.Address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		}
		if fmt.Sprint(r.Port) == text || fmt.Sprint(r.Port)+"/tcp" == text {
			r.HostPort = r.Port
		}
	}
	return reqs, nil
}

// forward listens until the context ends, or the sandbox.
func (c *cli) forward(ctx context.Context, cl *client.Client, ref string, reqs []sandbox.PortRequest) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	f := &forwarder{c: c, cl: cl, ref: ref, stop: stop}
	defer f.all.Wait()
	for _, r := range reqs {
		var lc net.ListenConfig
		ln, err := lc.Listen(ctx, "tcp", netip.AddrPortFrom(r.Address, r.HostPort).String())
		if err != nil {
			stop(nil)
			return sandbox.Errorf(sandbox.ErrConflict, "port_taken", "listening here: %w; use LOCALPORT:PORT, with 0 for one that is free", err)
		}
		context.AfterFunc(ctx, func() { _ = ln.Close() })
		if err := c.showLine(map[string]any{"listen": ln.Addr().String(), "port": r.Port}, "%s -> %d", ln.Addr(), r.Port); err != nil {
			stop(nil)
			return err
		}
		f.all.Go(func() { f.accept(ctx, ln, int(r.Port)) })
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

type forwarder struct {
	c    *cli
	cl   *client.Client
	ref  string
	stop context.CancelCauseFunc
	all  sync.WaitGroup
	told sync.Mutex
}

func (f *forwarder) accept(ctx context.Context, ln net.Listener, port int) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			if ctx.Err() == nil {
				f.stop(fmt.Errorf("listening on %s: %w", ln.Addr(), err))
			}
			return
		}
		f.all.Go(func() { f.serve(ctx, conn, port) })
	}
}

// serve leads one connection to the sandbox.
func (f *forwarder) serve(ctx context.Context, conn net.Conn, port int) {
	inner, err := f.cl.DialPort(ctx, f.ref, port)
	if err != nil {
		duplex.Reset(conn) // as the sandbox would
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, sandbox.ErrNotFound), sandbox.CodeOf(err) == "sandbox_ended":
			f.stop(err)
		default:
			f.told.Lock()
			defer f.told.Unlock()
			f.c.complain(err)
		}
		return
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close(); _ = inner.Close() })()
	_ = duplex.Join(conn, inner) // whichever end broke, the other has been told
}
