package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// kernel is a manager of sandboxes that are only rows: what outlives the
// daemon in these tests. The command of a process says what it does: "run"
// runs on, "exit N" ends at once. A check "healthy" passes, others fail.
type kernel struct {
	mu sync.Mutex
	kept
	path   string // where it is kept for the next process; empty: nowhere
	subs   map[chan struct{}]bool
	refuse func(verb, ref string) error

	rowsTake time.Duration // see rows.Agent; set before anything runs
}

// kept is what a kernel remembers.
type kept struct {
	Boxes   []*fakeBox
	Volumes map[string]bool
	Images  map[string]sandbox.Image
	Log     []sandbox.Event
	Budgets []cost.BudgetState
	Serial  int64
}

type fakeBox struct {
	sandbox.Sandbox
	Procs []*sandbox.Process
	Files map[string]string
}

func newKernel() *kernel {
	return &kernel{subs: map[chan struct{}]bool{}, kept: kept{
		Volumes: map[string]bool{}, Images: map[string]sandbox.Image{"host": {Name: "host", Digest: "host", Kind: sandbox.ImageHost}},
	}}
}

// kernelAt is a kernel as an earlier process left it, or a new one; it is kept
// for the next.
func kernelAt(t testing.TB, path string) *kernel {
	t.Helper()
	k := newKernel()
	k.path = path
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &k.kept)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return k
}

// save keeps what changed; mu is held.
func (k *kernel) save() {
	if k.path == "" {
		return
	}
	b, err := json.Marshal(k.kept)
	if err == nil {
		err = os.WriteFile(k.path+".new", b, 0o600)
	}
	if err == nil {
		err = os.Rename(k.path+".new", k.path)
	}
	if err != nil {
		panic(err)
	}
}

func (k *kernel) note(id sandbox.ID, kind string) {
	k.Serial++
	k.Log = append(k.Log, sandbox.Event{Seq: k.Serial, Sandbox: id, Type: kind})
	k.save()
	for c := range k.subs {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// refusing sets what decides on each act; nil permits all.
func (k *kernel) refusing(f func(verb, ref string) error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refuse = f
}

func (k *kernel) may(verb, ref string) error {
	if k.refuse == nil {
		return nil
	}
	return k.refuse(verb, ref)
}

func (k *kernel) find(ref string) (*fakeBox, error) {
	for _, b := range slices.Backward(k.Boxes) {
		if string(b.ID) == ref || b.Spec.Name == ref {
			return b, nil
		}
	}
	return nil, sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "no sandbox %s", ref)
}

func (k *kernel) Create(_ context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.may("create", req.Spec.Name); err != nil {
		return sandbox.Sandbox{}, err
	}
	if b, err := k.find(req.Spec.Name); err == nil && !b.Status.Terminal() {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrConflict, "name_taken", "the name is taken")
	}
	for _, v := range req.Spec.Volumes {
		if !k.Volumes[v.Volume] {
			return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrNotFound, "volume_not_found", "no volume %s", v.Volume)
		}
	}
	name := req.Spec.Image
	if name == "" {
		name = "host"
	}
	img, ok := k.Images[name]
	if !ok {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image %s", name)
	}
	req.Spec.Image, req.Spec.ImageDigest = img.Name, img.Digest
	b := &fakeBox{Sandbox: sandbox.Sandbox{ID: sandbox.NewID(), Spec: req.Spec, Owner: req.Actor, Status: sandbox.StatusRunning}, Files: map[string]string{}}
	k.Boxes = append(k.Boxes, b)
	k.note(b.ID, "sandbox.running")
	return b.Sandbox, nil
}

func (k *kernel) Sandbox(_ context.Context, ref string) (sandbox.Sandbox, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	b, err := k.find(ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return b.Sandbox, nil
}

func (k *kernel) to(verb, ref string, s sandbox.Status, from ...sandbox.Status) (sandbox.Sandbox, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.may(verb, ref); err != nil {
		return sandbox.Sandbox{}, err
	}
	b, err := k.find(ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if len(from) > 0 && !slices.Contains(from, b.Status) {
		return b.Sandbox, sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "it is %s", b.Status)
	}
	if s == sandbox.StatusStopped || s.Terminal() {
		b.Procs = nil
	}
	b.Status = s
	k.note(b.ID, "sandbox."+string(s))
	return b.Sandbox, nil
}

func (k *kernel) Pause(_ context.Context, ref, _ string) (sandbox.Sandbox, error) {
	return k.to("pause", ref, sandbox.StatusPaused, sandbox.StatusRunning)
}

func (k *kernel) Resume(_ context.Context, ref, _ string) (sandbox.Sandbox, error) {
	return k.to("resume", ref, sandbox.StatusRunning, sandbox.StatusPaused)
}

func (k *kernel) Stop(_ context.Context, ref, _ string) (sandbox.Sandbox, error) {
	return k.to("stop", ref, sandbox.StatusStopped, sandbox.StatusRunning, sandbox.StatusPaused)
}

func (k *kernel) Start(_ context.Context, ref, _ string) (sandbox.Sandbox, error) {
	return k.to("start", ref, sandbox.StatusRunning, sandbox.StatusStopped)
}

func (k *kernel) Remove(_ context.Context, ref, _ string) (sandbox.Sandbox, error) {
	return k.to("remove", ref, sandbox.StatusCompleted)
}

func (k *kernel) StartProcess(_ context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.Process, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	b, err := k.find(ref)
	if err != nil {
		return sandbox.Process{}, err
	}
	k.Serial++
	p := &sandbox.Process{ID: sandbox.ProcessID(fmt.Sprintf("p%d", k.Serial)), Argv: spec.Argv, Tag: spec.Tag, StartedAt: time.Now()}
	if spec.Argv[0] == "exit" {
		code := 0
		_, _ = fmt.Sscan(spec.Argv[1], &code)
		p.Exit = &sandbox.ExitStatus{Code: code, At: time.Now()}
	}
	b.Procs = append(b.Procs, p)
	k.note(b.ID, "process.exited")
	return *p, nil
}

func (k *kernel) Processes(_ context.Context, ref string) ([]sandbox.Process, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	b, err := k.find(ref)
	if err != nil {
		return nil, err
	}
	var all []sandbox.Process
	for _, p := range b.Procs {
		all = append(all, *p)
	}
	return all, nil
}

// kill ends the process of an agent.
func (k *kernel) kill(t testing.TB, name string, code int) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	b, err := k.find(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range b.Procs {
		if p.Exit == nil {
			p.Exit = &sandbox.ExitStatus{Code: code}
		}
	}
	k.note(b.ID, "process.exited")
}

func (k *kernel) SignalProcess(_ context.Context, ref string, id sandbox.ProcessID, _ string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	b, err := k.find(ref)
	if err != nil {
		return err
	}
	for _, p := range b.Procs {
		if p.ID == id {
			p.Exit = &sandbox.ExitStatus{Code: 137, Signal: "SIGKILL"}
		}
	}
	k.save()
	return nil
}

// fakeIO is a health check that has ended.
type fakeIO struct {
	sandbox.ProcessIO
	code int
}

func (f fakeIO) Next() (sandbox.Output, error)    { return sandbox.Output{}, io.EOF }
func (f fakeIO) Exit() (sandbox.ExitStatus, bool) { return sandbox.ExitStatus{Code: f.code}, true }
func (f fakeIO) Close() error                     { return nil }

func (k *kernel) Exec(_ context.Context, _ string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	if spec.Argv[0] == "healthy" {
		return fakeIO{}, nil
	}
	return fakeIO{code: 1}, nil
}

type fakeFiles struct {
	sandbox.Files
	k *kernel
	b *fakeBox
}

func (f fakeFiles) Write(_ context.Context, _, path string, _ uint32, r io.Reader) (sandbox.FileInfo, error) {
	data, err := io.ReadAll(r)
	f.k.mu.Lock()
	defer f.k.mu.Unlock()
	f.b.Files[path] = string(data)
	f.k.save()
	return sandbox.FileInfo{}, err
}

func (k *kernel) Files(_ context.Context, ref string) (sandbox.Files, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	b, err := k.find(ref)
	if err != nil {
		return nil, err
	}
	return fakeFiles{k: k, b: b}, nil
}

func (k *kernel) CreateVolume(_ context.Context, req sandbox.VolumeRequest) (sandbox.Volume, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.may("volume", req.Name); err != nil {
		return sandbox.Volume{}, err
	}
	if k.Volumes[req.Name] {
		return sandbox.Volume{}, sandbox.Errorf(sandbox.ErrConflict, "volume_exists", "there is one")
	}
	k.Volumes[req.Name] = true
	k.save()
	return sandbox.Volume{Name: req.Name}, nil
}

func (k *kernel) RemoveVolume(_ context.Context, name, _ string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.Volumes[name] {
		return sandbox.Errorf(sandbox.ErrNotFound, "volume_not_found", "no volume")
	}
	delete(k.Volumes, name)
	k.save()
	return nil
}

func (k *kernel) Image(_ context.Context, name string) (sandbox.Image, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	img, ok := k.Images[name]
	if !ok {
		return img, sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image %s", name)
	}
	return img, nil
}

func (k *kernel) ExportImage(_ context.Context, req sandbox.ExportRequest) (io.ReadCloser, error) {
	img, err := k.Image(context.Background(), req.Source)
	return io.NopCloser(strings.NewReader(img.Digest)), err
}

func (k *kernel) ImportImage(_ context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error) {
	digest, err := io.ReadAll(r)
	k.mu.Lock()
	defer k.mu.Unlock()
	img := sandbox.Image{Name: req.Name, Digest: string(digest), Kind: sandbox.ImageOCI}
	k.Images[req.Name] = img
	k.save()
	return img, err
}

func (k *kernel) Events(_ context.Context, after int64, _ string, limit int) ([]sandbox.Event, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []sandbox.Event
	for _, e := range k.Log {
		if e.Seq > after && len(out) < limit {
			out = append(out, e)
		}
	}
	return out, nil
}

func (k *kernel) Subscribe() (<-chan struct{}, func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := make(chan struct{}, 1)
	k.subs[c] = true
	return c, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.subs, c)
	}
}

// volumes returns the names of the volumes.
func (k *kernel) volumes() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.Volumes))
}

// running returns the names of sandboxes with a process of an agent.
func (k *kernel) running() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var names []string
	for _, b := range k.Boxes {
		live := slices.ContainsFunc(b.Procs, func(p *sandbox.Process) bool { return p.Exit == nil })
		if live && b.Status == sandbox.StatusRunning {
			names = append(names, b.Spec.Name)
		}
	}
	slices.Sort(names)
	return names
}

// look returns a sandbox as it is now, with the files written into it.
func (k *kernel) look(t testing.TB, ref string) (sandbox.Spec, map[string]string) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	b, err := k.find(ref)
	if err != nil {
		t.Fatal(err)
	}
	return b.Spec, maps.Clone(b.Files)
}

// living returns the names of sandboxes that have not ended.
func (k *kernel) living() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var names []string
	for _, b := range k.Boxes {
		if !b.Status.Terminal() {
			names = append(names, b.Spec.Name)
		}
	}
	slices.Sort(names)
	return names
}

// ledger is what tests enter.
type ledger struct {
	mu    sync.Mutex
	money map[project.AgentID]project.Money
}

func (b *ledger) Money(context.Context, project.ID) (map[project.AgentID]project.Money, project.Money, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.money), project.Money{}, nil
}

func (b *ledger) Enter(_ context.Context, _ project.ID, _ sandbox.ID, e project.Entry, _ string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.money[e.Agent]
	if e.Kind == cost.KindRevenue {
		m.Revenue = m.Revenue.Add(cost.SumOf(e.Amount))
	} else {
		m.Cost = m.Cost.Add(cost.SumOf(e.Amount))
	}
	b.money[e.Agent] = m
	return nil
}

func (b *ledger) set(id project.AgentID, spent, earned cost.Nano) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.money[id] = project.Money{Cost: cost.SumOf(spent), Revenue: cost.SumOf(earned)}
}

// host is a machine: two databases and two worlds, which outlive the lab.
type host struct {
	t        testing.TB
	dir      string
	lab, far *kernel
	books    *ledger
	step     func(string) error
	*Lab
	dbs []*state.DB
}

func newHost(t testing.TB) *host {
	h := &host{t: t, dir: t.TempDir(), lab: newKernel(), far: newKernel(), books: &ledger{money: map[project.AgentID]project.Money{}}}
	t.Cleanup(h.stop)
	h.start()
	return h
}

// hostAt is a machine as an earlier process left it; its lab does not run.
func hostAt(t testing.TB, dir string) *host {
	h := &host{
		t: t, dir: dir, lab: kernelAt(t, filepath.Join(dir, "lab.json")), far: kernelAt(t, filepath.Join(dir, "far.json")),
		books: &ledger{money: map[project.AgentID]project.Money{}},
	}
	t.Cleanup(h.stop)
	return h
}

func (h *host) open(name string) *state.DB {
	db, err := state.Open(context.Background(), filepath.Join(h.dir, name))
	if err != nil {
		h.t.Fatal(err)
	}
	h.dbs = append(h.dbs, db)
	return db
}

// rows are a world's, whose events are the kernel's: in a daemon both are in
// one log.
type rows struct {
	*state.DB
	k *kernel
}

func (r rows) AppendEvent(_ context.Context, e sandbox.Event) (int64, error) {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	r.k.note("", e.Type)
	return r.k.Serial, nil
}

// Agent takes as long as the kernel is made to: a busy host's database.
func (r rows) Agent(ctx context.Context, id project.AgentID) (project.Agent, error) {
	a, err := r.DB.Agent(ctx, id)
	<-time.After(r.k.rowsTake)
	return a, err
}

func (h *host) start() {
	h.t.Helper()
	store := rows{h.open("sandboxd.db"), h.lab}
	there, _ := filepath.Glob(filepath.Join(h.dir, "production.db"))
	l := New(Config{
		Store: store, Sandboxes: h.lab, Books: h.books, InProduction: len(there) > 0,
		Production: func(context.Context) (World, error) { return World{rows{h.open("production.db"), h.far}, h.far}, nil },
		NextRun: func(expression string, after time.Time) (time.Time, error) {
			d, err := time.ParseDuration(expression)
			return after.Add(d), err
		},
		Allowance: Allowance{Meter: "tokens", Limit: 100, Factor: 10, Period: cost.Day}, Tick: 20 * time.Millisecond, Window: 400 * time.Millisecond,
		Step: func(s string) error {
			if h.step == nil {
				return nil
			}
			return h.step(s)
		},
	})
	if err := l.Start(context.Background()); err != nil {
		h.t.Fatal(err)
	}
	h.Lab = l
}

// stop ends the lab as a daemon's end does; sandboxes go on.
func (h *host) stop() {
	h.t.Helper()
	if h.Lab == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err := h.Close(ctx)
	for _, db := range h.dbs {
		err = errors.Join(err, db.Close())
	}
	h.dbs, h.Lab = nil, nil
	if err != nil {
		h.t.Error(err)
	}
}

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, what, ok)
}

func (h *host) project(name string, s project.Settings) project.Project {
	h.t.Helper()
	p, err := h.CreateProject(h.t.Context(), project.Request{Name: name, Settings: s, Actor: "uid:0"})
	if err != nil {
		h.t.Fatal(err)
	}
	return p
}

func (h *host) deploy(p project.Project, kind string, spec project.AgentSpec) project.Agent {
	h.t.Helper()
	if spec.Command == nil {
		spec.Command = []string{"run"}
	}
	a, err := h.Deploy(h.t.Context(), string(p.ID), kind, spec, "uid:0")
	if err != nil {
		h.t.Fatal(err)
	}
	return a
}

func (h *host) view(p project.Project) project.View {
	h.t.Helper()
	v, err := h.View(context.Background(), string(p.ID))
	if err != nil {
		h.t.Fatal(err)
	}
	return v
}

func (h *host) agent(id project.AgentID) project.Agent {
	h.t.Helper()
	s, err := h.supervisorOf(context.Background(), id)
	if err != nil {
		h.t.Fatal(err)
	}
	a, err := s.world.Rows.Agent(context.Background(), id)
	if err != nil {
		h.t.Fatal(err)
	}
	return a
}

// becomes waits for an agent's status.
func (h *host) becomes(id project.AgentID, want project.AgentStatus) project.Agent {
	h.t.Helper()
	var a project.Agent
	until(h.t, string(id)+" becomes "+string(want), func() bool { a = h.agent(id); return a.Status == want })
	return a
}

func (k *kernel) SetBudget(_ context.Context, req cost.BudgetRequest) (cost.BudgetState, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.may("budget", req.Agent); err != nil {
		return cost.BudgetState{}, err
	}
	b, err := req.Budget()
	if err != nil {
		return cost.BudgetState{}, err
	}
	s := cost.BudgetState{StoredBudget: cost.StoredBudget{Key: cost.NewBudgetKey(), Budget: b, Actor: req.Actor}, Limit: b.Meter.FormatLimit(b.Limit)}
	i := slices.IndexFunc(k.kept.Budgets, func(o cost.BudgetState) bool {
		return o.Scope == b.Scope && o.ID == b.ID && o.Meter == b.Meter && o.Period == b.Period
	})
	if i < 0 {
		k.kept.Budgets = append(k.kept.Budgets, s)
	} else {
		s.Key = k.kept.Budgets[i].Key
		k.kept.Budgets[i] = s
	}
	k.save()
	return s, nil
}

func (k *kernel) Budgets(context.Context) ([]cost.BudgetState, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.kept.Budgets), nil
}

func (k *kernel) RemoveBudget(_ context.Context, key, _ string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	before := len(k.kept.Budgets)
	k.kept.Budgets = slices.DeleteFunc(k.kept.Budgets, func(b cost.BudgetState) bool { return b.Key == key })
	k.save()
	if len(k.kept.Budgets) == before {
		return sandbox.Errorf(sandbox.ErrNotFound, "budget_not_found", "no budget %s", key)
	}
	return nil
}
