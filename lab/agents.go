package lab

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// maxAgents is how many one project may have.
const maxAgents = 200

// Deploy adds an agent to a project and starts it. It returns once that was
// tried; whether it worked is in the agent's status.
func (l *Lab) Deploy(ctx context.Context, ref, kind string, spec project.AgentSpec, actor string) (project.Agent, error) {
	var a project.Agent
	if err := project.ValidateType(kind); err != nil {
		return a, err
	}
	if err := spec.Validate(); err != nil {
		return a, err
	}
	p, err := l.find(ctx, ref)
	if err != nil {
		return a, err
	}
	if p.Status != project.StatusActive {
		return a, notActive(p)
	}
	if err := l.workspace(ctx, p, 0); err != nil { // a crash may have come before it
		return a, err
	}
	err = l.update(ctx, func(t project.Tx) error {
		if p, err = t.Project(p.ID); err != nil {
			return err
		}
		if p.Status != project.StatusActive {
			return notActive(p)
		}
		present, err := t.Agents(p.ID)
		if err != nil {
			return err
		}
		if len(present) >= maxAgents {
			return sandbox.Errorf(sandbox.ErrExhausted, "too_many_agents", "project %s has %d agents already", p.ID, len(present))
		}
		a = project.Agent{
			ID: project.NewAgentID(p.ID, kind), Project: p.ID, Type: kind, Owner: actor, Status: project.AgentPending, CreatedAt: time.Now().UTC(),
			Spec: spec.Sandboxed(p.ID), Volume: p.Workspace,
		}
		if err := t.PutAgent(a); err != nil {
			return err
		}
		return tellAgent(t, a, eventDeployed, actor)
	})
	if err != nil {
		return a, err
	}
	return l.settled(ctx, l.own, a)
}

// settled looks at an agent and returns it as it is then. That it could not
// be brought where it is to be is for its keeper to mend.
func (l *Lab) settled(ctx context.Context, s *supervisor, a project.Agent) (project.Agent, error) {
	if err := s.settle(ctx, a); err != nil {
		l.log.WarnContext(ctx, "an agent is not yet as asked for: tried again", "agent", a.ID, "err", err)
	}
	return s.world.Rows.Agent(context.WithoutCancel(ctx), a.ID)
}

// supervisorOf returns who looks after an agent: the lab, or production where
// the lab does not know it.
func (l *Lab) supervisorOf(ctx context.Context, id project.AgentID) (*supervisor, error) {
	_, err := l.store.Agent(ctx, id)
	if !is(err, sandbox.ErrNotFound) {
		return l.own, err
	}
	l.mu.Lock()
	s := l.production
	l.mu.Unlock()
	if s == nil {
		return nil, err
	}
	_, err = s.world.Rows.Agent(ctx, id)
	return s, err
}

// SetAgent pauses, resumes, stops or starts an agent of either world.
func (l *Lab) SetAgent(ctx context.Context, id project.AgentID, verb, actor string) (project.Agent, error) {
	s, err := l.supervisorOf(ctx, id)
	if err != nil {
		return project.Agent{}, err
	}
	var a project.Agent
	err = s.update(ctx, func(t project.Tx) error {
		if a, err = t.Agent(id); err != nil {
			return err
		}
		if err := l.mayChange(t, a, verb); err != nil {
			return err
		}
		to, kind, err := verbTo(a, verb)
		if err != nil || to == a.Status && to != project.AgentPending {
			return err
		}
		if to == project.AgentPending {
			a.Restarts, a.Failures, a.Next, a.PromotedTo = 0, 0, time.Time{}, ""
		}
		a.Status, a.Detail = to, "on request"
		if err := t.PutAgent(a); err != nil {
			return err
		}
		return tellAgent(t, a, kind, actor)
	})
	if err != nil {
		return a, err
	}
	return l.settled(ctx, s, a)
}

// RemoveAgent ends an agent of production for good: its sandbox, its workspace
// and its row. Repeating it after a crash finishes it. Agents of projects end
// with those.
func (l *Lab) RemoveAgent(ctx context.Context, id project.AgentID, actor string) error {
	s, err := l.supervisorOf(ctx, id)
	if err != nil {
		return err
	}
	if s == l.own {
		return sandbox.Errorf(sandbox.ErrConflict, "agent_of_project", "agent %s belongs to a project and stays in its record: stop it, or kill the project", id)
	}
	if err := l.mayRemove(ctx, id); err != nil {
		return err
	}
	if _, err := l.SetAgent(ctx, id, "stop", actor); err != nil {
		return err
	}
	if err := s.remove(ctx, id); err != nil {
		return err
	}
	if err := s.world.Sandboxes.RemoveVolume(ctx, string(id), actor); err != nil && !is(err, sandbox.ErrNotFound) {
		return err
	}
	if err := s.dropBudgets(ctx, actor, id); err != nil {
		return err
	}
	return s.update(ctx, func(t project.Tx) error {
		if err := t.DeleteAgent(id); err != nil {
			return err
		}
		return t.Tell(sandbox.Event{Type: "agent.removed", Actor: actor, Data: map[string]string{"agent": string(id)}})
	})
}

// mayRemove refuses an agent whose promotion has not ended.
func (l *Lab) mayRemove(ctx context.Context, id project.AgentID) error {
	running, err := l.store.Promotions(ctx, "")
	for _, p := range running {
		for _, m := range p.Moves {
			if m.To == id {
				return sandbox.Errorf(sandbox.ErrConflict, "agent_held", "agent %s is being promoted", id)
			}
		}
	}
	return err
}

// mayChange refuses what would cross a promotion or a killed project.
func (l *Lab) mayChange(t project.Tx, a project.Agent, verb string) error {
	switch {
	case a.Held != "":
		return sandbox.Errorf(sandbox.ErrConflict, "agent_held", "agent %s is being promoted", a.ID)
	case a.PromotedTo != "" && verb == "start":
		return sandbox.Errorf(sandbox.ErrConflict, "agent_promoted", "agent %s runs in production as %s", a.ID, a.PromotedTo)
	case a.Project == "":
		return nil
	}
	p, err := t.Project(a.Project)
	if err == nil && p.Status == project.StatusKilled {
		err = notActive(p)
	}
	return err
}

// verbTo is where a verb leads an agent.
func verbTo(a project.Agent, verb string) (to project.AgentStatus, kind string, err error) {
	switch verb {
	case "pause":
		to, kind = project.AgentPaused, eventAgentPaused
		if a.Status == project.AgentStopped {
			return to, kind, wrongStatus(a, verb)
		}
	case "stop":
		to, kind = project.AgentStopped, eventAgentStopped
	case "resume", "start":
		to, kind = project.AgentPending, eventAgentPending
		if a.Status == project.AgentActive {
			return a.Status, kind, nil
		}
		if verb == "resume" && a.Status != project.AgentPaused {
			return to, kind, wrongStatus(a, verb)
		}
	default:
		return to, kind, sandbox.Errorf(sandbox.ErrInvalid, "invalid_verb", "%.20q: use pause, resume, stop or start", verb)
	}
	if to != a.Status && !a.Status.CanMove(to) {
		return to, kind, wrongStatus(a, verb)
	}
	return to, kind, nil
}

func wrongStatus(a project.Agent, verb string) error {
	return sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "cannot %s agent %s: it is %s", verb, a.ID, a.Status)
}
