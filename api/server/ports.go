package server

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/duplex"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Ports is the part of Manager that reaches into sandboxes.
type Ports interface {
	// PublishPort listens on the host for a port of a living sandbox, from
	// then on to its end.
	PublishPort(ctx context.Context, ref string, req sandbox.PortRequest, actor string) (sandbox.Port, error)
	// Ports lists those of one sandbox or, without a ref, all.
	Ports(ctx context.Context, ref string) ([]sandbox.Port, error)
	UnpublishPort(ctx context.Context, id, actor string) (sandbox.Port, error)
	// NewPortToken makes or replaces what opens a sandbox's host names.
	NewPortToken(ctx context.Context, ref, actor string) (string, error)
	RemovePortToken(ctx context.Context, ref, actor string) error
	// ReleaseHostName frees a host name whose holder has no living sandbox of it.
	ReleaseHostName(ctx context.Context, name, actor string) (sandbox.HostName, error)
	// DialPort connects to a TCP port of a running sandbox.
	DialPort(ctx context.Context, ref string, port int) (net.Conn, error)
}

type (
	publishInput = bodyInput[sandbox.PortRequest]
	portTarget   struct {
		ID string `path:"id" maxLength:"14"`
	}
	hostNameTarget struct {
		Name string `path:"name" maxLength:"63"`
	}
	portListInput struct {
		Sandbox string `query:"sandbox" maxLength:"63" doc:"Only this sandbox's."`
	}
	connectInput struct {
		Target
		Port int `path:"port" minimum:"1" maximum:"65535" doc:"Of the sandbox."`
	}
)

func (s *server) portRoutes() {
	tags := []string{"ports"}
	const base = "/v1/sandboxes/{ref}/ports"
	register(s, huma.Operation{
		OperationID: "publish-port", Method: http.MethodPost, Path: base, DefaultStatus: http.StatusCreated,
		Summary: "Listen on the host for a port of a sandbox", Tags: tags,
	}, func(ctx context.Context, in *publishInput) (*result[sandbox.Port], error) {
		return wrap(s.m.PublishPort(ctx, in.Ref, in.Body, actorOf(ctx)))
	})
	list := func(ctx context.Context, ref string) (*result[api.PortList], error) {
		all, err := s.m.Ports(ctx, ref)
		return wrap(api.PortList{Items: orEmpty(all)}, err)
	}
	register(s, huma.Operation{
		OperationID: "list-sandbox-ports", Method: http.MethodGet, Path: base, Summary: "List a sandbox's published ports", Tags: tags,
	}, func(ctx context.Context, in *Target) (*result[api.PortList], error) { return list(ctx, in.Ref) })
	register(s, huma.Operation{
		OperationID: "list-ports", Method: http.MethodGet, Path: "/v1/ports", Summary: "List published ports", Tags: tags,
	}, func(ctx context.Context, in *portListInput) (*result[api.PortList], error) {
		return list(ctx, in.Sandbox)
	})
	register(s, huma.Operation{
		OperationID: "unpublish-port", Method: http.MethodDelete, Path: "/v1/ports/{id}",
		Summary: "Stop listening for a port and break its connections", Tags: tags,
	}, func(ctx context.Context, in *portTarget) (*result[sandbox.Port], error) {
		return wrap(s.m.UnpublishPort(ctx, in.ID, actorOf(ctx)))
	})
	const token = "/v1/sandboxes/{ref}/port-token"
	register(s, huma.Operation{
		OperationID: "set-port-token", Method: http.MethodPut, Path: token, DefaultStatus: http.StatusOK,
		Summary: "Make or replace the token that opens a sandbox's host names", Tags: tags,
	}, func(ctx context.Context, in *Target) (*result[api.PortToken], error) {
		t, err := s.m.NewPortToken(ctx, in.Ref, actorOf(ctx))
		return wrap(api.PortToken{Token: t}, err)
	})
	register(s, huma.Operation{
		OperationID: "remove-port-token", Method: http.MethodDelete, Path: token, DefaultStatus: http.StatusNoContent,
		Summary: "Take the token of a sandbox away", Tags: tags,
	}, func(ctx context.Context, in *Target) (*empty, error) {
		return &empty{}, s.m.RemovePortToken(ctx, in.Ref, actorOf(ctx))
	})
	register(s, huma.Operation{
		OperationID: "release-host-name", Method: http.MethodDelete, Path: "/v1/host-names/{name}",
		Summary: "Free a host name for other owners: its next requests lead to another's sandbox", Tags: tags,
	}, func(ctx context.Context, in *hostNameTarget) (*result[sandbox.HostName], error) {
		return wrap(s.m.ReleaseHostName(ctx, in.Name, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "connect-port", Method: http.MethodGet, Path: base + "/{port}/connect",
		Summary: "Connect to a TCP port of a running sandbox: after Upgrade: " + api.UpgradePort + " the connection is the sandbox's", Tags: tags,
		Responses: map[string]*huma.Response{"101": {Description: "From here on both ways carry what client and sandbox say; each may close its half"}},
	}, s.connectPort)
}

// connectPort hands the request's connection to a port of the sandbox.
func (s *server) connectPort(ctx context.Context, in *connectInput) (*huma.StreamResponse, error) {
	req := requestOf(ctx)
	if !strings.EqualFold(req.r.Header.Get("Upgrade"), api.UpgradePort) {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "not_an_upgrade", "this path hands over a connection: send Connection: Upgrade and Upgrade: %s", api.UpgradePort)
	}
	l, err := streaming(ctx)
	if err != nil {
		return nil, err
	}
	inner, err := s.m.DialPort(ctx, in.Ref, in.Port)
	if err != nil {
		l.end()
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		defer l.end()
		defer inner.Close()
		c, rw, err := http.NewResponseController(req.w).Hijack()
		if err != nil {
			s.log.DebugContext(ctx, "hand over a connection", "request", req.id, "error", err)
			return
		}
		defer c.Close()
		l.onDrain(sync.OnceFunc(func() { _ = c.Close() }))
		if err := c.SetDeadline(time.Time{}); err != nil {
			return // it is gone
		}
		if _, err := io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+api.UpgradePort+"\r\n"+api.HeaderRequestID+": "+req.id+"\r\n\r\n"); err != nil {
			return
		}
		if err := duplex.Join(unread(c, rw.Reader), inner); err != nil {
			s.log.DebugContext(ctx, "a connection to a port broke", "request", req.id, "error", err)
		}
	}}, nil
}

// unread gives back to a connection what was read of it too early.
func unread(c net.Conn, r *bufio.Reader) net.Conn {
	if r.Buffered() == 0 {
		return c
	}
	return &early{Conn: c, r: io.MultiReader(io.LimitReader(r, int64(r.Buffered())), c)}
}

type early struct {
	net.Conn
	r io.Reader
}

// Read reads what came early, then the connection.
func (e *early) Read(p []byte) (int, error) { return e.r.Read(p) }

// CloseWrite tells the client that nothing more comes.
func (e *early) CloseWrite() error {
	if h, ok := e.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return e.Close()
}
