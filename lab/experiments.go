package lab

import (
	"context"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// maxExperiments is how many of one project may run.
const maxExperiments = 100

// Templates lists the templates of experiments.
func (l *Lab) Templates() []project.Template {
	return slices.Concat(l.cfg.Templates, project.Templates())
}

// StartExperiment begins an experiment of an active project.
func (l *Lab) StartExperiment(ctx context.Context, ref string, req project.ExperimentRequest) (project.Experiment, error) {
	var e project.Experiment
	req, err := req.Fill(l.Templates())
	if err != nil {
		return e, err
	}
	p, err := l.find(ctx, ref)
	if err != nil {
		return e, err
	}
	err = l.update(ctx, func(t project.Tx) error {
		if p, err = t.Project(p.ID); err != nil {
			return err
		}
		if p.Status != project.StatusActive {
			return notActive(p)
		}
		all, err := t.Experiments(p.ID)
		if err != nil {
			return err
		}
		if n := project.CountExperiments(all).Running; n >= maxExperiments {
			return sandbox.Errorf(sandbox.ErrExhausted, "too_many_experiments", "%d experiments of project %s run already: complete one first", n, p.ID)
		}
		for _, id := range req.Agents {
			if a, err := t.Agent(id); err != nil || a.Project != p.ID {
				return sandbox.Errorf(sandbox.ErrInvalid, "agent_not_found", "no agent %.70q in project %s", id, p.ID)
			}
		}
		now := time.Now().UTC()
		e = project.Experiment{
			ID: project.NewExperimentID(), Project: p.ID, Status: project.ExperimentRunning, Template: req.Template, Hypothesis: req.Hypothesis,
			Config: req.Config, Agents: req.Agents, Actor: req.Actor, StartedAt: now,
		}
		if req.Seconds > 0 {
			e.Deadline = now.Add(time.Duration(req.Seconds) * time.Second)
		}
		if err := t.PutExperiment(e); err != nil {
			return err
		}
		return t.Tell(newsOf(p, eventStarted, req.Actor, map[string]string{"experiment": string(e.ID), "hypothesis": e.Hypothesis}))
	})
	wake(l.ticks)
	return e, err
}

// CompleteExperiment writes an experiment's outcome down. ErrConflict with
// code experiment_ended.
func (l *Lab) CompleteExperiment(ctx context.Context, ref string, id project.ExperimentID, o project.Outcome) (project.Experiment, error) {
	var e project.Experiment
	p, err := l.find(ctx, ref)
	if err != nil {
		return e, err
	}
	err = l.update(ctx, func(t project.Tx) error {
		if e, err = t.Experiment(id); err != nil {
			return err
		}
		if e.Project != p.ID {
			return sandbox.Errorf(sandbox.ErrNotFound, "experiment_not_found", "no experiment %.40q in project %s", id, p.ID)
		}
		if e, err = e.Complete(time.Now().UTC(), o); err != nil {
			return err
		}
		if err := t.PutExperiment(e); err != nil {
			return err
		}
		outcome := "failure"
		if o.Success {
			outcome = "success"
		}
		return t.Tell(newsOf(p, eventCompleted, o.Actor, map[string]string{"experiment": string(e.ID), "outcome": outcome}))
	})
	return e, err
}

// Experiments lists a project's experiments, the oldest first.
func (l *Lab) Experiments(ctx context.Context, ref string) ([]project.Experiment, error) {
	p, err := l.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	return l.store.Experiments(ctx, p.ID)
}

// expire ends an experiment whose time is over, with the agents it is about.
func (l *Lab) expire(ctx context.Context, id project.ExperimentID) error {
	var stopped []project.Agent
	err := l.update(ctx, func(t project.Tx) error {
		stopped = nil
		e, err := t.Experiment(id)
		if err != nil || !e.Overdue(time.Now()) {
			return err
		}
		p, err := t.Project(e.Project)
		if err != nil {
			return err
		}
		no := false
		e.Status, e.EndedAt, e.Success = project.ExperimentExpired, time.Now().UTC(), &no
		if err := t.PutExperiment(e); err != nil {
			return err
		}
		for _, id := range e.Agents {
			a, err := t.Agent(id)
			if err != nil || !a.Status.Runs() || a.Held != "" { // one that is being promoted belongs to that
				continue
			}
			a.Status, a.Detail = project.AgentStopped, "the time of experiment "+string(e.ID)+" was over"
			if err := t.PutAgent(a); err != nil {
				return err
			}
			if err := tellAgent(t, a, eventAgentStopped, "daemon"); err != nil {
				return err
			}
			stopped = append(stopped, a)
		}
		return t.Tell(newsOf(p, eventExpired, "daemon", map[string]string{"experiment": string(e.ID), "hypothesis": e.Hypothesis}))
	})
	for _, a := range stopped {
		l.own.keep(a)
	}
	return err
}
