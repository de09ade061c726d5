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
	for pattern, h := range map[string]handler{
		"POST /sandboxes":                  s.create,
		"POST /v2/sandboxes":               s.create,
		"GET /sandboxes":                   s.listRunning,
		"GET /v2/sandboxes":                s.listPage,
		"GET /sandboxes/metrics":           s.metricsOfMany,
		"GET /sandboxes/{id}":              s.detail,
		"DELETE /sandboxes/{id}":           s.kill,
		"POST /sandboxes/{id}/connect":     s.connect,
		"POST /sandboxes/{id}/resume":      s.resume,
		"POST /sandboxes/{id}/timeout":     s.timeout,
		"POST /sandboxes/{id}/pause":       s.pause,
		"GET /sandboxes/{id}/metrics":      s.metrics,
		"GET /sandboxes/{id}/logs":         s.logs,
		"GET /v2/sandboxes/{id}/logs":      s.logsPage,
		"PUT /sandboxes/{id}/network":      s.setNetwork,
		"POST /sandboxes/{id}/fork":        s.fork,
		"GET /snapshots":                   s.listSnapshots,
		"GET /templates":                   s.listTemplates,
		"GET /v2/templates":                s.listTemplates,
		"GET /templates/aliases/{name...}": s.templateAlias,
		"GET /templates/{rest...}":         notHere("builds and tags of templates", "build an image with 'sandbox image build' and name it with 'sandbox template set'"),
		"DELETE /templates/tags":           notHere("template tags", "give each version a template of its own name"),
		"DELETE /templates/{name...}":      s.removeTemplate,
		"GET /teams":                       s.teams,

		"POST /v2/sandboxes/{id}/connect": s.connect,
		"POST /sandboxes/{id}/token":      s.changeToken, // ours: E2B has no such call
		"POST /sandboxes/{id}/refreshes":  s.refresh,
		"POST /sandboxes/{id}/snapshots":  s.snapshot,
		"POST /v3/templates":              notHere("template builds", "build an image with 'sandbox image build' and name it with 'sandbox template set'"),
		"POST /v2/templates":              notHere("template builds", "build an image with 'sandbox image build' and name it with 'sandbox template set'"),
		"GET /volumes":                    notHere("volumes", "make one with 'sandbox volume create'; volumeMounts take its name"),
		"POST /volumes":                   notHere("volumes", "make one with 'sandbox volume create'; volumeMounts take its name"),
		"GET /secrets":                    notHere("secrets", "keep them with 'sandbox secret set'"),
		"POST /secrets":                   notHere("secrets", "keep them with 'sandbox secret set'"),
		"POST /templates/tags":            notHere("template tags", "give each version a template of its own name"),
		"POST /sandboxes/{id}/secrets":    notHere("secrets", "keep them with 'sandbox secret set'"),
		"GET /teams/{team}/metrics":       notHere("team metrics", "see 'sandbox usage'"),
		"GET /teams/{team}/metrics/max":   notHere("team metrics", "see 'sandbox usage'"),
		"PATCH /v2/templates/{name...}":   notHere("publishing templates", "'sandbox template set' has --private"),
	} {
		mux.HandleFunc(pattern, s.call(h))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.fail(w, r, sandbox.Errorf(sandbox.ErrNotFound, "no_route", "there is nothing at %.200q", r.URL.Path))
	})
	return mux
}

// notHere answers calls for what this daemon has other means for.
func notHere(what, instead string) handler {
	return func(http.ResponseWriter, *http.Request, string) (int, any, error) {
		return 0, nil, sandbox.Errorf(sandbox.ErrUnsupported, "not_offered", "%s are not offered in this dialect: %s", what, instead)
	}
}

// call wraps a handler: who asks, errors, the answer.
func (s *Server) call(h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, actor, err := s.callers.Authenticate(r)
		if err != nil {
			s.fail(w, r, err)
			return
		}
		ctx, end := s.hold(ctx, w, "")
		defer end()
		status, body, err := h(w, r.WithContext(ctx), actor)
		if r.Method != http.MethodGet {
			s.note(ctx, deedOf(r, status, body, err))
		}
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

// teams tells whose key this is: an owner is a team.
func (s *Server) teams(_ http.ResponseWriter, _ *http.Request, actor string) (int, any, error) {
	return http.StatusOK, []map[string]any{{"teamID": actor, "name": actor, "apiKey": "", "isDefault": true}}, nil
}
