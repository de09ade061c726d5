package e2b

import (
	"net/http"

	"github.com/sandboxd/sandboxd/sandbox"
)

// data returns the data plane of a running sandbox. The token has been
// checked, but not the signature of a URL for files.
func (s *Server) data(box sandbox.Sandbox) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	return mux
}
