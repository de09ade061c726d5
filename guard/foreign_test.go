package guard

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// backend is a manager of which the tests need little: whoever reaches a method
// it does not have, panics, which the tests take for having got through.
type backend struct {
	server.Manager
	images   []sandbox.Image
	webhooks []sandbox.Webhook
	budgets  []cost.BudgetState
	entries  []cost.Posted
	named    []sandbox.BaseTemplate
	create   func(context.Context, sandbox.CreateRequest) (sandbox.Sandbox, error)
	take     func(context.Context) // an import
}

func (b *backend) ImportImage(ctx context.Context, _ sandbox.ImportRequest, _ io.Reader) (sandbox.Image, error) {
	if b.take != nil {
		b.take(ctx)
	}
	return sandbox.Image{}, errThrough
}

func (b *backend) ImportSnapshot(ctx context.Context, _, _ string, _ io.Reader) (sandbox.Snapshot, error) {
	if b.take != nil {
		b.take(ctx)
	}
	return sandbox.Snapshot{}, errThrough
}

func (b *backend) Create(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
	if b.create == nil {
		return sandbox.Sandbox{}, errThrough
	}
	return b.create(ctx, req)
}

func (b *backend) Fork(context.Context, string, sandbox.ForkRequest) ([]sandbox.Fork, error) {
	return nil, errThrough // not from the goroutine of a test
}

func (b *backend) Images(context.Context) ([]sandbox.Image, error) { return b.images, nil }

func (b *backend) Image(_ context.Context, name string) (sandbox.Image, error) {
	for _, img := range b.images {
		if img.Name == name || strings.HasSuffix(name, "@"+img.Digest) {
			return img, nil
		}
	}
	return sandbox.Image{}, sandbox.ImageNotFound(name)
}

func (b *backend) Webhook(_ context.Context, id string) (sandbox.Webhook, error) {
	for _, w := range b.webhooks {
		if w.ID == id {
			return w, nil
		}
	}
	return sandbox.Webhook{}, noWebhook(id)
}

func (b *backend) Templates(context.Context, string) ([]sandbox.BaseTemplate, error) {
	return b.named, nil
}

func (b *backend) SetTemplate(_ context.Context, req sandbox.TemplateRequest) (sandbox.BaseTemplate, error) {
	return sandbox.BaseTemplate{Name: req.Name, Owner: req.Actor, Private: req.Private, Image: req.Source}, nil
}

func (b *backend) Budgets(context.Context) ([]cost.BudgetState, error) { return b.budgets, nil }

func (b *backend) Budget(_ context.Context, key string) (cost.BudgetState, error) {
	for _, v := range b.budgets {
		if v.Key == key {
			return v, nil
		}
	}
	return cost.BudgetState{}, noBudget(key)
}

func (b *backend) Entry(_ context.Context, number int64) (cost.Posted, error) {
	for _, e := range b.entries {
		if e.Number == number {
			return e, nil
		}
	}
	return cost.Posted{}, cost.EntryNotFound(number)
}

func (b *backend) RemoveSecret(_ context.Context, name, _ string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "secret_not_found", "no secret %q", name)
}

type quotas struct{ q access.Quota }

func (q quotas) Quota(context.Context, string) (access.Quota, error) { return q.q, nil }

// town is a guard with what two owners have in it.
type town struct {
	*Manager
	lab  *Lab
	db   *state.DB
	back *backend
	// of each kind of object: what each owner has, by what it can be called
	refs map[string]map[string][]string
}

func (w *town) as(owner string, role access.Role) context.Context {
	return access.With(context.Background(), access.Caller{Owner: owner, Role: role})
}

const alice, bob = "alice", "bob"

func newTown(t *testing.T, q access.Quota) *town {
	t.Helper()
	db, err := state.Open(t.Context(), filepath.Join(t.TempDir(), "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	back := &backend{}
	w := &town{db: db, back: back, refs: map[string]map[string][]string{}}
	w.Manager = New(Config{Manager: back, Rows: db, Quotas: quotas{q}, Defaults: sandbox.Limits{CPUs: 1, MemoryBytes: 1 << 28, DiskBytes: 1 << 30}})
	w.lab = w.Lab(nil)
	for _, owner := range []string{alice, bob} {
		w.settle(t, owner)
	}
	return w
}

func (w *town) has(owner, kind string, refs ...string) {
	if w.refs[kind] == nil {
		w.refs[kind] = map[string][]string{}
	}
	w.refs[kind][owner] = refs
}

// settle gives an owner one of each.
func (w *town) settle(t *testing.T, owner string) {
	t.Helper()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	name := owner + "-thing"
	sb, _, err := w.db.CreateSandbox(t.Context(), state.CreateParams{
		Sandbox: sandbox.Sandbox{ID: sandbox.NewID(), Owner: owner, Spec: sandbox.Spec{Name: name}}, Slots: 10, Status: sandbox.StatusRunning, Actor: owner,
	})
	ok(err)
	w.has(owner, "sandbox", string(sb.ID), name, string(sb.ID[:9]))
	s := sandbox.Snapshot{ID: sandbox.NewSnapshotID(), Name: name, Owner: owner, Sandbox: sb.ID, Kind: sandbox.SnapshotManual, CreatedAt: time.Now()}
	ok(w.db.ReserveSnapshot(t.Context(), s))
	ok(w.db.PutSnapshot(t.Context(), s, ""))
	w.has(owner, "snapshot", string(s.ID), name, string(s.ID[:9]))
	c := sandbox.Schedule{ID: sandbox.NewScheduleID(), Sandbox: sb.ID, NextAt: time.Now().Add(time.Hour)}
	ok(w.db.PutSchedule(t.Context(), c))
	w.has(owner, "schedule", c.ID)
	p := sandbox.Port{ID: sandbox.NewPortID(), Sandbox: sb.ID}
	ok(w.db.PutPort(t.Context(), p))
	w.has(owner, "port", p.ID)
	stored := namesOf(owner).stored(name)
	ok(w.db.AddVolume(t.Context(), sandbox.Volume{Name: stored, Owner: owner}))
	w.has(owner, "volume", name)
	w.has(owner, "secret", name)
	j := project.Project{ID: project.NewID(), Name: name, Owner: owner, Status: project.StatusActive, CreatedAt: time.Now()}
	g := project.Agent{ID: project.NewAgentID(j.ID, "a"), Project: j.ID, Owner: owner, Status: project.AgentActive, CreatedAt: time.Now()}
	ok(w.db.UpdateLab(t.Context(), func(tx project.Tx) error { return errors.Join(tx.PutProject(j), tx.PutAgent(g)) }))
	w.has(owner, "project", string(j.ID), name)
	w.has(owner, "project id", string(j.ID))
	w.has(owner, "agent", string(g.ID))
	h := sandbox.Webhook{ID: sandbox.NewWebhookID(), Owner: owner}
	w.back.webhooks = append(w.back.webhooks, h)
	w.has(owner, "webhook", h.ID)
	b := cost.BudgetState{StoredBudget: cost.StoredBudget{Key: cost.NewBudgetKey(), Budget: cost.Budget{Scope: cost.ScopeSandbox, ID: string(sb.ID)}, Actor: owner}}
	w.back.budgets = append(w.back.budgets, b)
	w.has(owner, "budget", b.Key)
	e := cost.Posted{Number: int64(len(w.back.entries) + 1), Owner: owner, Actor: owner}
	w.back.entries = append(w.back.entries, e)
	w.has(owner, "entry", strconv.FormatInt(e.Number, 10))
	digest := "sha256:" + strings.Repeat(fmt.Sprintf("%x", owner[0]%16), 64)
	img := sandbox.Image{Name: folder(owner) + "app", Digest: digest}
	w.back.images = append(w.back.images, img)
	w.has(owner, "image", img.Name, "own/x@"+digest)
}

// nothing is a ref of the form of another that nobody has.
func nothing(kind, like string) string {
	swap := func(s string) string {
		return strings.Map(func(r rune) rune {
			switch r {
			case 'a':
				return 'b'
			case 'b':
				return 'a'
			}
			return r
		}, s)
	}
	switch {
	case strings.Contains(like, "@"):
		return like[:len(like)-64] + strings.Repeat("9", 64)
	case strings.HasPrefix(like, alice), strings.HasPrefix(like, bob), strings.HasPrefix(like, "own/"):
		return swap(like) + "q"
	case len(like) < 4: // a number
		return "99" + like
	case len(like) == 9: // the beginning of an id
		return like[:2] + strings.Repeat("z", 7)
	}
	return like[:len(like)-4] + "zz22"
}

// A call is one method, with what it is about and whether it changes that.
type call struct {
	kind    string // of the ref; empty: it has none
	changes bool
	do      func(w *town, ctx context.Context, ref string) error
}

func drop[T any](_ T, err error) error { return err }

// calls are the methods of the manager. TestEveryMethodIsThought of sees to it
// that none is missing.
func calls() map[string]call {
	change := func(kind string, do func(*town, context.Context, string) error) call { return call{kind, true, do} }
	look := func(kind string, do func(*town, context.Context, string) error) call { return call{kind, false, do} }
	act := func(f func(*Manager, context.Context, string, string) (sandbox.Sandbox, error)) call {
		return change("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(f(w.Manager, ctx, ref, "x")) })
	}
	none := call{}
	proc := sandbox.ProcessSpec{Argv: []string{"x"}}
	return map[string]call{
		"Create": change("image", func(w *town, ctx context.Context, ref string) error {
			return drop(w.Create(ctx, sandbox.CreateRequest{Spec: sandbox.Spec{Image: ref}}))
		}),
		"Run": change("volume", func(w *town, ctx context.Context, ref string) error {
			_, _, err := w.Run(ctx, sandbox.CreateRequest{Spec: sandbox.Spec{Volumes: []sandbox.VolumeMount{{Volume: ref, Path: "/v"}}}}, proc)
			return err
		}),
		"Sandbox": look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Sandbox(ctx, ref)) }),
		"List":    none, "Images": none, "Volumes": none, "Secrets": none,
		// The name is looked up under its owner's.
		"Templates": none, "Template": none, "SetTemplate": none, "RemoveTemplate": none,
		"Webhooks": none, "Prices": none, "Budgets": none, "Subscribe": none,
		"Doctor": none, "Pool": none, "BuildCache": none, "PruneBuildCache": none, "ReleaseHostName": none, "PruneImages": none, "PullImage": none, "PushImage": none,
		"CreateVolume": none, "SetSecret": none, "CreateWebhook": none, "ImportSnapshot": none,
		"Pause": act((*Manager).Pause), "Resume": act((*Manager).Resume), "Stop": act((*Manager).Stop), "Start": act((*Manager).Start),
		"Reset": act((*Manager).Reset), "Remove": act((*Manager).Remove),
		"SetNetwork": change("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.SetNetwork(ctx, ref, sandbox.NetworkPolicy{}, "x"))
		}),
		"SetDeadline": change("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.SetDeadline(ctx, ref, sandbox.DeadlineRequest{Hold: true}))
		}),
		"Usage":   look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Usage(ctx, ref)) }),
		"Network": look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Network(ctx, ref)) }),
		"ExplainNetwork": look("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.ExplainNetwork(ctx, ref, sandbox.NetworkQuery{}))
		}),
		"SetFault": change("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.SetFault(ctx, ref, sandbox.NetworkFault{}, "x"))
		}),
		"ClearFault": change("sandbox", func(w *town, ctx context.Context, ref string) error { return w.ClearFault(ctx, ref, "x") }),
		"Fault":      look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Fault(ctx, ref)) }),
		"Events":     look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Events(ctx, 0, ref, 1)) }),
		"Files":      look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Files(ctx, ref)) }),

		"Snapshot": change("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.Snapshot(ctx, ref, sandbox.SnapshotRequest{}))
		}),
		"SnapshotOf":     look("snapshot", func(w *town, ctx context.Context, ref string) error { return drop(w.SnapshotOf(ctx, ref)) }),
		"Snapshots":      look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Snapshots(ctx, ref)) }),
		"RemoveSnapshot": change("snapshot", func(w *town, ctx context.Context, ref string) error { return drop(w.RemoveSnapshot(ctx, ref, "x")) }),
		"ExportSnapshot": look("snapshot", func(w *town, ctx context.Context, ref string) error { return drop(w.ExportSnapshot(ctx, ref)) }),
		"Fork": change("snapshot", func(w *town, ctx context.Context, ref string) error {
			return drop(w.Fork(ctx, ref, sandbox.ForkRequest{}))
		}),
		"Rollback": change("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Rollback(ctx, ref, "", "x")) }),
		"Undo":     change("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Undo(ctx, ref, 1, "x")) }),
		"ResetPaths": change("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.ResetPaths(ctx, ref, []string{"/x"}, "x"))
		}),
		"History": look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.History(ctx, ref)) }),
		"AddSchedule": change("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.AddSchedule(ctx, ref, sandbox.Schedule{}))
		}),
		"Schedules":      look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Schedules(ctx, ref)) }),
		"RemoveSchedule": change("schedule", func(w *town, ctx context.Context, ref string) error { return w.RemoveSchedule(ctx, ref) }),
		"Diff":           look("snapshot", func(w *town, ctx context.Context, ref string) error { return w.Diff(ctx, "", ref, nil) }),

		"StartProcess": change("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.StartProcess(ctx, ref, proc)) }),
		"Exec":         change("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Exec(ctx, ref, proc)) }),
		"Attach":       look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Attach(ctx, ref, "p1", 0)) }),
		"Processes":    look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Processes(ctx, ref)) }),
		"Process":      look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Process(ctx, ref, "p1")) }),
		"SignalProcess": change("sandbox", func(w *town, ctx context.Context, ref string) error {
			return w.SignalProcess(ctx, ref, "p1", "SIGTERM")
		}),
		"KeptOutput": look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.KeptOutput(ctx, ref, "")) }),

		"Image": look("image", func(w *town, ctx context.Context, ref string) error { return drop(w.Image(ctx, ref)) }),
		"ImportImage": change("", func(w *town, ctx context.Context, _ string) error {
			return drop(w.ImportImage(ctx, sandbox.ImportRequest{Name: "x"}, nil))
		}),
		"ExportImage": look("image", func(w *town, ctx context.Context, ref string) error {
			return drop(w.ExportImage(ctx, sandbox.ExportRequest{Source: ref}))
		}),
		"TagImage": change("image", func(w *town, ctx context.Context, ref string) error {
			return drop(w.TagImage(ctx, ref, "own/alice/y", "x"))
		}),
		"RemoveImage": change("image", func(w *town, ctx context.Context, ref string) error { return w.RemoveImage(ctx, ref) }),
		"Build": change("", func(w *town, ctx context.Context, _ string) error {
			return drop(w.Build(ctx, sandbox.BuildRequest{Names: []string{"x"}}, nil, nil))
		}),

		"Volume": look("volume", func(w *town, ctx context.Context, ref string) error { return drop(w.Volume(ctx, ref)) }),
		"ChangeVolume": change("volume", func(w *town, ctx context.Context, ref string) error {
			return drop(w.ChangeVolume(ctx, ref, sandbox.VolumeChange{}))
		}),
		"RemoveVolume": change("volume", func(w *town, ctx context.Context, ref string) error { return w.RemoveVolume(ctx, ref, "x") }),
		"RemoveSecret": change("secret", func(w *town, ctx context.Context, ref string) error { return w.RemoveSecret(ctx, ref, "x") }),

		"Webhook":       look("webhook", func(w *town, ctx context.Context, ref string) error { return drop(w.Webhook(ctx, ref)) }),
		"RemoveWebhook": change("webhook", func(w *town, ctx context.Context, ref string) error { return w.RemoveWebhook(ctx, ref, "x") }),
		"TestWebhook":   change("webhook", func(w *town, ctx context.Context, ref string) error { return drop(w.TestWebhook(ctx, ref, "x")) }),
		"DeadLetters":   look("webhook", func(w *town, ctx context.Context, ref string) error { return drop(w.DeadLetters(ctx, ref)) }),
		"RetryDeadLetters": change("webhook", func(w *town, ctx context.Context, ref string) error {
			return drop(w.RetryDeadLetters(ctx, ref, nil))
		}),

		"PublishPort": change("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.PublishPort(ctx, ref, sandbox.PortRequest{Port: 80}, "x"))
		}),
		"Ports":           look("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.Ports(ctx, ref)) }),
		"UnpublishPort":   change("port", func(w *town, ctx context.Context, ref string) error { return drop(w.UnpublishPort(ctx, ref, "x")) }),
		"NewPortToken":    change("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.NewPortToken(ctx, ref, "x")) }),
		"RemovePortToken": change("sandbox", func(w *town, ctx context.Context, ref string) error { return w.RemovePortToken(ctx, ref, "x") }),
		"DialPort":        change("sandbox", func(w *town, ctx context.Context, ref string) error { return drop(w.DialPort(ctx, ref, 80)) }),

		"UsageReport": look("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.UsageReport(ctx, ref, sandbox.UsageQuery{}))
		}),
		"PostEntry": change("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.PostEntry(ctx, cost.EntryRequest{Sandbox: ref, Amount: 1, Kind: cost.KindCost}))
		}),
		"Entries": look("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.Entries(ctx, cost.EntryQuery{Sandbox: ref}))
		}),
		"Statement": look("sandbox", func(w *town, ctx context.Context, ref string) error {
			return drop(w.Statement(ctx, cost.StatementQuery{Sandbox: ref}))
		}),
		"SetBudget": change("project id", func(w *town, ctx context.Context, ref string) error {
			return drop(w.SetBudget(ctx, cost.BudgetRequest{Project: ref, Meter: "money", Limit: "5"}))
		}),
		"Budget": look("budget", func(w *town, ctx context.Context, ref string) error { return drop(w.Budget(ctx, ref)) }),
		"Entry": look("entry", func(w *town, ctx context.Context, ref string) error {
			n, _ := strconv.ParseInt(ref, 10, 64)
			return drop(w.Entry(ctx, n))
		}),
		"CancelEntry": change("entry", func(w *town, ctx context.Context, ref string) error {
			n, _ := strconv.ParseInt(ref, 10, 64)
			return drop(w.CancelEntry(ctx, n, "wrong", "x"))
		}),
		"RemoveBudget": change("budget", func(w *town, ctx context.Context, ref string) error { return w.RemoveBudget(ctx, ref, "x") }),
	}
}

// labCalls are those of the lab.
func labCalls() map[string]call {
	change := func(do func(*Lab, context.Context, string) error) call {
		return call{"project", true, func(w *town, ctx context.Context, ref string) error { return do(w.lab, ctx, ref) }}
	}
	look := func(do func(*Lab, context.Context, string) error) call {
		return call{"project", false, func(w *town, ctx context.Context, ref string) error { return do(w.lab, ctx, ref) }}
	}
	none := call{}
	return map[string]call{
		"CreateProject": none, "Projects": none, "Summary": none, "Templates": none, "RemoveAgent": none, "ProductionAgents": none,
		"View": look(func(l *Lab, ctx context.Context, ref string) error { return drop(l.View(ctx, ref)) }),
		"ChangeProject": change(func(l *Lab, ctx context.Context, ref string) error {
			return drop(l.ChangeProject(ctx, ref, project.Change{}))
		}),
		"KillProject":   change(func(l *Lab, ctx context.Context, ref string) error { return drop(l.KillProject(ctx, ref, false, "x")) }),
		"RemoveProject": change(func(l *Lab, ctx context.Context, ref string) error { return l.RemoveProject(ctx, ref, "x") }),
		"Deploy": change(func(l *Lab, ctx context.Context, ref string) error {
			return drop(l.Deploy(ctx, ref, "a", project.AgentSpec{}, "x"))
		}),
		"SetAgent": {"agent", true, func(w *town, ctx context.Context, ref string) error {
			return drop(w.lab.SetAgent(ctx, project.AgentID(ref), "stop", "x"))
		}},
		"Enter": change(func(l *Lab, ctx context.Context, ref string) error {
			return drop(l.Enter(ctx, ref, project.Entry{}, "x"))
		}),
		"StartExperiment": change(func(l *Lab, ctx context.Context, ref string) error {
			return drop(l.StartExperiment(ctx, ref, project.ExperimentRequest{}))
		}),
		"CompleteExperiment": change(func(l *Lab, ctx context.Context, ref string) error {
			return drop(l.CompleteExperiment(ctx, ref, "exp", project.Outcome{}))
		}),
		"Experiments": look(func(l *Lab, ctx context.Context, ref string) error { return drop(l.Experiments(ctx, ref)) }),
		"Evaluate":    change(func(l *Lab, ctx context.Context, ref string) error { return drop(l.Evaluate(ctx, ref, "x")) }),
		"Evaluations": look(func(l *Lab, ctx context.Context, ref string) error { return drop(l.Evaluations(ctx, ref, 1)) }),
		"Promote": change(func(l *Lab, ctx context.Context, ref string) error {
			return drop(l.Promote(ctx, ref, project.PromotionRequest{}))
		}),
		"Promotions": look(func(l *Lab, ctx context.Context, ref string) error { return drop(l.Promotions(ctx, ref)) }),
	}
}

func TestEveryMethodIsThoughtOf(t *testing.T) {
	for typ, table := range map[reflect.Type]map[string]call{
		reflect.TypeFor[server.Manager](): calls(), reflect.TypeFor[server.Lab](): labCalls(),
	} {
		for m := range typ.Methods() {
			if name := m.Name; table[name].do == nil {
				if _, ok := table[name]; !ok {
					t.Errorf("%s.%s: nobody has said what it is about", typ, name)
				}
			}
		}
	}
}

// errThrough is the outcome of a call that got to the manager.
var errThrough = errors.New("got through")

func (c call) try(ctx context.Context, w *town, ref string) (err error) {
	defer func() {
		if recover() != nil {
			err = errThrough
		}
	}()
	return c.do(w, ctx, ref)
}

// TestWhatAnotherHasLooksMissing: of everything that a call can be about,
// what another owner has gives the error of what nobody has, to the letter;
// the control is what the caller has, and a caller who sees all.
func TestWhatAnotherHasLooksMissing(t *testing.T) {
	w := newTown(t, access.Quota{})
	for _, table := range []map[string]call{calls(), labCalls()} {
		for name, c := range table {
			if c.kind == "" {
				continue
			}
			for _, role := range []access.Role{access.RoleDeveloper, access.RoleViewer} {
				for _, ref := range w.refs[c.kind][bob] {
					c.compare(t, w, name, role, ref)
				}
			}
			own := w.refs[c.kind][alice][0]
			if err := c.try(w.as(alice, access.RoleDeveloper), w, own); errors.Is(err, sandbox.ErrNotFound) && c.kind != "secret" {
				t.Errorf("%s of one's own %s: %v", name, c.kind, err)
			}
			if err := c.try(w.as(alice, access.RoleOperator), w, w.refs[c.kind][bob][0]); err != nil && !errors.Is(err, errThrough) && c.kind != "secret" {
				t.Errorf("%s of another's %s by an operator: %v", name, c.kind, err)
			}
		}
	}
}

func (c call) compare(t *testing.T, w *town, name string, role access.Role, ref string) {
	t.Helper()
	ctx, none := w.as(alice, role), nothing(c.kind, ref)
	foreign, missing := c.try(ctx, w, ref), c.try(ctx, w, none)
	if foreign == nil || missing == nil || errors.Is(foreign, errThrough) {
		t.Errorf("%s of %s as %s: %v, of none %v", name, ref, role, foreign, missing)
		return
	}
	a := strings.ReplaceAll(foreign.Error(), ref, "REF")
	b := strings.ReplaceAll(missing.Error(), none, "REF")
	if a != b || sandbox.CodeOf(foreign) != sandbox.CodeOf(missing) || !errors.Is(foreign, sandbox.ClassOf(missing)) {
		t.Errorf("%s of another's %s as %s: %q (%s), of none %q (%s)", name, c.kind, role, a, sandbox.CodeOf(foreign), b, sandbox.CodeOf(missing))
	}
	want := error(sandbox.ErrNotFound)
	if role == access.RoleViewer && c.changes {
		want = sandbox.ErrForbidden
	}
	if !errors.Is(foreign, want) {
		t.Errorf("%s of another's %s as %s: %v, want %v", name, c.kind, role, foreign, want)
	}
}

// TestViewersOnlyLook: also at what is their own.
func TestViewersOnlyLook(t *testing.T) {
	w := newTown(t, access.Quota{})
	for _, table := range []map[string]call{calls(), labCalls()} {
		for name, c := range table {
			if c.do == nil {
				continue
			}
			ref := ""
			if c.kind != "" {
				ref = w.refs[c.kind][alice][0]
			}
			err := c.try(w.as(alice, access.RoleViewer), w, ref)
			if refused := errors.Is(err, sandbox.ErrForbidden); refused != c.changes {
				t.Errorf("%s as a viewer: %v", name, err)
			}
		}
	}
	f := readOnly{nil, &asker{}}
	ctx := t.Context()
	for what, err := range map[string]error{
		"write": drop(f.Write(ctx, "", "/x", 0, nil)), "mkdir": drop(f.Mkdir(ctx, "", "/x", 0)), "move": f.Move(ctx, "", "/x", "/y"),
		"remove": f.Remove(ctx, "", "/x", true), "chmod": f.Chmod(ctx, "", "/x", 0), "tar in": f.TarIn(ctx, "", "/x", io.LimitReader(nil, 0)),
	} {
		if !errors.Is(err, sandbox.ErrForbidden) {
			t.Errorf("%s as a viewer: %v", what, err)
		}
	}
}

// TestProductionIsForThoseWhoSeeAll: a closed guard lets nobody else at
// anything, lists included.
func TestProductionIsForThoseWhoSeeAll(t *testing.T) {
	w := newTown(t, access.Quota{})
	w.cfg.Closed = true
	for name, c := range calls() {
		if c.do == nil {
			continue
		}
		if err := c.try(w.as(alice, access.RoleDeveloper), w, "x"); !errors.Is(err, sandbox.ErrForbidden) {
			t.Errorf("%s of production as a developer: %v", name, err)
		}
		if err := c.try(w.as("root", access.RoleAdmin), w, "x"); errors.Is(err, sandbox.ErrForbidden) {
			t.Errorf("%s of production as an admin: %v", name, err)
		}
	}
	if _, err := w.List(w.as(alice, access.RoleViewer), sandbox.Filter{}); !errors.Is(err, sandbox.ErrForbidden) {
		t.Errorf("list: %v", err)
	}
}
