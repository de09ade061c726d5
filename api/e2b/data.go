package e2b

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// defaultUser is who acts where a request names nobody, if the sandbox has
// such a user; else it is the sandbox's own default.
const defaultUser = "user"

// dataPlane serves processes and files of sandboxes. What it keeps are the
// watchers that clients ask for events.
type dataPlane struct {
	m        Manager
	log      *slog.Logger
	watchers watchers
}

func newDataPlane(m Manager, log *slog.Logger) *dataPlane {
	return &dataPlane{m: m, log: log, watchers: watchers{open: map[string]*watcher{}}}
}

// call is one request to one sandbox.
type call struct {
	*dataPlane
	w   http.ResponseWriter
	r   *http.Request
	box sandbox.Sandbox
	ref string // its id
}

func (c *call) ctx() context.Context { return c.r.Context() }

// unaryMethods and streamMethods are all there is.
var (
	unaryMethods = map[string]unary{
		"process.Process/List":                   method((*call).listProcesses),
		"process.Process/SendInput":              method((*call).sendInput),
		"process.Process/SendSignal":             method((*call).sendSignal),
		"process.Process/CloseStdin":             method((*call).closeStdin),
		"process.Process/Update":                 method((*call).update),
		"filesystem.Filesystem/Stat":             method((*call).stat),
		"filesystem.Filesystem/MakeDir":          method((*call).makeDir),
		"filesystem.Filesystem/Move":             method((*call).move),
		"filesystem.Filesystem/ListDir":          method((*call).listDir),
		"filesystem.Filesystem/Remove":           method((*call).remove),
		"filesystem.Filesystem/CreateWatcher":    method((*call).createWatcher),
		"filesystem.Filesystem/GetWatcherEvents": method((*call).watcherEvents),
		"filesystem.Filesystem/RemoveWatcher":    method((*call).removeWatcher),
	}
	streamMethods = map[string]streaming{
		"process.Process/Start":          streamMethod((*call).start),
		"process.Process/Connect":        streamMethod((*call).connect),
		"filesystem.Filesystem/WatchDir": streamMethod((*call).watchDir),
	}
)

// handler answers requests to a sandbox's data port, whose token or signature
// was looked at.
func (d *dataPlane) handler(box sandbox.Sandbox) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, end := sandbox.WithEnd(r.Context())
		defer end()
		r = r.WithContext(ctx)
		c := &call{dataPlane: d, w: w, r: r, box: box, ref: string(box.ID)}
		w.Header().Set("Cache-Control", "no-store")
		if box.Status != sandbox.StatusRunning {
			noSandbox(w, string(box.ID))
			return
		}
		c.route()
	})
}

func (c *call) route() {
	name := strings.TrimPrefix(c.r.URL.Path, "/")
	switch name {
	case "health":
		c.w.WriteHeader(http.StatusNoContent)
		return
	case "files":
		c.files()
		return
	case "metrics":
		c.metrics()
		return
	}
	u, isUnary := unaryMethods[name]
	s, isStream := streamMethods[name]
	switch {
	case !isUnary && !isStream:
		writeFault(c.w, http.StatusNotFound, "there is nothing at this path")
	case c.r.Method != http.MethodPost:
		c.w.Header().Set("Allow", http.MethodPost)
		c.w.WriteHeader(http.StatusMethodNotAllowed)
	case isUnary:
		serveUnary(c, u)
	default:
		serveStream(c, s)
	}
}

// metrics tells what the agent in a sandbox would; the control plane's has more.
func (c *call) metrics() {
	l := c.box.Spec.Limits
	answer(c.w, http.StatusOK, map[string]any{"ts": time.Now().Unix(), "cpu_count": l.CPUs, "mem_total": l.MemoryBytes})
}

// user is whom a request names by HTTP basic authentication, empty if nobody.
func (c *call) user() string {
	name, _, _ := c.r.BasicAuth()
	return name
}

// asUser runs f as the named user. Where nobody is named it tries the usual
// one first, and takes the sandbox's own in an image that has none.
func asUser[T any](name string, f func(user string) (T, error)) (T, error) {
	if name != "" {
		return f(name)
	}
	v, err := f(defaultUser)
	if sandbox.CodeOf(err) == codeUnknownUser {
		return f("")
	}
	return v, err
}

// codeUnknownUser is the code of an error about a user the sandbox has not.
const codeUnknownUser = "unknown_user"

// gone reports whether the sandbox does not run any more, so that a broken
// stream is its end and not a fault.
func (c *call) gone() bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx()), 5*time.Second)
	defer cancel()
	box, err := c.m.Sandbox(ctx, c.ref)
	return err != nil || box.Status != sandbox.StatusRunning
}

// endedWith reports whether a stream broke off with its sandbox, and says how.
func endedWith(err error) bool {
	switch sandbox.CodeOf(err) {
	case sandbox.CodeEnded, sandbox.CodeStopped, sandbox.CodeReset:
		return true
	}
	return false
}

// writeFault answers a plain HTTP request with an error.
func writeFault(w http.ResponseWriter, status int, message string) {
	answer(w, status, failure{Code: status, Message: message})
}
