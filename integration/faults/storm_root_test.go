//go:build root

package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestStorm kills the daemon over and over while eight clients do all sorts of
// things. Each client knows what it was told, and of a call that was cut off
// the two states that are permitted. After each restart what is there must be
// one of these, and the kernel and the database must agree.
func TestStorm(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("SANDBOXD_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("SANDBOXD_SEED=%d", seed)
	d := harness.Install(t, "pool:\n  size: 4\n")
	impatient, err := client.New(d.Host(), client.WithPatience(0))
	if err != nil {
		t.Fatal(err)
	}
	clients := make([]*stormClient, 8)
	for i := range clients {
		clients[i] = &stormClient{
			c: impatient, name: fmt.Sprintf("c%d", i), rand: rand.New(rand.NewPCG(seed, uint64(i))),
			boxes: map[string]*stormBox{}, things: map[string]*stormThing{}, entries: map[string]bool{}, done: map[string]int{},
		}
	}
	moments := rand.New(rand.NewPCG(seed, 99))
	all := func() bool { // a slow machine answers little in a round
		for _, what := range stormSteps {
			if !slices.ContainsFunc(clients, func(c *stormClient) bool { return c.done[what.name] > 0 }) {
				return false
			}
		}
		return true
	}
	rounds, longest := harness.Soak(8, 500), 400
	for round := 0; round < rounds || round < 40 && !all(); round++ {
		if round >= rounds {
			longest = 2000 // room for a step that takes long here
		}
		load, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for _, c := range clients {
			wg.Go(func() {
				for load.Err() == nil && c.step(load) {
				}
			})
		}
		<-time.After(time.Duration(50+moments.IntN(longest)) * time.Millisecond) // the kill comes at a random moment
		d.Crash()
		stop()
		wg.Wait()
		d.Up()
		testenv.Eventually(t, 2*time.Minute, "a full pool", func() bool {
			p, err := d.Pool(t.Context())
			return err == nil && p.Ready == p.Size
		})
		d.Agree(t)
		for _, c := range clients {
			wg.Go(func() { c.check(t, round) })
		}
		wg.Wait()
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
	total, done := cost.Nano(0), map[string]int{}
	for _, c := range clients {
		total += cost.Nano(len(c.entries))
		for what, n := range c.done {
			done[what] += n
		}
	}
	t.Logf("answered: %v", done)
	seen := cost.Nano(0)
	for e, err := range d.Entries(t.Context(), cost.EntryQuery{Owner: "storm"}) {
		if err != nil {
			t.Fatal(err)
		}
		seen += e.Charged
	}
	if seen != total {
		t.Errorf("the ledger has %d entries of 1, %d were sent", seen, total)
	}
	for _, what := range stormSteps {
		if done[what.name] == 0 {
			t.Errorf("no %s was answered", what.name)
		}
	}
}

// stormState is what can be seen of a sandbox.
type stormState struct {
	status sandbox.Status // empty: it is gone
	files  string         // NAME=CONTENT lines of its directory
}

type stormBox struct {
	name   string
	key    string       // of its create
	base   string       // files after a reset
	states []stormState // one, or after a call that was cut off all that are permitted
	calls  []string     // what was asked, for the reader of a failure
}

// stormThing is an object that is there or not: a snapshot, a volume and so on.
type stormThing struct {
	kind, name, files, of string
	states                []bool
}

type stormClient struct {
	c       *client.Client
	name    string
	rand    *rand.Rand
	n       int
	boxes   map[string]*stormBox
	things  map[string]*stormThing
	entries map[string]bool // keys of the ledger; true: answered
	done    map[string]int  // answers by kind of call
}

func (c *stormClient) next(prefix string) string {
	c.n++
	return fmt.Sprintf("%s-%s%d", c.name, prefix, c.n)
}

// pick is one of its sandboxes in this status whose state is certain.
func (c *stormClient) pick(s ...sandbox.Status) *stormBox {
	var fit []*stormBox
	for _, name := range slices.Sorted(maps.Keys(c.boxes)) {
		if b := c.boxes[name]; len(b.states) == 1 && slices.Contains(s, b.states[0].status) {
			fit = append(fit, b)
		}
	}
	if len(fit) == 0 {
		return nil
	}
	return fit[c.rand.IntN(len(fit))]
}

func (c *stormClient) thing(kind, of string) *stormThing {
	for _, name := range slices.Sorted(maps.Keys(c.things)) {
		if s := c.things[name]; s.kind == kind && (of == "" || s.of == of) && len(s.states) == 1 && s.states[0] {
			return s
		}
	}
	return nil
}

// after notes what a call leaves: its outcome alone if it was answered.
func (b *stormBox) after(what string, err error, to stormState) error {
	b.calls = append(b.calls, fmt.Sprintf("%s: %v", what, err))
	if err == nil {
		b.states = []stormState{to}
	} else {
		b.states = append(b.states, to)
	}
	return err
}

// remade is after for a call that changes what the sandbox stands on: cut off,
// it is finished by the next daemon, and leaves the sandbox stopped.
func (b *stormBox) remade(what string, err error, to stormState) error {
	from := b.states[0]
	if b.after(what, err, to) != nil {
		b.states = append(b.states, stormState{sandbox.StatusStopped, from.files}, stormState{sandbox.StatusStopped, to.files})
	}
	return err
}

func (s *stormThing) after(err error, there bool) error {
	if err == nil {
		s.states = []bool{there}
	} else {
		s.states = append(s.states, there)
	}
	return err
}

var errNothingToDo = errors.New("no object fits")

var stormSteps = []struct {
	name string
	do   func(*stormClient, context.Context) error
}{
	{"create", (*stormClient).create},
	{"write", (*stormClient).write},
	{"exec", (*stormClient).exec},
	{"stop", func(c *stormClient, ctx context.Context) error {
		return c.move(ctx, c.c.Stop, sandbox.StatusStopped, sandbox.StatusRunning)
	}},
	{"start", func(c *stormClient, ctx context.Context) error {
		return c.move(ctx, c.c.Start, sandbox.StatusRunning, sandbox.StatusStopped)
	}},
	{"pause", func(c *stormClient, ctx context.Context) error {
		return c.move(ctx, c.c.Pause, sandbox.StatusPaused, sandbox.StatusRunning)
	}},
	{"resume", func(c *stormClient, ctx context.Context) error {
		return c.move(ctx, c.c.Resume, sandbox.StatusRunning, sandbox.StatusPaused)
	}},
	{"remove", (*stormClient).remove},
	{"reset", (*stormClient).reset},
	{"snapshot", (*stormClient).snapshot},
	{"fork", (*stormClient).fork},
	{"rollback", (*stormClient).rollback},
	{"entry", (*stormClient).entry},
	{"thing", (*stormClient).makeThing},
	{"unthing", (*stormClient).removeThing},
}

// step does one random thing; false: it was cut off.
func (c *stormClient) step(ctx context.Context) bool {
	s := stormSteps[c.rand.IntN(len(stormSteps))]
	err := s.do(c, ctx)
	if err == nil {
		c.done[s.name]++
	}
	return err == nil || errors.Is(err, errNothingToDo) || errors.Is(err, sandbox.ErrConflict)
}

func (c *stormClient) create(ctx context.Context) error {
	if len(c.boxes) >= 3 {
		return errNothingToDo
	}
	b := &stormBox{name: c.next("b"), states: []stormState{{}}}
	b.key = "key-" + b.name
	c.boxes[b.name] = b
	_, err := c.c.Create(ctx, sandbox.Spec{Name: b.name}, b.key)
	return b.after("create", err, stormState{status: sandbox.StatusRunning})
}

// with is the listing after a file has been written or, with more, extended.
func with(files, name, content string, more bool) string {
	m := map[string]string{}
	for line := range strings.Lines(files) {
		k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		m[k] = v
	}
	if more {
		content = m[name] + content
	}
	m[name] = content
	var out strings.Builder
	for _, k := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(&out, "%s=%s\n", k, m[k])
	}
	return out.String()
}

func (c *stormClient) write(ctx context.Context) error {
	b := c.pick(sandbox.StatusRunning)
	if b == nil {
		return errNothingToDo
	}
	s, file, content := b.states[0], fmt.Sprintf("f%d", c.rand.IntN(3)), c.next("w")
	_, err := c.c.Files(b.name).Write(ctx, "", "/root/storm/"+file, 0o644, strings.NewReader(content))
	s.files = with(s.files, file, content, false)
	return b.after("write", err, s)
}

func (c *stormClient) exec(ctx context.Context) error {
	b := c.pick(sandbox.StatusRunning)
	if b == nil {
		return errNothingToDo
	}
	s, word := b.states[0], c.next("e")+"."
	p, err := c.c.Exec(ctx, b.name, sandbox.ProcessSpec{Argv: []string{"sh", "-c", "mkdir -p /root/storm; printf " + word + " >> /root/storm/log"}})
	if err == nil {
		var r harness.Result
		r, err = harness.Collect(p)
		p.Close()
		if err == nil && r.Exit.Code != 0 {
			err = fmt.Errorf("exit %d", r.Exit.Code)
		}
	}
	s.files = with(s.files, "log", word, true)
	return b.after("exec", err, s)
}

func (c *stormClient) move(ctx context.Context, call func(context.Context, string) (sandbox.Sandbox, error), to, from sandbox.Status) error {
	b := c.pick(from)
	if b == nil {
		return errNothingToDo
	}
	s := b.states[0]
	_, err := call(ctx, b.name)
	s.status = to
	return b.after(string(to), err, s)
}

func (c *stormClient) remove(ctx context.Context) error {
	if len(c.boxes) < 2 {
		return errNothingToDo
	}
	b := c.pick(sandbox.StatusRunning, sandbox.StatusStopped, sandbox.StatusPaused)
	if b == nil {
		return errNothingToDo
	}
	_, err := c.c.Remove(ctx, b.name)
	if b.after("remove", err, stormState{}) == nil {
		c.forget(b.name)
	}
	return err
}

// forget drops a sandbox; no rollback of it is possible any more.
func (c *stormClient) forget(name string) {
	delete(c.boxes, name)
	for _, s := range c.things {
		if s.of == name {
			s.of = "-"
		}
	}
}

func (c *stormClient) reset(ctx context.Context) error {
	b := c.pick(sandbox.StatusRunning)
	if b == nil {
		return errNothingToDo
	}
	_, err := c.c.Reset(ctx, b.name)
	return b.remade("reset", err, stormState{status: sandbox.StatusRunning, files: b.base})
}

func (c *stormClient) snapshot(ctx context.Context) error {
	b := c.pick(sandbox.StatusRunning, sandbox.StatusStopped)
	if b == nil || len(c.things) > 6 {
		return errNothingToDo
	}
	s := &stormThing{kind: "snapshot", name: c.next("s"), files: b.states[0].files, of: b.name, states: []bool{false}}
	c.things[s.name] = s
	_, err := c.c.Snapshot(ctx, b.name, sandbox.SnapshotRequest{Name: s.name})
	_ = b.remade("snapshot", err, b.states[0])
	return s.after(err, true)
}

func (c *stormClient) fork(ctx context.Context) error {
	s := c.thing("snapshot", "")
	if s == nil || len(c.boxes) >= 3 {
		return errNothingToDo
	}
	b := &stormBox{name: c.next("k"), base: s.files, states: []stormState{{}}}
	c.boxes[b.name] = b
	made, err := c.c.Fork(ctx, s.name, sandbox.ForkRequest{Name: b.name})
	if err == nil && (len(made) != 1 || made[0].Error != "") {
		err = fmt.Errorf("fork: %+v", made)
	}
	return b.after("fork", err, stormState{status: sandbox.StatusRunning, files: s.files})
}

func (c *stormClient) rollback(ctx context.Context) error {
	b := c.pick(sandbox.StatusRunning)
	if b == nil {
		return errNothingToDo
	}
	s := c.thing("snapshot", b.name)
	if s == nil {
		return errNothingToDo
	}
	_, err := c.c.Rollback(ctx, b.name, s.name)
	return b.remade("rollback", err, stormState{status: sandbox.StatusRunning, files: s.files})
}

// entry puts one billionth into the ledger.
func (c *stormClient) entry(ctx context.Context) error {
	key := c.next("m")
	c.entries[key] = false
	err := c.post(ctx, c.c, key)
	c.entries[key] = err == nil
	return err
}

func (c *stormClient) post(ctx context.Context, to *client.Client, key string) error {
	_, err := to.PostEntry(ctx, cost.EntryRequest{Kind: cost.KindCost, Owner: "storm", Amount: 1, Key: key})
	return err
}

// stormKinds are the objects that are there or not.
var stormKinds = map[string]struct {
	make, remove func(*client.Client, context.Context, string) error
	all          func(*client.Client, context.Context) (map[string]bool, error)
}{
	"snapshot": {
		remove: func(c *client.Client, ctx context.Context, name string) error {
			_, err := c.RemoveSnapshot(ctx, name)
			return err
		},
		all: func(c *client.Client, ctx context.Context) (map[string]bool, error) {
			all, err := c.Snapshots(ctx, "")
			return stormNames(all, err, func(s sandbox.Snapshot) string { return s.Name })
		},
	},
	"volume": {
		make: func(c *client.Client, ctx context.Context, name string) error {
			_, err := c.CreateVolume(ctx, sandbox.VolumeRequest{Name: name, SizeBytes: 1 << 20})
			return err
		},
		remove: func(c *client.Client, ctx context.Context, name string) error { return c.RemoveVolume(ctx, name) },
		all: func(c *client.Client, ctx context.Context) (map[string]bool, error) {
			all, err := c.Volumes(ctx)
			return stormNames(all, err, func(v sandbox.Volume) string { return v.Name })
		},
	},
	"secret": {
		make: func(c *client.Client, ctx context.Context, name string) error {
			_, err := c.SetSecret(ctx, sandbox.SecretRequest{Name: name, Value: "v"})
			return err
		},
		remove: func(c *client.Client, ctx context.Context, name string) error { return c.RemoveSecret(ctx, name) },
		all: func(c *client.Client, ctx context.Context) (map[string]bool, error) {
			all, err := c.Secrets(ctx)
			return stormNames(all, err, func(s sandbox.Secret) string { return s.Name })
		},
	},
	"project": {
		make: func(c *client.Client, ctx context.Context, name string) error {
			_, err := c.CreateProject(ctx, project.Request{Name: name})
			return err
		},
		remove: func(c *client.Client, ctx context.Context, name string) error { return c.RemoveProject(ctx, name) },
		all: func(c *client.Client, ctx context.Context) (map[string]bool, error) {
			all, err := c.Projects(ctx, "", true)
			return stormNames(all, err, func(p project.Project) string { return p.Name })
		},
	},
	"owner": {
		make: func(c *client.Client, ctx context.Context, name string) error {
			_, err := c.SetOwner(ctx, name, api.OwnerChange{})
			return err
		},
		remove: func(c *client.Client, ctx context.Context, name string) error { return c.RemoveOwner(ctx, name) },
		all: func(c *client.Client, ctx context.Context) (map[string]bool, error) {
			all, err := c.Owners(ctx)
			return stormNames(all, err, func(o api.Owner) string { return o.Name })
		},
	},
}

func stormNames[T any](all []T, err error, name func(T) string) (map[string]bool, error) {
	names := map[string]bool{}
	for _, o := range all {
		names[name(o)] = true
	}
	return names, err
}

func (c *stormClient) makeThing(ctx context.Context) error {
	if len(c.things) > 6 {
		return errNothingToDo
	}
	kinds := []string{"volume", "secret", "project", "owner"}
	kind := kinds[c.rand.IntN(len(kinds))]
	s := &stormThing{kind: kind, name: c.next(kind[:1]), states: []bool{false}}
	c.things[s.name] = s
	return s.after(stormKinds[kind].make(c.c, ctx, s.name), true)
}

func (c *stormClient) removeThing(ctx context.Context) error {
	kinds := slices.Sorted(maps.Keys(stormKinds))
	s := c.thing(kinds[c.rand.IntN(len(kinds))], "")
	if s == nil {
		return errNothingToDo
	}
	err := s.after(stormKinds[s.kind].remove(c.c, ctx, s.name), false)
	if err == nil {
		delete(c.things, s.name)
	}
	return err
}

// check compares what is there with what may be, and settles what was open.
func (c *stormClient) check(t *testing.T, round int) {
	ctx := t.Context()
	for name, b := range c.boxes {
		if b.key != "" && len(b.states) > 1 && b.states[0].status == "" {
			// The client asks again with the key: one sandbox, whichever way it was.
			if _, err := c.c.Create(ctx, sandbox.Spec{Name: name}, b.key); sandbox.CodeOf(err) == sandbox.CodeKeyGone { // XXX
				delete(c.boxes, name)
				continue
			} else if err != nil {
				t.Errorf("round %d: %s: create again with its key: %v", round, name, err)
			}
			b.states = []stormState{{status: sandbox.StatusRunning}}
		}
		var now stormState
		var err error
		ok := testenv.Within(10*time.Second, func() bool {
			now, err = c.look(ctx, name)
			return err == nil && slices.ContainsFunc(b.states, func(s stormState) bool {
				return s.status == now.status && (s.files == now.files || now.status != sandbox.StatusRunning)
			})
		})
		if !ok {
			t.Errorf("round %d: %s is %+v (%v), permitted: %+v\n%s", round, name, now, err, b.states, strings.Join(b.calls, "\n"))
			return
		}
		if now.status == "" {
			c.forget(name)
			continue
		}
		b.states = slices.DeleteFunc(b.states, func(s stormState) bool { return s.status != now.status })
		b.states = slices.Compact(b.states)
		if len(b.states) > 1 && now.status == sandbox.StatusStopped { // which files it has is seen when it runs
			if _, err := c.c.Start(ctx, name); err != nil {
				t.Errorf("round %d: start %s: %v", round, name, err)
			}
			for i := range b.states {
				b.states[i].status = sandbox.StatusRunning
			}
			if now, err = c.look(ctx, name); err != nil || !slices.Contains(b.states, now) {
				t.Errorf("round %d: %s started again is %+v (%v), permitted: %+v", round, name, now, err, b.states)
			}
		}
		if now.status == sandbox.StatusRunning {
			b.states = []stormState{now}
		}
		if len(b.states) > 1 {
			t.Errorf("round %d: %s: not settled: %+v", round, name, b.states)
		}
	}
	all := map[string]map[string]bool{}
	for kind, k := range stormKinds {
		var err error
		if all[kind], err = k.all(c.c, ctx); err != nil {
			t.Errorf("round %d: list each %s: %v", round, kind, err)
		}
	}
	for name, s := range c.things {
		there := all[s.kind][name]
		if !slices.Contains(s.states, there) {
			t.Errorf("round %d: %s %s: there %t, permitted %v", round, s.kind, name, there, s.states)
		}
		s.states = []bool{there}
		if !there {
			delete(c.things, name)
		}
	}
	for key, answered := range c.entries {
		if !answered {
			if err := c.post(ctx, c.c, key); err != nil {
				t.Errorf("round %d: entry %s again with its key: %v", round, key, err)
			}
			c.entries[key] = true
		}
	}
}

// look tells a sandbox's status and, where it runs, its files.
func (c *stormClient) look(ctx context.Context, name string) (stormState, error) {
	sb, err := c.c.Sandbox(ctx, name)
	if errors.Is(err, sandbox.ErrNotFound) || err == nil && sb.Status.Terminal() {
		return stormState{}, nil
	}
	if err != nil || sb.Status != sandbox.StatusRunning {
		return stormState{status: sb.Status}, err
	}
	p, err := c.c.Exec(ctx, name, sandbox.ProcessSpec{Argv: []string{"sh", "-c", `cd /root/storm 2>/dev/null || exit 0; for f in $(ls -A); do echo "$f=$(cat $f)"; done`}})
	if err != nil {
		return stormState{}, err
	}
	defer p.Close()
	r, err := harness.Collect(p)
	return stormState{status: sb.Status, files: r.Stdout}, err
}
