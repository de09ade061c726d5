package e2b

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Messages of watching.
type (
	watchRequest struct {
		Path         string `json:"path"`
		Recursive    bool   `json:"recursive"`
		IncludeEntry bool   `json:"includeEntry"`
	}
	watchMessage struct {
		Start      *emptyMessage `json:"start,omitempty"`
		Filesystem *fileEvent    `json:"filesystem,omitempty"`
		Keepalive  *emptyMessage `json:"keepalive,omitempty"`
	}
	fileEvent struct {
		Name  string     `json:"name"`
		Type  string     `json:"type"`
		Entry *entryInfo `json:"entry,omitempty"`
	}
	watcherMessage struct {
		WatcherID string `json:"watcherId"`
	}
	eventList struct {
		Events []fileEvent `json:"events"`
	}
)

var eventTypes = map[string]string{
	"create": "EVENT_TYPE_CREATE", "write": "EVENT_TYPE_WRITE", "remove": "EVENT_TYPE_REMOVE",
	"rename": "EVENT_TYPE_RENAME", "chmod": "EVENT_TYPE_CHMOD",
}

// following is one watch.
type following struct {
	a     *agent
	w     sandbox.FileWatch
	root  string
	entry bool   // tell what stands at the path, too
	close func() // ends it; may be repeated
}

// follow begins a watch, which outlives nothing of ctx.
func (c *call) watch(ctx context.Context, req watchRequest) (*following, error) {
	a, p, err := c.work(req.Path)
	if err != nil {
		return nil, err
	}
	w, err := a.Watch(ctx, a.as, p, req.Recursive)
	if err != nil {
		return nil, err
	}
	return &following{a: a, w: w, root: p, entry: req.IncludeEntry, close: sync.OnceFunc(func() { _ = w.Close() })}, nil
}

// next waits for the next event that the protocol has a word for.
func (f *following) next(ctx context.Context) (fileEvent, error) {
	for {
		e, err := f.w.Next()
		if err != nil {
			return fileEvent{}, err
		}
		if e.Op == "overflow" {
			return fileEvent{}, rpcErrorf(codeDataLoss, "more changed beneath %.200q than could be told: watch again, and list it", f.root)
		}
		kind, ok := eventTypes[e.Op]
		if !ok {
			continue
		}
		ev := fileEvent{Name: relative(f.root, e.Path), Type: kind}
		if f.entry && e.Op != "remove" && e.Op != "rename" {
			if info, err := f.a.Stat(ctx, f.a.as, e.Path); err == nil {
				entry := entryOf(info)
				ev.Entry = &entry
			}
		}
		return ev, nil
	}
}

// relative names a path as seen from the directory that is watched.
func relative(root, p string) string {
	if p == root {
		return "."
	}
	return strings.TrimPrefix(strings.TrimPrefix(p, strings.TrimSuffix(root, "/")), "/")
}

// watchDir streams what changes in a directory.
func (c *call) watchDir(req watchRequest, out *stream) error {
	after, limited, err := deadline(c.r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(c.ctx())
	defer cancel()
	f, err := c.watch(ctx, req)
	if err != nil {
		return err
	}
	defer f.close()
	defer context.AfterFunc(ctx, f.close)()
	if err := out.send(watchMessage{Start: &emptyMessage{}}); err != nil {
		return nil
	}
	go out.keepAlive(ctx, keepaliveEvery(c.r), watchMessage{Keepalive: &emptyMessage{}})
	late := make(chan struct{})
	if limited {
		defer time.AfterFunc(after, func() { close(late); f.close() }).Stop()
	}
	for {
		e, err := f.next(ctx)
		if err == nil {
			if out.send(watchMessage{Filesystem: &e}) != nil {
				return nil
			}
			continue
		}
		select {
		case <-late:
			return rpcErrorf(codeDeadlineExceeded, "the time given to the watch is over")
		default:
		}
		return c.watchEnded(err)
	}
}

// watchEnded says how a watch that broke off is told to the client.
func (c *call) watchEnded(err error) error {
	var told *rpcError
	switch {
	case errors.As(err, &told):
		return told
	case c.ctx().Err() != nil:
		return nil
	case endedWith(err): // which says why
		return err
	case c.gone():
		return errAbort
	case errors.Is(err, io.EOF):
		return rpcErrorf(codeNotFound, "the directory that was watched is gone")
	}
	return err
}

// Bounds of watchers that clients poll.
const (
	maxWatchers      = 64 // of one sandbox
	maxWatcherEvents = 10_000
	// watcherIdle is how long one nobody asks lives on.
	watcherIdle = 10 * time.Minute
)

// watchers are those whose events are asked for, by their id.
type watchers struct {
	mu   sync.Mutex
	open map[string]*watcher
}

// watcher gathers events until they are asked for.
type watcher struct {
	ref  string
	f    *following
	idle *time.Timer

	mu     sync.Mutex
	events []fileEvent
	err    error // what came in place of the next event
}

func (c *call) createWatcher(req watchRequest) (any, error) {
	if c.watchers.of(c.ref) >= maxWatchers {
		return nil, rpcErrorf(codeResourceExhausted, "the sandbox has %d watchers: remove some", maxWatchers)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.ctx()))
	f, err := c.watch(ctx, req)
	if err != nil {
		cancel()
		return nil, err
	}
	id := "w" + strings.ToLower(rand.Text())
	w := &watcher{ref: c.ref, f: f}
	w.idle = time.AfterFunc(watcherIdle, func() { c.watchers.drop(id) })
	c.watchers.mu.Lock()
	c.watchers.open[id] = w
	c.watchers.mu.Unlock()
	go func() {
		defer cancel()
		defer f.close()
		w.gather(ctx)
		if c.gone() {
			c.watchers.drop(id)
		}
	}()
	return watcherMessage{id}, nil
}

// gather collects events until the watch ends.
func (w *watcher) gather(ctx context.Context) {
	for {
		e, err := w.f.next(ctx)
		w.mu.Lock()
		if err == nil && len(w.events) >= maxWatcherEvents {
			err = rpcErrorf(codeResourceExhausted, "more than %d events were not asked for: watch again", maxWatcherEvents)
		}
		if err != nil {
			w.err = err
		} else {
			w.events = append(w.events, e)
		}
		w.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// take returns the events since the last call.
func (w *watcher) take() ([]fileEvent, error) {
	w.idle.Reset(watcherIdle)
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.events) == 0 && w.err != nil {
		return nil, w.err
	}
	events := w.events
	w.events = nil
	if events == nil {
		events = []fileEvent{}
	}
	return events, nil
}

func (c *call) watcherEvents(req watcherMessage) (any, error) {
	w := c.watchers.get(c.ref, req.WatcherID)
	if w == nil {
		return nil, rpcErrorf(codeNotFound, "watcher %.60q not found", req.WatcherID)
	}
	events, err := w.take()
	if errors.Is(err, io.EOF) {
		err = rpcErrorf(codeNotFound, "the directory that was watched is gone")
	}
	if err != nil {
		return nil, err
	}
	return eventList{events}, nil
}

func (c *call) removeWatcher(req watcherMessage) (any, error) {
	if c.watchers.get(c.ref, req.WatcherID) == nil {
		return nil, rpcErrorf(codeNotFound, "watcher %.60q not found", req.WatcherID)
	}
	c.watchers.drop(req.WatcherID)
	return emptyMessage{}, nil
}

// of counts those of a sandbox.
func (ws *watchers) of(ref string) int {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	n := 0
	for _, w := range ws.open {
		if w.ref == ref {
			n++
		}
	}
	return n
}

// get finds one of a sandbox.
func (ws *watchers) get(ref, id string) *watcher {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w := ws.open[id]; w != nil && w.ref == ref {
		return w
	}
	return nil
}

// drop ends one; repeating it does nothing.
func (ws *watchers) drop(id string) {
	ws.mu.Lock()
	w := ws.open[id]
	delete(ws.open, id)
	ws.mu.Unlock()
	if w != nil {
		w.idle.Stop()
		w.f.close()
	}
}
