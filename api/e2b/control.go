package e2b

import (
	"net/http"

	"github.com/sandboxd/sandboxd/sandbox"
)

// keyHeader brings the API key.
const keyHeader = "X-API-KEY"

// handler answers one call of the control plane for an actor: what it returns
// is written. The request's context carries who that is.
type handler func(w http.ResponseWriter, r *http.Request, actor string) (status int, body any, err error)

// controlRoutes are the calls of the control plane.
func (s *Server) controlRoutes() http.Handler {
	mux := http.NewServeMux()
	for pattern, h := range map[string]handler{} {
		mux.HandleFunc(pattern, s.call(h))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.fail(w, r, sandbox.Errorf(sandbox.ErrNotFound, "no_route", "there is nothing at %.200q", r.URL.Path))
	})
	return mux
}

// call wraps a handler: who asks, errors, the answer.
func (s *Server) call(h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, actor, err := s.callers.Authenticate(r)
		if err != nil {
			s.fail(w, r, err)
			return
		}
		status, body, err := h(w, r.WithContext(ctx), actor)
		switch {
		case err != nil:
			s.fail(w, r, err)
		case status == http.StatusNoContent:
			w.WriteHeader(status)
		default:
			answer(w, status, body)
		}
	}
}
