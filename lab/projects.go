package lab

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// CreateProject makes a project with its workspace. ErrConflict with code
// project_exists.
func (l *Lab) CreateProject(ctx context.Context, req project.Request) (project.Project, error) {
	if err := sandbox.ValidateName(req.Name); err != nil {
		return project.Project{}, err
	}
	if strings.HasPrefix(req.Name, "prj_") {
		return project.Project{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_name", "name %.70q looks like a project id: choose another", req.Name)
	}
	p := project.Project{ID: project.NewID(), Name: req.Name, Owner: req.Actor, Status: project.StatusActive, CreatedAt: time.Now().UTC(), Settings: req.Settings}
	if err := l.checkSettings(&p); err != nil {
		return p, err
	}
	p.Workspace = "ws-" + string(p.ID)
	// The row comes first, so that no volume is left that no project knows; the
	// event comes last, since without its workspace there is no project.
	if err := l.update(ctx, func(t project.Tx) error { return t.PutProject(p) }); err != nil {
		return p, err
	}
	work := context.WithoutCancel(ctx)
	if err := l.workspace(ctx, p, req.WorkspaceBytes); err != nil {
		_ = l.store.UpdateLab(work, func(t project.Tx) error { return t.DeleteProject(p.ID) }) // the error says why
		return p, err
	}
	l.complain(work, "write the event of a new project", l.update(work, func(t project.Tx) error {
		return t.Tell(newsOf(p, eventCreated, req.Actor, map[string]string{"name": p.Name}))
	}))
	return p.Shown(), nil
}

// workspace makes a project's volume; one that is there is fine.
func (l *Lab) workspace(ctx context.Context, p project.Project, bytes int64) error {
	_, err := l.cfg.Sandboxes.CreateVolume(ctx, sandbox.VolumeRequest{
		Name: p.Workspace, SizeBytes: bytes, Actor: p.Owner, Labels: map[string]string{project.LabelProject: string(p.ID)},
	})
	if sandbox.CodeOf(err) == "volume_exists" {
		err = nil
	}
	return err
}

// checkSettings judges what a project is to be, and plans its next
// evaluation.
func (l *Lab) checkSettings(p *project.Project) error {
	if err := p.Validate(); err != nil {
		return err
	}
	if err := l.rules.checkAll(p.Settings); err != nil {
		return err
	}
	p.NextEvaluation = time.Time{}
	if p.Cron == "" {
		return nil
	}
	next, err := l.cfg.NextRun(p.Cron, time.Now().UTC())
	p.NextEvaluation = next
	return err
}

// ChangeProject changes a project's settings.
func (l *Lab) ChangeProject(ctx context.Context, ref string, ch project.Change) (project.Project, error) {
	p, err := l.find(ctx, ref)
	if err != nil {
		return p, err
	}
	err = l.update(ctx, func(t project.Tx) error {
		if p, err = t.Project(p.ID); err != nil {
			return err
		}
		if p.Status == project.StatusKilled {
			return notActive(p)
		}
		p.Settings = ch.Apply(p.Settings)
		if err := l.checkSettings(&p); err != nil {
			return err
		}
		maps.DeleteFunc(p.Fired, func(name string, _ bool) bool {
			return !slices.ContainsFunc(p.Alerts, func(r project.Rule) bool { return r.Name == name })
		})
		if err := t.PutProject(p); err != nil {
			return err
		}
		return t.Tell(newsOf(p, eventChanged, ch.Actor, nil))
	})
	wake(l.ticks)
	return p.Shown(), err
}

// Projects lists the projects, the oldest first: with a status only those,
// without one all that were not killed.
func (l *Lab) Projects(ctx context.Context, status project.Status, all bool) ([]project.Project, error) {
	if status != "" && !status.Valid() {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_status", "no project status %.40q: use one of %v", status, project.Statuses())
	}
	list, err := l.store.Projects(ctx)
	list = slices.DeleteFunc(list, func(p project.Project) bool {
		if status != "" {
			return p.Status != status
		}
		return !all && p.Status == project.StatusKilled
	})
	for i := range list {
		list[i] = list[i].Shown()
	}
	return list, err
}

// View shows a project with all that belongs to it.
func (l *Lab) View(ctx context.Context, ref string) (project.View, error) {
	var v project.View
	p, err := l.find(ctx, ref)
	if err != nil {
		return v, err
	}
	v.Project = p.Shown()
	agents, money, own, err := l.books(ctx, p.ID)
	if err != nil {
		return v, err
	}
	for _, a := range agents {
		v.Agents = append(v.Agents, project.AgentView{Agent: a, Metrics: project.MetricsOf(money[a.ID])})
	}
	v.Metrics = project.Total(own, money)
	if v.Budgets, err = l.viewBudgets(ctx, p.ID, agents); err != nil {
		return v, err
	}
	if v.Experiments, err = l.store.Experiments(ctx, p.ID); err != nil {
		return v, err
	}
	evaluations, err := l.store.Evaluations(ctx, p.ID, 1)
	if err != nil {
		return v, err
	}
	if len(evaluations) > 0 {
		v.Evaluation = &evaluations[0]
	}
	promotions, err := l.store.Promotions(ctx, p.ID)
	if len(promotions) > 0 {
		v.Promotion = &promotions[0]
	}
	return v, err
}

// books reads a project's agents and what they came to.
func (l *Lab) books(ctx context.Context, id project.ID) ([]project.Agent, map[project.AgentID]project.Money, project.Money, error) {
	agents, err := l.store.Agents(ctx, id)
	if err != nil {
		return nil, nil, project.Money{}, err
	}
	money, own, err := l.cfg.Books.Money(ctx, id)
	return agents, money, own, err
}

// Summary sums the projects up: of one status, or of all.
func (l *Lab) Summary(ctx context.Context, status project.Status) (project.Summary, error) {
	s := project.Summary{Count: map[project.Status]int{}, Projects: []project.Line{}}
	list, err := l.Projects(ctx, status, true)
	if err != nil {
		return s, err
	}
	var sum project.Money
	for _, p := range list {
		agents, money, own, err := l.books(ctx, p.ID)
		if err != nil {
			return s, err
		}
		line := project.Line{ID: p.ID, Name: p.Name, Status: p.Status, Agents: len(agents)}
		for _, a := range agents {
			if a.Status == project.AgentActive {
				line.Active++
			}
		}
		line.Metrics = project.Total(own, money)
		sum = sum.Add(project.Money{Cost: line.Metrics.Cost, Revenue: line.Metrics.Revenue})
		s.Count[p.Status]++
		s.Projects = append(s.Projects, line)
	}
	s.Total = project.MetricsOf(sum)
	return s, nil
}

// KillProject ends a project: its agents are stopped and their sandboxes
// removed, its experiments cancelled; the record stays. What it promoted goes
// on. Repeating it is safe. ErrConflict with code promotion_running while it
// is being promoted.
func (l *Lab) KillProject(ctx context.Context, ref string, dropWorkspace bool, actor string) (project.Project, error) {
	p, err := l.find(ctx, ref)
	if err != nil {
		return p, err
	}
	err = l.update(ctx, func(t project.Tx) error {
		if p, err = t.Project(p.ID); err != nil {
			return err
		}
		switch p.Status {
		case project.StatusPromoting:
			return sandbox.Errorf(sandbox.ErrConflict, "promotion_running", "project %s is being promoted: wait for its end", p.ID)
		case project.StatusKilled:
			if dropWorkspace && p.Workspace != "" {
				p.Ending, p.DropWorkspace = true, true
				return t.PutProject(p)
			}
			return nil
		}
		p.Status, p.EndedAt, p.Ending, p.DropWorkspace, p.NextEvaluation = project.StatusKilled, time.Now().UTC(), true, dropWorkspace, time.Time{}
		if err := t.PutProject(p); err != nil {
			return err
		}
		return l.killAll(t, p, actor)
	})
	if err != nil {
		return p, err
	}
	if err := l.finishEnd(ctx, p.ID); err != nil {
		l.spawn(func() { l.endProject(p.ID) })
		return p, sandbox.Errorf(sandbox.ErrUnavailable, "kill_incomplete", "project %s is killed; what it had is not all gone yet and is being tried again: %w", p.ID, err)
	}
	p, err = l.store.Project(ctx, p.ID)
	return p.Shown(), err
}

// killAll stops agents and cancels experiments, in rows.
func (l *Lab) killAll(t project.Tx, p project.Project, actor string) error {
	agents, err := t.Agents(p.ID)
	if err != nil {
		return err
	}
	for _, a := range agents {
		if a.Status.Runs() {
			a.Status, a.Detail = project.AgentStopped, "its project was killed"
		}
		if err := t.PutAgent(a); err != nil {
			return err
		}
	}
	experiments, err := t.Experiments(p.ID)
	if err != nil {
		return err
	}
	for _, e := range experiments {
		if e.Status != project.ExperimentRunning {
			continue
		}
		e.Status, e.EndedAt = project.ExperimentCancelled, p.EndedAt
		if err := t.PutExperiment(e); err != nil {
			return err
		}
	}
	return t.Tell(newsOf(p, eventKilled, actor, map[string]string{"name": p.Name}))
}

// endProject is finishEnd until it works.
func (l *Lab) endProject(id project.ID) {
	for wait := time.Second; ; wait = min(2*wait, time.Minute) {
		ctx, cancel := context.WithTimeout(l.life, workTimeout)
		err := l.finishEnd(ctx, id)
		cancel()
		if err == nil || l.life.Err() != nil {
			return
		}
		l.log.ErrorContext(ctx, "remove what a killed project had: tried again", "project", id, "err", err)
		if pause(l.life, wait) != nil {
			return
		}
	}
}

// finishEnd removes what a killed project had. Repeating it is safe.
func (l *Lab) finishEnd(ctx context.Context, id project.ID) error {
	p, err := l.store.Project(ctx, id)
	if err != nil || !p.Ending {
		return err
	}
	agents, err := l.store.Agents(ctx, id)
	if err != nil {
		return err
	}
	for _, a := range agents {
		if err := l.own.remove(ctx, a.ID); err != nil {
			return err
		}
	}
	if p.DropWorkspace && p.Workspace != "" {
		err := l.cfg.Sandboxes.RemoveVolume(ctx, p.Workspace, p.Owner)
		if err != nil && !is(err, sandbox.ErrNotFound) {
			return err
		}
		p.Workspace = ""
	}
	return l.store.UpdateLab(ctx, func(t project.Tx) error {
		now, err := t.Project(id)
		if err != nil {
			return err
		}
		now.Ending, now.DropWorkspace, now.Workspace = false, false, p.Workspace
		return t.PutProject(now)
	})
}

// RemoveProject forgets a killed project, with its workspace. ErrConflict with
// code project_not_killed.
func (l *Lab) RemoveProject(ctx context.Context, ref, actor string) error {
	p, err := l.find(ctx, ref)
	if err != nil {
		return err
	}
	if p.Status != project.StatusKilled {
		return sandbox.Errorf(sandbox.ErrConflict, "project_not_killed", "project %s is %s: 'sandbox project kill %s' first", p.ID, p.Status, p.ID)
	}
	if p, err = l.KillProject(ctx, string(p.ID), true, actor); err != nil {
		return err
	}
	agents, err := l.store.Agents(ctx, p.ID)
	if err != nil {
		return err
	}
	for _, a := range agents {
		if err := l.own.dropBudgets(ctx, actor, a.ID); err != nil {
			return err
		}
	}
	return l.update(ctx, func(t project.Tx) error {
		if err := t.DeleteProject(p.ID); err != nil {
			return err
		}
		return t.Tell(sandbox.Event{Type: "project.removed", Actor: actor, Data: map[string]string{"project": string(p.ID), "name": p.Name}})
	})
}
