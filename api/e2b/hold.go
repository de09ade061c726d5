package e2b

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// errCut is how a stream ends that is cut.
var errCut = rpcErrorf(codePermissionDenied, "the key, the token or the role that let this call in was taken away")

// holds are the requests that tokens of sandboxes let in, to be cut when the
// tokens are changed.
type holds struct {
	mu  sync.Mutex
	all map[sandbox.ID]map[*func()]bool
}

// hold ends the context, and soon after the connection, when what let the
// request in goes away: the right of the caller or, where a sandbox is given,
// its token. end must be called when the request is over.
func (s *Server) hold(ctx context.Context, w http.ResponseWriter, id sandbox.ID) (held context.Context, end func()) {
	rc := http.NewResponseController(w)
	held, cutFor, over := api.WithCut(ctx, func() {
		past := time.Unix(1, 0)
		_ = rc.SetReadDeadline(past) // a recorder of tests has none
		_ = rc.SetWriteDeadline(past)
	})
	cut := func() { cutFor(errCut) }
	s.holds.add(id, &cut)
	release := s.callers.Hold(ctx, cut)
	return held, func() {
		release()
		s.holds.drop(id, &cut)
		over()
	}
}

func (h *holds) add(id sandbox.ID, cut *func()) {
	if id == "" {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all == nil {
		h.all = map[sandbox.ID]map[*func()]bool{}
	}
	if h.all[id] == nil {
		h.all[id] = map[*func()]bool{}
	}
	h.all[id][cut] = true
}

func (h *holds) drop(id sandbox.ID, cut *func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.all[id], cut)
	if len(h.all[id]) == 0 {
		delete(h.all, id)
	}
}

// cut ends the requests that tokens of a sandbox let in.
func (h *holds) cut(id sandbox.ID) {
	h.mu.Lock()
	var cuts []*func()
	for c := range h.all[id] {
		cuts = append(cuts, c)
	}
	h.mu.Unlock()
	for _, c := range cuts {
		(*c)()
	}
}
