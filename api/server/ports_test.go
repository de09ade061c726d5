package server_test

import (
	"errors"
	"io"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestPorts(t *testing.T) {
	cl := start(t).client(t)
	if _, err := cl.Create(t.Context(), sandbox.Spec{Name: "dev"}, ""); err != nil {
		t.Fatal(err)
	}
	p, err := cl.PublishPort(t.Context(), "dev", sandbox.PortRequest{HostPort: 8080, Port: 80})
	if err != nil || p.Where().String() != "127.0.0.1:8080" {
		t.Fatalf("%+v, %v", p, err)
	}
	for name, r := range map[string]sandbox.PortRequest{"port_taken": {HostPort: 8080, Port: 1}, "invalid_request": {}, "invalid_port": {Port: 1, Protocol: "udp", Public: true}} {
		if _, err := cl.PublishPort(t.Context(), "dev", r); sandbox.CodeOf(err) != name {
			t.Errorf("%+v: %v, want %s", r, err, name)
		}
	}
	if all, err := cl.Ports(t.Context(), "dev"); err != nil || len(all) != 1 || all[0].ID != p.ID {
		t.Errorf("%+v, %v", all, err)
	}
	if _, err := cl.UnpublishPort(t.Context(), p.ID); err != nil {
		t.Error(err)
	}
	if _, err := cl.UnpublishPort(t.Context(), p.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("twice: %v", err)
	}
	if token, err := cl.NewPortToken(t.Context(), "dev"); err != nil || token == "" {
		t.Errorf("token %q, %v", token, err)
	}
	if err := cl.RemovePortToken(t.Context(), "dev"); err != nil {
		t.Error(err)
	}
}

// TestConnectPort: the connection of the request becomes the sandbox's, with
// both halves, and what goes wrong before is an ordinary error.
func TestConnectPort(t *testing.T) {
	cl := start(t).client(t)
	if _, err := cl.Create(t.Context(), sandbox.Spec{Name: "dev"}, ""); err != nil {
		t.Fatal(err)
	}
	c, err := cl.DialPort(t.Context(), "dev", 7)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "there and back"); err != nil {
		t.Fatal(err)
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || string(b) != "there and back" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := cl.DialPort(t.Context(), "dev", 8); sandbox.CodeOf(err) != "port_closed" || !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("a closed port: %v", err)
	}
	if _, err := cl.DialPort(t.Context(), "nobody", 7); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("of no sandbox: %v", err)
	}
	if _, err := cl.DialPort(t.Context(), "dev", 70000); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("no port: %v", err)
	}
}
