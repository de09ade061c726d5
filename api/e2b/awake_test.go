package e2b

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// pauseAt has the sandbox's deadline come when the manager is asked for one of
// the methods, the first n times. What needs it awake is refused while it rests.
func (w *world) pauseAt(n int, methods ...string) {
	w.mem.Fail = func(method string) error {
		if !slices.Contains(methods, method) {
			return nil
		}
		if n--; n >= 0 {
			if _, err := w.mem.Pause(context.Background(), string(w.box.ID), "daemon"); err != nil {
				return err
			}
		}
		if method != "SetDeadline" && w.status() == sandbox.StatusPaused {
			return sandbox.Errorf(sandbox.ErrConflict, "sandbox_paused", "sandbox %s is paused", w.box.ID)
		}
		return nil
	}
}

func (w *world) status() sandbox.Status {
	box, err := w.mem.Sandbox(context.Background(), string(w.box.ID))
	if err != nil {
		w.t.Error(err)
	}
	return box.Status
}

// TestConnectAtTheDeadline: what connect says runs does run.
func TestConnectAtTheDeadline(t *testing.T) {
	for pauses, c := range []struct {
		want   int
		status sandbox.Status
	}{
		{http.StatusOK, sandbox.StatusRunning}, // the control
		{http.StatusCreated, sandbox.StatusRunning},
		{http.StatusCreated, sandbox.StatusRunning},
		{http.StatusConflict, sandbox.StatusPaused},
	} {
		w := newWorld(t)
		w.pauseAt(pauses, "SetDeadline")
		status, b := w.do(http.MethodPost, "/sandboxes/"+string(w.box.ID)+"/connect", `{"timeout":60}`, keyHeader, "alice")
		if is := w.status(); status != c.want || is != c.status {
			t.Errorf("%d deadlines: %d %s, and it is %s; want %d, %s", pauses, status, b, is, c.want, c.status)
		}
	}
}

// TestTimeoutAtTheDeadline: who gives more time to a sandbox that was paused
// just before is told so.
func TestTimeoutAtTheDeadline(t *testing.T) {
	for path, body := range map[string]string{"/timeout": `{"timeout":60}`, "/refreshes": `{"duration":60}`} {
		for pauses, want := range []int{http.StatusNoContent, http.StatusNotFound} { // the control first
			w := newWorld(t)
			w.pauseAt(pauses, "SetDeadline")
			if status, b := w.do(http.MethodPost, "/sandboxes/"+string(w.box.ID)+path, body, keyHeader, "alice"); status != want {
				t.Errorf("%s, %d deadlines: %d %s, want %d", path, pauses, status, b, want)
			}
		}
	}
}

// TestTrafficAtTheDeadline: a request that was let in while the sandbox ran
// wakes it as one that comes a moment later. The control is a sandbox that
// traffic does not wake.
func TestTrafficAtTheDeadline(t *testing.T) {
	inside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "inside") }))
	t.Cleanup(inside.Close)
	for name, c := range map[string]struct {
		method string // at which the deadline comes
		send   func(w *world) (int, string)
		has    string
	}{
		"port": {"DialPort", func(w *world) (int, string) {
			return w.do(http.MethodGet, "/", "", sandboxHeader, string(w.box.ID), portHeader, "8000")
		}, "inside"},
		"file": {"Files", func(w *world) (int, string) { return w.acts(w.token) }, `"/x"`},
		"command": {"Exec", func(w *world) (int, string) {
			return w.do(http.MethodPost, "/process.Process/Start", string(framed(`{"process":{"cmd":"exit","args":["0"],"cwd":"/"},"stdin":false}`)), "Content-Type", typeStream, tokenHeader, w.token)
		}, `"end"`},
		"input": {"Attach", func(w *world) (int, string) {
			if _, err := w.mem.StartProcess(t.Context(), string(w.box.ID), sandbox.ProcessSpec{Argv: []string{"cat"}, Stdin: true, Tag: "cat"}); err != nil {
				t.Fatal(err)
			}
			return w.do(http.MethodPost, "/process.Process/SendInput", `{"process":{"tag":"cat"},"input":{"stdin":"aGk="}}`, "Content-Type", typeUnary, tokenHeader, w.token)
		}, "{}"},
	} {
		for _, wakes := range []bool{true, false} {
			t.Run(fmt.Sprint(name, " wakes ", wakes), func(t *testing.T) {
				w := newWorldOf(t, note{AutoResume: wakes})
				w.mem.to = inside.Listener.Addr().String()
				w.pauseAt(1, c.method)
				status, b := c.send(w)
				if runs := w.status() == sandbox.StatusRunning; runs != wakes || (status == http.StatusOK && strings.Contains(b, c.has)) != wakes {
					t.Errorf("%d %s; it runs: %v", status, b, runs)
				}
			})
		}
	}
}
