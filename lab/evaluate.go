package lab

import (
	"context"
	"maps"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Evaluate judges a project by what it came to and keeps the judgement with
// all it was judged by.
func (l *Lab) Evaluate(ctx context.Context, ref, actor string) (project.Evaluation, error) {
	p, err := l.find(ctx, ref)
	if err != nil {
		return project.Evaluation{}, err
	}
	if p.Status == project.StatusKilled {
		return project.Evaluation{}, notActive(p)
	}
	in, err := l.inputs(ctx, p)
	if err != nil {
		return project.Evaluation{}, err
	}
	e := project.Evaluation{ID: project.NewEvaluationID(), Project: p.ID, At: in.At, Actor: actor, Criteria: p.Criteria, Inputs: in}
	e.Verdicts, e.Recommendation = project.Judge(p.Criteria, in, l.rules.holds)
	err = l.update(ctx, func(t project.Tx) error {
		if err := t.PutEvaluation(e); err != nil {
			return err
		}
		return t.Tell(newsOf(p, eventEvaluated, actor, map[string]string{
			"evaluation": string(e.ID), "recommendation": string(e.Recommendation), "roi": project.Percent(in.Total.Rate()), "profit": in.Total.Profit.String(),
		}))
	})
	return e, err
}

// Evaluations lists a project's last evaluations, the newest first.
func (l *Lab) Evaluations(ctx context.Context, ref string, limit int) ([]project.Evaluation, error) {
	p, err := l.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	if limit <= 0 {
		limit = 20
	}
	return l.store.Evaluations(ctx, p.ID, min(limit, 1000))
}

// inputs gathers all an evaluation looks at.
func (l *Lab) inputs(ctx context.Context, p project.Project) (project.Inputs, error) {
	in := project.Inputs{At: time.Now().UTC(), Agents: []project.AgentMetrics{}}
	agents, money, own, err := l.books(ctx, p.ID)
	if err != nil {
		return in, err
	}
	for _, a := range agents {
		in.Agents = append(in.Agents, project.AgentMetrics{Agent: a.ID, Type: a.Type, Status: a.Status, Metrics: project.MetricsOf(money[a.ID])})
	}
	if len(agents) > 0 {
		in.Age = max(0, int64(in.At.Sub(agents[0].CreatedAt)/time.Second))
	}
	in.Total = project.Total(own, money)
	experiments, err := l.store.Experiments(ctx, p.ID)
	in.Experiments = project.CountExperiments(experiments)
	return in, err
}

// Enter takes money from outside in: for an agent, or for the project as a
// whole. Sending it again does nothing.
func (l *Lab) Enter(ctx context.Context, ref string, e project.Entry, actor string) (project.Entry, error) {
	if err := e.Validate(); err != nil {
		return e, err
	}
	p, err := l.find(ctx, ref)
	if err != nil {
		return e, err
	}
	if p.Status == project.StatusKilled {
		return e, notActive(p)
	}
	var of sandbox.ID
	if e.Agent != "" {
		a, err := l.store.Agent(ctx, e.Agent)
		if err != nil {
			return e, err
		}
		if a.Project != p.ID {
			return e, sandbox.Errorf(sandbox.ErrNotFound, "agent_not_found", "no agent %.70q in project %s", e.Agent, p.ID)
		}
		if of = a.Account; of == "" {
			return e, sandbox.Errorf(sandbox.ErrConflict, "agent_never_ran", "agent %s never ran, so nothing can be booked for it", e.Agent)
		}
	}
	e.At = time.Now().UTC()
	if err := l.cfg.Books.Enter(ctx, p.ID, of, e, actor); err != nil {
		return e, err
	}
	wake(l.ticks) // alerts may have come true
	return e, nil
}

// alertTicks is every how many ticks alerts are looked at: that takes a reading
// of all counters.
const alertTicks = 6

// keepTicking looks at what time brings, until the lab ends.
func (l *Lab) keepTicking() {
	t := time.NewTicker(l.cfg.Tick)
	defer t.Stop()
	for n := 0; l.life.Err() == nil; n++ {
		l.tick(l.life, n%alertTicks == 0)
		select {
		case <-l.life.Done():
		case <-l.ticks: // something changed that alerts may be about
			n = -1
		case <-t.C:
		}
	}
}

// tick ends overdue experiments, runs evaluations that are due and looks at
// alerts.
func (l *Lab) tick(ctx context.Context, alerts bool) {
	running, err := l.store.Experiments(ctx, "")
	l.complain(ctx, "read the experiments", err)
	for _, e := range running {
		if e.Overdue(time.Now()) {
			l.complain(ctx, "end an experiment", l.expire(ctx, e.ID))
		}
	}
	all, err := l.store.LiveProjects(ctx)
	l.complain(ctx, "read the projects", err)
	for _, p := range all {
		if !p.NextEvaluation.IsZero() && !p.NextEvaluation.After(time.Now()) {
			l.complain(ctx, "evaluate a project", l.evaluateDue(ctx, p))
		}
		if alerts && len(p.Alerts) > 0 {
			l.complain(ctx, "look at the alerts of a project", l.alert(ctx, p))
		}
	}
}

func (l *Lab) complain(ctx context.Context, what string, err error) {
	if err != nil && ctx.Err() == nil {
		l.log.ErrorContext(ctx, what, "err", err)
	}
}

// evaluateDue runs a scheduled evaluation. The next time is written first, so
// that a crash does not run it twice; one missed is not made up for.
func (l *Lab) evaluateDue(ctx context.Context, p project.Project) error {
	missed := time.Since(p.NextEvaluation) > time.Minute+2*l.cfg.Tick
	err := l.store.UpdateLab(ctx, func(t project.Tx) error {
		now, err := t.Project(p.ID)
		if err != nil || now.Cron == "" {
			return err
		}
		if now.NextEvaluation, err = l.cfg.NextRun(now.Cron, time.Now().UTC()); err != nil {
			return err
		}
		return t.PutProject(now)
	})
	if err != nil || missed {
		return err
	}
	_, err = l.Evaluate(ctx, string(p.ID), "schedule")
	return err
}

// alert tells of conditions that came true, once until they were false again.
func (l *Lab) alert(ctx context.Context, p project.Project) error {
	in, err := l.inputs(ctx, p)
	if err != nil {
		return err
	}
	now := map[string]bool{}
	for _, r := range p.Alerts {
		yes, err := l.rules.holds(r.When, in)
		if err != nil {
			l.log.WarnContext(ctx, "compute an alert's condition", "project", p.ID, "alert", r.Name, "err", err)
		}
		if yes {
			now[r.Name] = true
		}
	}
	if maps.Equal(now, p.Fired) {
		return nil
	}
	return l.update(ctx, func(t project.Tx) error {
		current, err := t.Project(p.ID)
		if err != nil {
			return err
		}
		for _, r := range current.Alerts {
			if now[r.Name] && !current.Fired[r.Name] {
				data := map[string]string{"alert": r.Name, "when": r.When, "roi": project.Percent(in.Total.Rate()), "profit": in.Total.Profit.String()}
				if err := t.Tell(newsOf(current, eventAlert, "daemon", data)); err != nil {
					return err
				}
			}
		}
		current.Fired = now
		return t.PutProject(current)
	})
}
