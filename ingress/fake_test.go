package ingress

import (
	"context"
	"maps"
	"net"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// house is the runtime of these tests: its sandboxes' ports are ports here.
type house struct {
	mu        sync.Mutex
	sandboxes []sandbox.Sandbox       // guarded by mu
	ports     []sandbox.Port          // guarded by mu
	tokens    map[sandbox.ID][]byte   // guarded by mu
	servers   map[int]string          // guarded by mu; port inside to address here
	failPut   error                   // guarded by mu
	midPut    func()                  // guarded by mu; called while a row is written
	midToken  func(hash []byte)       // guarded by mu; called when a token has been written
	midList   func()                  // guarded by mu; called when ports have been read
	udp       map[int]map[bool]string // guarded by mu; port and inside to address here
}

func newHouse(names ...string) *house {
	h := &house{tokens: map[sandbox.ID][]byte{}, servers: map[int]string{}, udp: map[int]map[bool]string{}}
	for _, n := range names {
		h.sandboxes = append(h.sandboxes, sandbox.Sandbox{ID: sandbox.NewID(), Spec: sandbox.Spec{Name: n}, Status: sandbox.StatusRunning})
	}
	return h
}

func (h *house) set(name string, s sandbox.Status) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.sandboxes {
		if h.sandboxes[i].Spec.Name == name {
			h.sandboxes[i].Status = s
		}
	}
}

func (h *house) Sandbox(_ context.Context, ref string) (sandbox.Sandbox, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, sb := range h.sandboxes {
		if string(sb.ID) == ref || sb.Spec.Name == ref || sandbox.IsIDPrefix(ref) && string(sb.ID)[:len(ref)] == ref {
			return sb, nil
		}
	}
	return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "no sandbox %q", ref)
}

func (h *house) Living(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	sb, err := h.Sandbox(ctx, ref)
	if err == nil && sb.Status.Terminal() {
		err = sandbox.Errorf(sandbox.ErrConflict, "sandbox_ended", "sandbox %s has ended", ref)
	}
	return sb, err
}

func (h *house) DialPort(ctx context.Context, ref string, port int) (net.Conn, error) {
	sb, err := h.Sandbox(ctx, ref)
	if err != nil {
		return nil, err
	}
	if sb.Status != sandbox.StatusRunning {
		return nil, sandbox.Errorf(sandbox.ErrConflict, "sandbox_stopped", "sandbox %s is stopped", ref)
	}
	h.mu.Lock()
	at := h.servers[port]
	h.mu.Unlock()
	if at == "" {
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, "port_closed", "nobody listens on port %d", port)
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", at)
}

func (h *house) DialUDP(ctx context.Context, _ string, port int, inside bool) (net.Conn, error) {
	h.mu.Lock()
	at := h.udp[port][inside]
	h.mu.Unlock()
	if at == "" {
		return nil, unix.ECONNREFUSED
	}
	var d net.Dialer
	return d.DialContext(ctx, "udp", at)
}

func (h *house) PutPort(_ context.Context, p sandbox.Port, _ string) error {
	h.mu.Lock()
	mid, err := h.midPut, h.failPut
	if err == nil {
		h.ports = append(h.ports, p)
	}
	h.mu.Unlock()
	if mid != nil {
		mid()
	}
	return err
}

func (h *house) Ports(_ context.Context, id sandbox.ID) ([]sandbox.Port, error) {
	h.mu.Lock()
	all := slices.DeleteFunc(slices.Clone(h.ports), func(p sandbox.Port) bool { return id != "" && p.Sandbox != id })
	mid := h.midList
	h.mu.Unlock()
	if mid != nil {
		mid()
	}
	return all, nil
}

func (h *house) DeletePort(_ context.Context, id, _ string) (sandbox.Port, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.ports, func(p sandbox.Port) bool { return p.ID == id })
	if i < 0 {
		return sandbox.Port{}, sandbox.Errorf(sandbox.ErrNotFound, "port_not_found", "no port %s", id)
	}
	p := h.ports[i]
	h.ports = slices.Delete(h.ports, i, i+1)
	return p, nil
}

func (h *house) SetPortToken(_ context.Context, id sandbox.ID, hash []byte, _ string) error {
	h.mu.Lock()
	if hash == nil {
		delete(h.tokens, id)
	} else {
		h.tokens[id] = hash
	}
	mid := h.midToken
	h.mu.Unlock()
	if mid != nil {
		mid(hash)
	}
	return nil
}

func (h *house) PortTokens(context.Context) (map[sandbox.ID][]byte, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.tokens), nil
}

// open starts an ingress of a house.
func open(t *testing.T, h *house) *Ingress {
	t.Helper()
	in := New(Config{Sandboxes: h, Domain: "box.test"})
	if err := in.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(in.Close)
	return in
}
