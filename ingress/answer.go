package ingress

import (
	"encoding/json"
	"html/template"
	"net/http"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// problem describes why a request goes no further. The statuses are a proxy's,
// not those of the API.
func problem(status int, code, detail string) api.Problem {
	return api.Problem{Type: "urn:sandboxd:problem:" + code, Title: http.StatusText(status), Status: status, Code: code, Detail: detail}
}

var page = template.Must(template.New("").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="robots" content="noindex"><title>{{.Title}}</title>
<body style="font: 16px sans-serif; margin: 4em auto; max-width: 36em">
<h1>{{.Title}}</h1>
<p>{{.Detail}}</p>
<p><small>sandboxd: {{.Code}}</small></p>
`))

// answer writes a problem: as a page for browsers, as JSON for programs.
func answer(w http.ResponseWriter, req *http.Request, p api.Problem) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if p.Status == http.StatusBadGateway || p.Status == http.StatusServiceUnavailable || p.Status == http.StatusGatewayTimeout {
		h.Set("Retry-After", strconv.Itoa(1))
	}
	if !strings.Contains(req.Header.Get("Accept"), "text/html") {
		h.Set("Content-Type", api.ProblemContentType)
		w.WriteHeader(p.Status)
		_ = json.NewEncoder(w).Encode(p) // the client may be gone
		return
	}
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	w.WriteHeader(p.Status)
	_ = page.Execute(w, p) // the client may be gone
}
