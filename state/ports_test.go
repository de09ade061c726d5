package state

import (
	"net/netip"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestPorts(t *testing.T) {
	d := open(t)
	a := bring(t, d, create(t, d, "a"), sandbox.StatusRunning)
	b := bring(t, d, create(t, d, "b"), sandbox.StatusStopped)
	gone := bring(t, d, create(t, d, "gone"), sandbox.StatusCompleted)
	port := func(id sandbox.ID) sandbox.Port {
		return sandbox.Port{ID: sandbox.NewPortID(), Sandbox: id, Protocol: "tcp", Address: netip.MustParseAddr("127.0.0.1"), HostPort: 1, Port: 2}
	}
	p := port(a.ID)
	for _, p := range []sandbox.Port{p, port(a.ID), port(b.ID)} {
		if err := d.PutPort(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
	want(t, d.PutPort(t.Context(), port(gone.ID)), sandbox.ErrConflict, "sandbox_ended")
	want(t, d.SetPortToken(t.Context(), gone.ID, []byte("x")), sandbox.ErrConflict, "sandbox_ended")
	for _, hash := range []string{"one", "two"} { // the second replaces the first
		if err := d.SetPortToken(t.Context(), a.ID, []byte(hash)); err != nil {
			t.Fatal(err)
		}
	}
	c := Carried{InitStart: 7, Rx: 1 << 40, Tx: 3}
	for range 2 { // twice is once
		if err := d.PutCarried(t.Context(), a.ID, c); err != nil {
			t.Fatal(err)
		}
	}
	count := func(id sandbox.ID, n int) {
		t.Helper()
		all, err := d.Ports(t.Context(), id)
		if err != nil || len(all) != n {
			t.Errorf("%d ports of %q, %v, want %d", len(all), id, err, n)
		}
		if id == a.ID && n == 2 && all[0] != p {
			t.Errorf("read %+v, written %+v", all[0], p)
		}
	}
	count("", 3)
	count(a.ID, 2)
	tokens, err := d.PortTokens(t.Context())
	if err != nil || len(tokens) != 1 || string(tokens[a.ID]) != "two" {
		t.Errorf("tokens %q, %v", tokens, err)
	}
	if all, err := d.Carried(t.Context()); err != nil || len(all) != 1 || all[a.ID] != c {
		t.Errorf("carried %+v, %v", all, err)
	}
	if got, err := d.DeletePort(t.Context(), p.ID); err != nil || got != p {
		t.Errorf("deleted %+v, %v", got, err)
	}
	_, err = d.DeletePort(t.Context(), p.ID)
	want(t, err, sandbox.ErrNotFound, "port_not_found")
	if err := d.FreeEnded(t.Context(), a.ID); err != nil {
		t.Fatal(err)
	}
	count(a.ID, 1) // it lives
	if _, err := d.Move(t.Context(), a.ID, []sandbox.Status{sandbox.StatusRunning}, sandbox.StatusFailed, Change{KeepSlot: true}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.FreeEnded(t.Context(), a.ID); err != nil {
			t.Fatal(err)
		}
	}
	count(a.ID, 0)
	count("", 1)
	if tokens, err := d.PortTokens(t.Context()); err != nil || len(tokens) != 0 {
		t.Errorf("tokens %q, %v", tokens, err)
	}
	if all, err := d.Carried(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("carried %+v, %v", all, err)
	}
	bring(t, d, create(t, d, "c"), sandbox.StatusRunning)
	if _, err := d.Move(t.Context(), b.ID, []sandbox.Status{sandbox.StatusStopped}, sandbox.StatusCompleting, Change{}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Move(t.Context(), b.ID, []sandbox.Status{sandbox.StatusCompleting}, sandbox.StatusCompleted, Change{}); err != nil {
		t.Fatal(err)
	}
	if err := d.DropOldPorts(t.Context()); err != nil { // what a crash forgot
		t.Fatal(err)
	}
	count("", 0)
}
