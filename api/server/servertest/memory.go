package servertest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Memory is a Manager. Its zero value is not ready; use New.
type Memory struct {
	mu        sync.Mutex
	boxes     []*box // in order of creation
	keys      map[string]*box
	images    []sandbox.Image
	steps     int                // of builds
	snapshots []sandbox.Snapshot // newest first
	volumes   []sandbox.Volume
	secrets   []sandbox.Secret
	templates []sandbox.BaseTemplate
	webhooks  []sandbox.Webhook
	schedules []sandbox.Schedule
	ports     []sandbox.Port
	entries   []cost.Posted
	budgets   []cost.BudgetState
	events    []sandbox.Event
	subs      map[chan struct{}]bool

	// Fail, when set, is asked before each call with the method's name; an
	// error is returned as it is, a panic goes on.
	Fail func(method string) error
	// Values holds what secrets were set to.
	Values map[string]string
}

// box is one sandbox.
type box struct {
	sb    sandbox.Sandbox
	procs []*process
	files *files
}

// New returns a manager with one image, host.
func New() *Memory {
	return &Memory{
		keys: map[string]*box{}, subs: map[chan struct{}]bool{},
		images: []sandbox.Image{{Name: "host", Digest: "host", Kind: sandbox.ImageHost, Layers: []string{"host"}, CreatedAt: time.Now()}},
	}
}

func (m *Memory) fail(method string) error {
	if m.Fail != nil {
		return m.Fail(method)
	}
	return nil
}

// note appends an event; m.mu is held.
func (m *Memory) note(id sandbox.ID, kind, actor string) {
	m.events = append(m.events, sandbox.Event{Seq: int64(len(m.events) + 1), Time: time.Now(), Sandbox: id, Type: kind, Actor: actor})
	for c := range m.subs {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// Create implements server.Manager.
func (m *Memory) Create(_ context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
	sb, _, err := m.create(req)
	return sb, err
}

// create also tells whether the key made the sandbox before.
func (m *Memory) create(req sandbox.CreateRequest) (_ sandbox.Sandbox, existed bool, _ error) {
	if err := m.fail("Create"); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if err := req.Spec.Validate(); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.keys[req.IdempotencyKey]; b != nil && req.IdempotencyKey != "" {
		return b.sb, true, nil
	}
	if req.Spec.Image == "" {
		req.Spec.Image = "host"
	}
	if !slices.ContainsFunc(m.images, func(i sandbox.Image) bool { return i.Name == req.Spec.Image }) {
		return sandbox.Sandbox{}, false, sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image %q: 'sandbox image ls' lists them", req.Spec.Image)
	}
	for _, b := range m.boxes {
		if req.Spec.Name != "" && b.sb.Spec.Name == req.Spec.Name && !b.sb.Status.Terminal() {
			return sandbox.Sandbox{}, false, sandbox.Errorf(sandbox.ErrConflict, "name_taken", "the name %q belongs to sandbox %s: choose another", req.Spec.Name, b.sb.ID)
		}
	}
	if err := m.needVolumes(req.Spec.Volumes); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	now := time.Now()
	b := &box{sb: sandbox.Sandbox{ID: sandbox.NewID(), Owner: req.Actor, Spec: req.Spec.Clone(), Status: sandbox.StatusRunning, CreatedAt: now, StartedAt: &now, Slot: len(m.boxes)}}
	b.files = newFiles()
	m.boxes = append(m.boxes, b)
	if req.IdempotencyKey != "" {
		m.keys[req.IdempotencyKey] = b
	}
	m.note(b.sb.ID, "sandbox.created", req.Actor)
	return b.sb, false, nil
}

// find looks a sandbox up; m.mu is held.
func (m *Memory) find(ref string) (*box, error) {
	var found []*box
	for _, b := range slices.Backward(m.boxes) {
		if string(b.sb.ID) == ref {
			return b, nil
		}
		if b.sb.Spec.Name == ref && (len(found) == 0 || !b.sb.Status.Terminal()) {
			return b, nil
		}
		if sandbox.IsIDPrefix(ref) && strings.HasPrefix(string(b.sb.ID), ref) {
			found = append(found, b)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return nil, sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "no sandbox %.70q: 'sandbox ls -a' lists them", ref)
	}
	return nil, sandbox.Errorf(sandbox.ErrConflict, "ambiguous_id", "%d sandboxes begin with %q: give more of the id", len(found), ref)
}

// running finds a sandbox that runs.
func (m *Memory) running(method, ref string) (*box, error) {
	if err := m.fail(method); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil {
		return nil, err
	}
	if b.sb.Status != sandbox.StatusRunning {
		return nil, sandbox.Errorf(sandbox.ErrConflict, "not_running", "sandbox %s is %s", ref, b.sb.Status)
	}
	return b, nil
}

// Sandbox implements server.Manager.
func (m *Memory) Sandbox(_ context.Context, ref string) (sandbox.Sandbox, error) {
	if err := m.fail("Sandbox"); err != nil {
		return sandbox.Sandbox{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return b.sb, nil
}

// List implements server.Manager; a cursor is the id to go on after.
func (m *Memory) List(_ context.Context, f sandbox.Filter) (sandbox.Page, error) {
	if err := m.fail("List"); err != nil {
		return sandbox.Page{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if f.Limit == 0 {
		f.Limit = sandbox.DefaultPage
	}
	begun := f.Cursor == ""
	var page sandbox.Page
	for _, b := range slices.Backward(m.boxes) {
		if !begun {
			begun = string(b.sb.ID) == f.Cursor
			continue
		}
		if !matches(b.sb, f) {
			continue
		}
		if len(page.Items) == f.Limit {
			page.Next = string(page.Items[f.Limit-1].ID)
			break
		}
		page.Items = append(page.Items, b.sb)
	}
	if !begun {
		return page, sandbox.Errorf(sandbox.ErrInvalid, "invalid_cursor", "cursor %.40q: use next of a page", f.Cursor)
	}
	return page, nil
}

func matches(sb sandbox.Sandbox, f sandbox.Filter) bool {
	if len(f.Statuses) > 0 && !slices.Contains(f.Statuses, sb.Status) {
		return false
	}
	if len(f.Statuses) == 0 && !f.All && sb.Status.Terminal() {
		return false
	}
	if f.Owner != "" && f.Owner != sb.Owner {
		return false
	}
	for k, v := range f.Unlike {
		if got, ok := sb.Spec.Labels[k]; ok && got == v {
			return false
		}
	}
	for k, v := range f.Labels {
		if sb.Spec.Labels[k] != v {
			return false
		}
	}
	return f.Name == "" || f.Name == sb.Spec.Name
}

// move changes a sandbox's status.
func (m *Memory) move(method, ref, actor string, to sandbox.Status) (sandbox.Sandbox, error) {
	if err := m.fail(method); err != nil {
		return sandbox.Sandbox{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil || b.sb.Status == to {
		return b.record(), err
	}
	ok := b.sb.Status.CanMove(to) || (b.sb.Status == sandbox.StatusStopped && to == sandbox.StatusRunning)
	if !ok {
		return b.sb, sandbox.Errorf(sandbox.ErrConflict, "wrong_status", "sandbox %s is %s and cannot become %s", b.sb.ID, b.sb.Status, to)
	}
	b.sb.Status = to
	m.note(b.sb.ID, "sandbox."+string(to), actor)
	return b.sb, nil
}

func (b *box) record() sandbox.Sandbox {
	if b == nil {
		return sandbox.Sandbox{}
	}
	return b.sb
}

// Pause implements server.Manager.
func (m *Memory) Pause(_ context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.move("Pause", ref, actor, sandbox.StatusPaused)
}

// Resume implements server.Manager.
func (m *Memory) Resume(_ context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.move("Resume", ref, actor, sandbox.StatusRunning)
}

// Stop implements server.Manager.
func (m *Memory) Stop(_ context.Context, ref, actor string) (sandbox.Sandbox, error) {
	m.endProcesses(ref, sandbox.CodeStopped)
	return m.move("Stop", ref, actor, sandbox.StatusStopped)
}

// Start implements server.Manager.
func (m *Memory) Start(_ context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.move("Start", ref, actor, sandbox.StatusRunning)
}

// Reset implements server.Manager.
func (m *Memory) Reset(_ context.Context, ref, actor string) (sandbox.Sandbox, error) {
	if err := m.fail("Reset"); err != nil {
		return sandbox.Sandbox{}, err
	}
	m.endProcesses(ref, sandbox.CodeReset)
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil {
		return b.record(), err
	}
	if b.sb.Status != sandbox.StatusRunning {
		return b.sb, sandbox.Errorf(sandbox.ErrConflict, "wrong_status", "sandbox %s is %s and cannot be reset", b.sb.ID, b.sb.Status)
	}
	b.files = newFiles()
	m.note(b.sb.ID, "sandbox.reset", actor)
	return b.sb, nil
}

// Pool implements server.Manager.
func (m *Memory) Pool(context.Context) (sandbox.PoolStats, error) {
	return sandbox.PoolStats{Size: 2, Target: 2, Ready: 1, Hits: 3}, nil
}

// Remove implements server.Manager.
func (m *Memory) Remove(_ context.Context, ref, actor string) (sandbox.Sandbox, error) {
	if err := m.fail("Remove"); err != nil {
		return sandbox.Sandbox{}, err
	}
	m.endProcesses(ref, sandbox.CodeEnded)
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil || b.sb.Status.Terminal() {
		return b.record(), err
	}
	m.end(b, sandbox.ReasonCancelled, actor)
	return b.sb, nil
}

// end makes a sandbox terminal; m.mu is held.
func (m *Memory) end(b *box, why sandbox.Reason, actor string) {
	now := time.Now()
	b.sb.Status, b.sb.Reason, b.sb.EndedAt = sandbox.StatusCompleted, why, &now
	if n := len(b.procs); n > 0 {
		b.sb.LastOutput = b.procs[n-1].tail()
	}
	m.note(b.sb.ID, "sandbox.completed", actor)
}

// endProcesses kills the processes of a sandbox. As from the real manager, who
// reads their streams hears why, with this code.
func (m *Memory) endProcesses(ref, code string) {
	m.mu.Lock()
	b, err := m.find(ref)
	var procs []*process
	if err == nil {
		procs = slices.Clone(b.procs)
	}
	m.mu.Unlock()
	for _, p := range procs {
		p.mu.Lock()
		if p.rec.Exit == nil {
			p.cut = sandbox.Errorf(sandbox.ErrConflict, code, "sandbox %s: its processes were killed", ref)
		}
		p.mu.Unlock()
		p.signal("SIGKILL")
		<-p.done
	}
}

// Usage implements server.Manager.
func (m *Memory) Usage(_ context.Context, ref string) (sandbox.Usage, error) {
	if err := m.fail("Usage"); err != nil {
		return sandbox.Usage{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil {
		return sandbox.Usage{}, err
	}
	return sandbox.Usage{CPUSeconds: 1.5, MemoryBytes: 8 << 20, MemoryPeakBytes: 16 << 20, PIDs: uint64(len(b.procs)), Unknown: []string{"io"}}, nil
}

// UsageReport implements server.Manager: every sandbox there is, or the one.
func (m *Memory) UsageReport(_ context.Context, ref string, q sandbox.UsageQuery) (sandbox.UsageReport, error) {
	if err := m.fail("UsageReport"); err != nil {
		return sandbox.UsageReport{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	r := sandbox.UsageReport{From: q.From, To: q.To, By: q.By}
	if ref != "" {
		b, err := m.find(ref)
		if err != nil {
			return r, err
		}
		r.Lines = []sandbox.UsageLine{{Key: string(b.sb.ID), Sandboxes: 1, Meters: sandbox.Meters{CPU: 1_500_000, Starts: 1}}}
		r.Total = r.Lines[0]
	}
	return r, nil
}

// Images implements server.Manager.
func (m *Memory) Images(context.Context) ([]sandbox.Image, error) {
	if err := m.fail("Images"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.images), nil
}

// Image implements server.Manager.
func (m *Memory) Image(_ context.Context, name string) (sandbox.Image, error) {
	if err := m.fail("Image"); err != nil {
		return sandbox.Image{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, i := range m.images {
		if i.Name == name {
			return i, nil
		}
	}
	return sandbox.Image{}, sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image %.80q: 'sandbox image ls' lists them", name)
}

// RemoveImage implements server.Manager.
func (m *Memory) RemoveImage(ctx context.Context, name string) error {
	if _, err := m.Image(ctx, name); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.images = slices.DeleteFunc(m.images, func(i sandbox.Image) bool { return i.Name == name })
	return nil
}

// Events implements server.Manager.
func (m *Memory) Events(_ context.Context, after int64, ref string, limit int) ([]sandbox.Event, error) {
	if err := m.fail("Events"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var id sandbox.ID
	if ref != "" {
		b, err := m.find(ref)
		if err != nil {
			return nil, err
		}
		id = b.sb.ID
	}
	var out []sandbox.Event
	for _, e := range m.events[min(after, int64(len(m.events))):] {
		if (id == "" || e.Sandbox == id) && len(out) < limit {
			out = append(out, e)
		}
	}
	return out, nil
}

// Subscribe implements server.Manager.
func (m *Memory) Subscribe() (<-chan struct{}, func()) {
	c := make(chan struct{}, 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.subs[c] = true
	return c, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.subs, c)
	}
}

// Subscribers tells how many subscriptions are open.
func (m *Memory) Subscribers() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.subs)
}

// Doctor implements server.Manager.
func (m *Memory) Doctor(context.Context) []sandbox.Check {
	if err := m.fail("Doctor"); err != nil {
		return []sandbox.Check{{Name: "memory", Status: sandbox.CheckFail, Detail: err.Error(), Mend: "use the real daemon"}}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return []sandbox.Check{{Name: "memory", Status: sandbox.CheckOK, Detail: fmt.Sprintf("%d sandboxes kept", len(m.boxes))}}
}
