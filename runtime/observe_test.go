package runtime

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// notes is an observer that writes down what it is told.
type notes struct {
	mu    sync.Mutex
	ended []Work // in the order of their ends
	wrong map[Work]error
}

type workKey struct{}

func (n *notes) Begin(ctx context.Context, w Work) (context.Context, func(error)) {
	within, _ := ctx.Value(workKey{}).(Work)
	name := w
	if within != "" {
		name = within + "/" + w
	}
	return context.WithValue(ctx, workKey{}, w), func(err error) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.ended = append(n.ended, name)
		if err != nil {
			n.wrong[name] = err
		}
	}
}

func TestObserver(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	n := &notes{wrong: map[Work]error{}}
	h.cfg.Observer = n
	sb := create(t, h, sandbox.Spec{Name: "a"})
	if s := h.Stats(); s.Living[sandbox.StatusRunning] != 1 {
		t.Errorf("with one sandbox: %+v", s)
	}
	if _, err := h.Stop(t.Context(), "a", "uid:0"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Stop(t.Context(), "a", "uid:0"); err == nil {
		t.Fatal("stopped twice")
	}
	if _, err := h.Remove(t.Context(), string(sb.ID), "uid:0"); err != nil {
		t.Fatal(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, want := range []Work{
		"create", "create/create.plan", "create/create.shell", "create/create.limits", "create/create.network", "create/create.root",
		"create/create.configure", "create/create.row", "stop", "destroy",
	} {
		if !slices.Contains(n.ended, want) {
			t.Errorf("nothing was told of %s: %v", want, n.ended)
		}
	}
	if len(n.wrong) != 1 || n.wrong["stop"] == nil {
		t.Errorf("errors: %v, want one, of the second stop", n.wrong)
	}
	s := h.Stats()
	if len(s.Living) != 0 || s.Ended[sandbox.ReasonCancelled] != 1 || s.Used.NetTx == 0 {
		t.Errorf("after its end: %+v", s)
	}
}

// BenchmarkUnobserved is what the seam costs where nobody watches.
func BenchmarkUnobserved(b *testing.B) {
	m := &Manager{}
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		_, end := m.observe(ctx, WorkCreate)
		end(nil)
	}
}
