//go:build root

package faults

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// oracles: what another owner has is answered as what nobody has, byte for
// byte on every route that names a sandbox, and in the same time.
func (w *tenants) oracles(t *testing.T) {
	w.t = t
	w.root("PUT", "/v1/owners/gina", roomy)
	w.key("gina", "gina", "developer")
	theirs := w.make("gina", `{"name":"ginas","network":{"mode":"allow","allow":["example.com:443"]},`+small+`}`)
	none := string(sandbox.NewID())
	asked := 0
	fred := func() string { // somebody new in time: an owner's many refusals are held back
		who := fmt.Sprintf("fred%d", asked/40)
		if asked%40 == 0 {
			w.key(who, who, "developer")
		}
		asked++
		return who
	}
	var doc struct {
		Paths map[string]map[string]struct {
			OperationID string `json:"operationId"`
			Parameters  []struct {
				Name, In string
				Required bool
			}
		}
	}
	if err := json.Unmarshal([]byte(w.native("root", "GET", "/openapi.json", "").body), &doc); err != nil {
		t.Fatal(err)
	}
	fill := strings.NewReplacer("{pid}", "p1", "{port}", "80", "{id}", "x")
	missing := 0
	for path, methods := range doc.Paths {
		if !strings.Contains(path, "/v1/sandboxes/{ref}") {
			continue
		}
		for method, op := range methods {
			var query []string
			for _, p := range op.Parameters {
				value := map[string]string{"path": "/tmp", "port": "80", "host": "example.com", "to": "example.com"}[p.Name]
				if p.In == "query" && (p.Required || op.OperationID == "explain-network" && value != "") {
					query = append(query, p.Name+"="+value)
				}
			}
			method := strings.ToUpper(method)
			ask := func(who, ref string) reply {
				body := ""
				if method != "GET" && method != "DELETE" {
					body = "{}"
				}
				a := w.native(who, method, fill.Replace(strings.Replace(path, "{ref}", ref, 1))+"?"+strings.Join(query, "&"), body)
				a.body = strings.ReplaceAll(a.body, ref, "REF")
				return a
			}
			for _, pair := range [][2]string{{theirs, none}, {"ginas", "noone"}, {theirs[:8], none[:8]}} {
				foreign, absent := ask(fred(), pair[0]), ask(fred(), pair[1])
				if foreign != absent {
					t.Errorf("%s %s: another's %s: %d %s; none: %d %s", method, path, pair[0], foreign.status, foreign.body, absent.status, absent.body)
				}
				if absent.status == http.StatusNotFound {
					missing++
				}
			}
		}
	}
	if missing < 60 {
		t.Errorf("%d of the questions were about the sandbox", missing)
	}
	for _, path := range []string{"", "/network", "/network/explain?to=example.com:443"} { // the control
		if a := w.native("gina", "GET", "/v1/sandboxes/"+theirs+path, ""); a.status == http.StatusNotFound {
			t.Errorf("%s of one's own: %d %s", path, a.status, a.body)
		}
	}
	tr := w.transport()
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr, Timeout: time.Minute}
	timed := func(ref string) time.Duration {
		key := w.keys[fred()]
		began := time.Now()
		res, err := w.send(c, "GET", "http://x/v1/sandboxes/"+ref, "", "X-API-Key", key)
		took := time.Since(began)
		if err != nil || res.StatusCode != http.StatusNotFound {
			t.Fatalf("%s: %v %v", ref, res, err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		return took
	}
	for _, pair := range [][2]string{{theirs, none}, {"ginas", "noone"}} {
		var foreign, absent []time.Duration
		worth := 0.0
		for range 4 { // more where it is not clear
			for range 1000 {
				foreign, absent = append(foreign, timed(pair[0])), append(absent, timed(pair[1]))
			}
			if worth = auc(foreign, absent); worth > 0.45 && worth < 0.55 {
				break
			}
		}
		t.Logf("%s and %s are told apart by their time with AUC %.3f, of %d pairs", pair[0], pair[1], worth, len(foreign))
		if worth < 0.4 || worth > 0.6 {
			t.Errorf("another's %s is told from %s by its time: AUC %.3f", pair[0], pair[1], worth)
		}
	}
}

// auc is how often one of a is longer than one of b.
func auc(a, b []time.Duration) float64 {
	slices.Sort(b)
	sum := 0.0
	for _, x := range a {
		below, _ := slices.BinarySearch(b, x)
		notAbove, _ := slices.BinarySearch(b, x+1)
		sum += float64(below) + float64(notAbove-below)/2
	}
	return sum / float64(len(a)) / float64(len(b))
}
