package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// supervisor makes the agents of one world be as their rows say: each has a
// keeper that compares and acts, whenever something happened to its sandbox,
// somebody asked, or time is over.
type supervisor struct {
	l     *Lab
	name  string // of the world
	world World
	log   *slog.Logger

	following sync.Once

	mu      sync.Mutex
	keepers map[project.AgentID]*keeper
	boxes   map[sandbox.ID]*keeper // by the sandbox each was last seen in
}

// keeper looks after one agent.
type keeper struct {
	s     *supervisor
	id    project.AgentID
	turn  chan struct{} // one token: the right to act on the agent
	poked chan struct{} // holds one: look again
	seen  sandbox.ID    // guarded by the supervisor's mu: where it was last seen

	// What only its turn's holder uses.
	checked time.Time // when health was last asked for
}

const (
	// lookEvery bounds how long a keeper rests: what no event told of is
	// found then.
	lookEvery = time.Minute
	// followNap bounds how often the event log is read, however much happens.
	followNap  = 25 * time.Millisecond
	retryFirst = time.Second
	retryMost  = time.Minute
)

func newSupervisor(l *Lab, name string, w World) *supervisor {
	return &supervisor{
		l: l, name: name, world: w, log: l.log.With("world", name),
		keepers: map[project.AgentID]*keeper{}, boxes: map[sandbox.ID]*keeper{},
	}
}

// start takes up the agents there are, those to be stopped too: a daemon may
// have ended between a row and its act.
func (s *supervisor) start(ctx context.Context) error {
	agents, err := s.world.Rows.Agents(ctx, "")
	for _, a := range agents {
		s.keep(a)
	}
	return err
}

// keep begins to look after an agent; of one that is looked after it wakes the
// keeper.
func (s *supervisor) keep(a project.Agent) *keeper {
	s.following.Do(func() { s.l.spawn(s.follow) }) // without agents nobody reads the log
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.keepers[a.ID]
	if k == nil {
		k = &keeper{s: s, id: a.ID, turn: make(chan struct{}, 1), poked: make(chan struct{}, 1)}
		s.keepers[a.ID] = k
		s.l.spawn(k.run)
	}
	if a.Sandbox != "" {
		s.saw(k, a.Sandbox)
	}
	wake(k.poked)
	return k
}

// saw notes in which sandbox an agent is; mu is held.
func (s *supervisor) saw(k *keeper, id sandbox.ID) {
	if k.seen != id {
		delete(s.boxes, k.seen)
	}
	k.seen, s.boxes[id] = id, k
}

// saw is the supervisor's, which it locks.
func (k *keeper) saw(id sandbox.ID) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	k.s.saw(k, id)
}

// follow wakes keepers when something happened to their sandboxes.
func (s *supervisor) follow() {
	news, cancel := s.world.Sandboxes.Subscribe()
	defer cancel()
	after := s.mark()
	for s.l.life.Err() == nil {
		events, err := s.world.Sandboxes.Events(s.l.life, after, "", 1000)
		if err != nil && s.l.life.Err() == nil {
			s.log.Error("read the events of agents", "err", err)
		}
		s.mu.Lock()
		for _, e := range events {
			after = e.Seq
			if k := s.boxes[e.Sandbox]; e.Sandbox != "" && k != nil {
				wake(k.poked)
			}
		}
		s.mu.Unlock()
		if len(events) == 1000 {
			continue
		}
		if err != nil {
			_ = pause(s.l.life, retryFirst) // its end is the loop's
			continue
		}
		select {
		case <-s.l.life.Done():
		case <-news:
			_ = pause(s.l.life, followNap) // its end is the loop's
		}
	}
}

// mark writes an event, from which on the log is read, and has all agents
// looked at for what came before.
func (s *supervisor) mark() (seq int64) {
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		var err error
		seq, err = s.world.Rows.AppendEvent(s.l.life, sandbox.Event{Type: "lab.started", Actor: "daemon", Data: map[string]string{"world": s.name}})
		if err == nil {
			break
		}
		if s.l.life.Err() != nil {
			return 0
		}
		s.log.Error("begin to follow the agents: tried again", "err", err)
		_ = pause(s.l.life, wait) // its end is the loop's
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.keepers {
		wake(k.poked)
	}
	return seq
}

// run is the keeper's life.
func (k *keeper) run() {
	retry := retryFirst
	for k.s.l.life.Err() == nil {
		wait, err := k.look(k.s.l.life)
		switch {
		case is(err, sandbox.ErrNotFound) && sandbox.CodeOf(err) == "agent_not_found":
			k.leave()
			return
		case err != nil && k.s.l.life.Err() == nil:
			k.s.log.Warn("look after an agent: tried again", "agent", k.id, "err", err)
			wait, retry = retry, min(2*retry, retryMost)
		default:
			retry = retryFirst
		}
		t := time.NewTimer(wait)
		select {
		case <-k.s.l.life.Done():
		case <-k.poked:
		case <-t.C:
		}
		t.Stop()
	}
}

// leave ends the care for an agent that is no more.
func (k *keeper) leave() {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	delete(k.s.keepers, k.id)
	if k.s.boxes[k.seen] == k {
		delete(k.s.boxes, k.seen)
	}
}

func (k *keeper) lock(ctx context.Context) error {
	select {
	case k.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return sandbox.Errorf(sandbox.ErrUnavailable, "agent_busy", "agent %s is changing state: try again: %w", k.id, ctx.Err())
	}
}

func (k *keeper) unlock() { <-k.turn }

// look compares once and acts. It returns how long the next look may wait.
func (k *keeper) look(ctx context.Context) (time.Duration, error) {
	if err := k.lock(ctx); err != nil {
		return 0, err
	}
	defer k.unlock()
	ctx, cancel := context.WithTimeout(ctx, workTimeout)
	defer cancel()
	a, err := k.s.world.Rows.Agent(ctx, k.id)
	if err != nil {
		return 0, err
	}
	if a.Held != "" {
		return lookEvery, k.rest(ctx, a)
	}
	switch a.Status {
	case project.AgentPending:
		if d := time.Until(a.Next); d > 0 {
			return d, nil
		}
		return k.begin(ctx, a)
	case project.AgentActive:
		return k.watch(ctx, a)
	case project.AgentPaused:
		return lookEvery, k.freeze(ctx, a)
	}
	return lookEvery, k.rest(ctx, a)
}

// box returns the agent's living sandbox; ok is false where it has none. It is
// found by its name, which is the agent's id: so one made just before a crash
// is not made twice.
func (k *keeper) box(ctx context.Context, a project.Agent) (sb sandbox.Sandbox, ok bool, err error) {
	sb, err = k.s.world.Sandboxes.Sandbox(ctx, string(a.ID))
	if is(err, sandbox.ErrNotFound) {
		return sb, false, nil
	}
	if err != nil || sb.Status.Terminal() {
		return sb, false, err
	}
	if sb.Spec.Labels[project.LabelAgent] != string(a.ID) {
		return sb, false, sandbox.Errorf(sandbox.ErrConflict, "name_taken", "sandbox %s has the name of agent %s and is not its: remove it", sb.ID, a.ID)
	}
	k.saw(sb.ID)
	return sb, true, nil
}

// rest makes an agent's sandbox stopped; its files stay.
func (k *keeper) rest(ctx context.Context, a project.Agent) error {
	sb, ok, err := k.box(ctx, a)
	if err != nil || !ok {
		return err
	}
	switch sb.Status {
	case sandbox.StatusStopped, sandbox.StatusCompleting:
		return nil
	case sandbox.StatusRunning, sandbox.StatusPaused:
		_, err = k.s.world.Sandboxes.Stop(ctx, string(sb.ID), "lab")
		return gone(err)
	}
	return fmt.Errorf("sandbox %s of agent %s is %s", sb.ID, a.ID, sb.Status)
}

// freeze makes the sandbox of a paused agent frozen. One that is stopped may
// stay so: nothing runs.
func (k *keeper) freeze(ctx context.Context, a project.Agent) error {
	sb, ok, err := k.box(ctx, a)
	if err != nil || !ok || sb.Status != sandbox.StatusRunning {
		return err
	}
	_, err = k.s.world.Sandboxes.Pause(ctx, string(sb.ID), "lab")
	return gone(err)
}

// gone forgives that a sandbox ended meanwhile, or already is as wanted.
func gone(err error) error {
	switch sandbox.CodeOf(err) {
	case "sandbox_ended", "wrong_state", "sandbox_not_found":
		return nil
	}
	return err
}

// begin takes a pending agent to active: a running sandbox, its config in it,
// its process. Where that fails the agent waits, or gave up.
func (k *keeper) begin(ctx context.Context, a project.Agent) (time.Duration, error) {
	a, err := k.allot(ctx, a)
	if err != nil {
		return 0, err
	}
	sb, p, err := k.launch(ctx, a)
	if err != nil {
		if ctx.Err() != nil {
			return 0, err
		}
		if sandbox.CodeOf(err) == codeBudget {
			return lookEvery, k.wait(ctx, a, err)
		}
		k.s.log.WarnContext(ctx, "start an agent", "agent", a.ID, "err", err)
		return 0, k.fell(ctx, a, false, "start: "+err.Error())
	}
	k.checked = time.Time{}
	return 0, k.change(ctx, a, eventAgentActive, func(a *project.Agent) {
		a.Status, a.Detail, a.Sandbox, a.Process, a.Next, a.Unhealthy = project.AgentActive, "", sb.ID, p.ID, time.Time{}, 0
		a.StartedAt = p.StartedAt.UTC()
		if a.Account == "" {
			a.Account = sb.ID
		}
	})
}

// codeBudget is the code of the error for a start that a budget refuses.
const codeBudget = "budget_exhausted"

// wait makes an agent pending whose budget is used up: that is no failure of
// its own, and the budget may be raised.
func (k *keeper) wait(ctx context.Context, a project.Agent, why error) error {
	kind := ""
	if a.Status != project.AgentPending {
		kind = eventAgentPending
	}
	return k.change(ctx, a, kind, func(a *project.Agent) {
		a.Status, a.Process, a.Next = project.AgentPending, "", time.Now().UTC().Add(lookEvery)
		a.Detail = "waits for its budget: " + why.Error()
	})
}

// launch gives an agent its sandbox and its process. One that runs already is
// taken as it is.
func (k *keeper) launch(ctx context.Context, a project.Agent) (sandbox.Sandbox, sandbox.Process, error) {
	m := k.s.world.Sandboxes
	sb, ok, err := k.box(ctx, a)
	if err != nil {
		return sb, sandbox.Process{}, err
	}
	switch {
	case !ok:
		sb, err = m.Create(ctx, sandbox.CreateRequest{Spec: a.SandboxSpec(), Actor: a.Owner})
	case sb.Status == sandbox.StatusStopped:
		sb, err = m.Start(ctx, string(sb.ID), "lab")
	case sb.Status == sandbox.StatusPaused:
		sb, err = m.Resume(ctx, string(sb.ID), "lab")
	case sb.Status != sandbox.StatusRunning:
		err = fmt.Errorf("sandbox %s is %s", sb.ID, sb.Status)
	}
	if err != nil {
		return sb, sandbox.Process{}, err
	}
	k.saw(sb.ID)
	procs, err := m.Processes(ctx, string(sb.ID))
	if err != nil {
		return sb, sandbox.Process{}, err
	}
	for _, p := range procs {
		if p.Tag == project.AgentTag && p.Exit == nil {
			return sb, p, nil
		}
	}
	if err := k.configure(ctx, a, sb.ID); err != nil {
		return sb, sandbox.Process{}, err
	}
	p, err := m.StartProcess(ctx, string(sb.ID), a.ProcessSpec())
	return sb, p, err
}

// configure writes the agent's config into its sandbox.
func (k *keeper) configure(ctx context.Context, a project.Agent, id sandbox.ID) error {
	text, err := a.File()
	if err != nil {
		return fmt.Errorf("write the config of agent %s: %w", a.ID, err)
	}
	files, err := k.s.world.Sandboxes.Files(ctx, string(id))
	if err == nil {
		_, err = files.Write(ctx, "0:0", project.ConfigPath, 0o644, newReader(text))
	}
	if err == nil && a.Volume != "" && a.Spec.User != "" {
		// Agents of one workspace may be different users.
		err = files.Chmod(ctx, "0:0", project.Workspace, 0o1777)
	}
	if err != nil {
		return fmt.Errorf("write the config of agent %s: %w", a.ID, err)
	}
	return nil
}

// watch looks whether an active agent still runs, and is well.
func (k *keeper) watch(ctx context.Context, a project.Agent) (time.Duration, error) {
	sb, ok, err := k.box(ctx, a)
	if err != nil {
		return 0, err
	}
	if sb.Reason == sandbox.ReasonBudget && (!ok || sb.Status == sandbox.StatusStopped) {
		return 0, k.wait(ctx, a, errors.New("its sandbox was stopped"))
	}
	if !ok {
		why := "its sandbox is gone"
		if sb.Reason != "" {
			why = "its sandbox ended: " + string(sb.Reason)
		}
		return 0, k.fell(ctx, a, false, why)
	}
	switch sb.Status {
	case sandbox.StatusRunning:
	case sandbox.StatusPaused: // by somebody else, who will let it go on
		return lookEvery, nil
	case sandbox.StatusStopped:
		return 0, k.fell(ctx, a, false, "its sandbox was stopped")
	default:
		return retryFirst, nil
	}
	p, found, err := k.process(ctx, a, sb.ID)
	switch {
	case err != nil:
		return 0, err
	case !found:
		return 0, k.fell(ctx, a, false, "its process is gone")
	case p.Exit != nil:
		return 0, k.fell(ctx, a, p.Exit.Code == 0 && !p.Exit.OOM, exitWords(*p.Exit))
	}
	return k.health(ctx, a, sb.ID)
}

func (k *keeper) process(ctx context.Context, a project.Agent, id sandbox.ID) (sandbox.Process, bool, error) {
	procs, err := k.s.world.Sandboxes.Processes(ctx, string(id))
	for _, p := range procs {
		if p.ID == a.Process && p.Tag == project.AgentTag {
			return p, true, err
		}
	}
	return sandbox.Process{}, false, err
}

func exitWords(x sandbox.ExitStatus) string {
	switch {
	case x.OOM:
		return "the kernel killed it for memory"
	case x.Signal != "":
		return "it was ended by " + x.Signal
	}
	return fmt.Sprintf("it exited with %d", x.Code)
}

// fell writes down that an agent's process ended, and what follows.
func (k *keeper) fell(ctx context.Context, a project.Agent, ok bool, why string) error {
	now := time.Now().UTC()
	next := a.After(now, ok, why)
	kind := map[project.AgentStatus]string{
		project.AgentPending: eventAgentPending, project.AgentFailed: eventAgentFailed, project.AgentStopped: eventAgentStopped,
	}[next.Status]
	wake(k.poked)
	return k.change(ctx, a, kind, func(a *project.Agent) { *a = next })
}

// errMoved tells that a row is no longer as it was when it was judged.
var errMoved = sandbox.Errorf(sandbox.ErrConflict, "agent_moved", "the agent changed meanwhile")

// change writes an agent, if its row still is as the caller saw it, with the
// event. Where it is not the change is left, and the keeper looks again.
func (k *keeper) change(ctx context.Context, was project.Agent, kind string, f func(*project.Agent)) error {
	err := k.s.update(ctx, func(t project.Tx) error {
		a, err := t.Agent(was.ID)
		if err != nil {
			return err
		}
		if a.Status != was.Status || a.Held != was.Held || a.Restarts != was.Restarts {
			return errMoved
		}
		f(&a)
		if err := t.PutAgent(a); err != nil {
			return err
		}
		return tellAgent(t, a, kind, "daemon")
	})
	if is(err, errMoved) {
		wake(k.poked)
		return nil
	}
	return err
}

// update runs a transaction of this world.
func (s *supervisor) update(ctx context.Context, f func(project.Tx) error) error {
	if s == s.l.own {
		return s.l.update(ctx, f)
	}
	return s.world.Rows.UpdateLab(ctx, f)
}

// tellAgent tells what became of an agent; those of a project to its webhooks
// too.
func tellAgent(t project.Tx, a project.Agent, kind, actor string) error {
	if kind == "" {
		return nil
	}
	data := map[string]string{"agent": string(a.ID), "type": a.Type, "status": string(a.Status)}
	if a.Detail != "" {
		data["detail"] = a.Detail
	}
	e := sandbox.Event{Time: time.Now().UTC(), Type: kind, Actor: actor, Data: data}
	if a.Project != "" {
		p, err := t.Project(a.Project)
		if err != nil {
			return err
		}
		e = newsOf(p, kind, actor, data)
	}
	e.Sandbox = a.Sandbox
	return t.Tell(e)
}

// settle looks at an agent at once, for a caller who waits.
func (s *supervisor) settle(ctx context.Context, a project.Agent) error {
	k := s.keep(a)
	_, err := k.look(ctx)
	wake(k.poked)
	return err
}

// remove ends the sandbox of an agent whose row says that it does not run.
// Repeating it is safe.
func (s *supervisor) remove(ctx context.Context, id project.AgentID) error {
	a, err := s.world.Rows.Agent(ctx, id)
	if is(err, sandbox.ErrNotFound) {
		a = project.Agent{ID: id}
	} else if err != nil {
		return err
	}
	k := s.keep(a)
	if err := k.lock(ctx); err != nil {
		return err
	}
	defer k.unlock()
	sb, ok, err := k.box(ctx, a)
	if err != nil || !ok {
		return err
	}
	_, err = s.world.Sandboxes.Remove(ctx, string(sb.ID), "lab")
	return gone(err)
}
