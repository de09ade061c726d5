package e2b

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestDeeds(t *testing.T) {
	r := httptest.NewRequest(http.MethodPost, "/sandboxes", http.NoBody)
	r.Pattern = "POST /sandboxes"
	if d := deedOf(r, http.StatusCreated, entry{SandboxID: "sbaaaaaaaaaaaa"}, nil); d != (Deed{"e2b POST /sandboxes", "sbaaaaaaaaaaaa", 201, ""}) {
		t.Errorf("%+v", d)
	}
	r.SetPathValue("id", "sbbbbbbbbbbbbb")
	if d := deedOf(r, 0, nil, sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "no")); d != (Deed{"e2b POST /sandboxes", "sbbbbbbbbbbbbb", 404, "sandbox_not_found"}) {
		t.Errorf("%+v", d)
	}
	for path, want := range map[string]bool{
		"/process.Process/Start": true, "/filesystem.Filesystem/Remove": true, "/files": true,
		"/process.Process/List": false, "/filesystem.Filesystem/Stat": false, "/health": false,
	} {
		if changesData(httptest.NewRequest(http.MethodPost, path, http.NoBody)) != want {
			t.Errorf("%s: want %v", path, want)
		}
	}
	if changesData(httptest.NewRequest(http.MethodGet, "/files", http.NoBody)) {
		t.Error("a download changes something")
	}
}

// TestNotedOnce tells the first status of an answer, interim ones left out.
func TestNotedOnce(t *testing.T) {
	var told []int
	w := &notedAnswer{ResponseWriter: httptest.NewRecorder(), note: func(status int) { told = append(told, status) }}
	w.WriteHeader(http.StatusEarlyHints)
	w.WriteHeader(http.StatusConflict)
	_, _ = w.Write([]byte("x")) // a recorder takes all
	if len(told) != 1 || told[0] != http.StatusConflict {
		t.Errorf("%v", told)
	}
	w = &notedAnswer{ResponseWriter: httptest.NewRecorder(), note: func(status int) { told = append(told, status) }}
	_, _ = w.Write([]byte("x"))
	if len(told) != 2 || told[1] != http.StatusOK {
		t.Errorf("%v", told)
	}
}
