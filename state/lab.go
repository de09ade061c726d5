package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	sqlProject       = `SELECT record FROM projects WHERE id = ?`
	sqlProjectByName = `SELECT record FROM projects WHERE name = ?1 ORDER BY status = 'killed', created_at DESC LIMIT 1`
	sqlProjects      = `SELECT record FROM projects ORDER BY created_at, id`
	sqlLiveProjects  = `SELECT record FROM projects WHERE status <> 'killed' ORDER BY created_at, id`
	sqlPutProject    = `INSERT INTO projects (id, name, status, created_at, record, owner) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
		ON CONFLICT (id) DO UPDATE SET name = ?2, status = ?3, record = ?5, owner = ?6`
	sqlDeleteProject = `DELETE FROM projects WHERE id = ?`
	sqlDropAgents    = `DELETE FROM agents WHERE project = ? AND project <> ''`

	sqlAgent       = `SELECT record FROM agents WHERE id = ?`
	sqlAgents      = `SELECT record FROM agents WHERE project = ? ORDER BY created_at, id`
	sqlAllAgents   = `SELECT record FROM agents ORDER BY created_at, id`
	sqlDeleteAgent = `DELETE FROM agents WHERE id = ?`
	sqlPutAgent    = `INSERT INTO agents (id, project, status, created_at, record) VALUES (?1, ?2, ?3, ?4, ?5)
		ON CONFLICT (id) DO UPDATE SET status = ?3, record = ?5`

	sqlExperiment         = `SELECT record FROM experiments WHERE id = ?`
	sqlExperiments        = `SELECT record FROM experiments WHERE project = ? ORDER BY started_at, id`
	sqlRunningExperiments = `SELECT record FROM experiments WHERE status = 'running' ORDER BY started_at`
	sqlPutExperiment      = `INSERT INTO experiments (id, project, status, started_at, record) VALUES (?1, ?2, ?3, ?4, ?5)
		ON CONFLICT (id) DO UPDATE SET status = ?3, record = ?5`

	sqlEvaluations    = `SELECT record FROM evaluations WHERE project = ? ORDER BY at DESC, id LIMIT ?`
	sqlPutEvaluation  = `INSERT INTO evaluations (id, project, at, record) VALUES (?, ?, ?, ?)`
	sqlOldEvaluations = `DELETE FROM evaluations WHERE project = ?1 AND at < (
		SELECT at FROM evaluations WHERE project = ?1 ORDER BY at DESC LIMIT 1 OFFSET ?2)`

	sqlPromotion     = `SELECT record FROM promotions WHERE id = ?`
	sqlPromotions    = `SELECT record FROM promotions WHERE project = ? ORDER BY started_at DESC, id`
	sqlPromotionsNow = `SELECT record FROM promotions WHERE status NOT IN ('done', 'rolled_back') ORDER BY started_at, id`
	sqlPutPromotion  = `INSERT INTO promotions (id, project, status, started_at, record) VALUES (?1, ?2, ?3, ?4, ?5)
		ON CONFLICT (id) DO UPDATE SET status = ?3, record = ?5`
)

// keptEvaluations is how many of a project are kept.
const keptEvaluations = 1000

// The lab's rows are records as JSON, with the columns they are found by.

// UpdateLab runs f over the lab's rows as one transaction, which is on disk
// when it returns. f only decides: it does nothing that takes time.
func (d *DB) UpdateLab(ctx context.Context, f func(project.Tx) error) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		return f(labTx{t})
	})
}

// labTx is a write transaction in the lab's words.
type labTx struct{ t *tx }

var _ project.Tx = labTx{}

func (l labTx) Project(id project.ID) (project.Project, error) {
	return recordOf[project.Project](l.t, "project", string(id), sqlProject)
}

func (l labTx) PutProject(p project.Project) error {
	data, err := toJSON(p)
	if err != nil {
		return err
	}
	_, err = l.t.exec(sqlPutProject, string(p.ID), p.Name, string(p.Status), p.CreatedAt.UnixNano(), data, p.Owner)
	if isUnique(err) {
		return sandbox.Errorf(sandbox.ErrConflict, "project_exists", "there is a project %s already: use it, or choose another name", p.Name)
	}
	if err != nil {
		return err
	}
	return l.t.projectWebhooks(p)
}

func (l labTx) DeleteProject(id project.ID) error {
	for _, q := range []string{sqlDropAgents, sqlDropWebhooks, sqlDeleteProject} {
		if _, err := l.t.exec(q, string(id)); err != nil {
			return err
		}
	}
	return nil
}

func (l labTx) Agent(id project.AgentID) (project.Agent, error) {
	return recordOf[project.Agent](l.t, "agent", string(id), sqlAgent)
}

func (l labTx) Agents(id project.ID) ([]project.Agent, error) {
	return recordsOf[project.Agent](l.t, sqlAgents, string(id))
}

func (l labTx) PutAgent(a project.Agent) error {
	data, err := toJSON(a)
	if err == nil {
		_, err = l.t.exec(sqlPutAgent, string(a.ID), string(a.Project), string(a.Status), a.CreatedAt.UnixNano(), data)
	}
	return err
}

func (l labTx) DeleteAgent(id project.AgentID) error {
	_, err := l.t.exec(sqlDeleteAgent, string(id))
	return err
}

func (l labTx) Experiment(id project.ExperimentID) (project.Experiment, error) {
	return recordOf[project.Experiment](l.t, "experiment", string(id), sqlExperiment)
}

func (l labTx) Experiments(id project.ID) ([]project.Experiment, error) {
	return recordsOf[project.Experiment](l.t, sqlExperiments, string(id))
}

func (l labTx) PutExperiment(e project.Experiment) error {
	data, err := toJSON(e)
	if err == nil {
		_, err = l.t.exec(sqlPutExperiment, string(e.ID), string(e.Project), string(e.Status), e.StartedAt.UnixNano(), data)
	}
	return err
}

func (l labTx) PutEvaluation(e project.Evaluation) error {
	data, err := toJSON(e)
	if err == nil {
		_, err = l.t.exec(sqlPutEvaluation, string(e.ID), string(e.Project), e.At.UnixNano(), data)
	}
	if err == nil {
		_, err = l.t.exec(sqlOldEvaluations, string(e.Project), keptEvaluations-1)
	}
	return err
}

func (l labTx) Promotion(id project.PromotionID) (project.Promotion, error) {
	return recordOf[project.Promotion](l.t, "promotion", string(id), sqlPromotion)
}

func (l labTx) PutPromotion(p project.Promotion) error {
	data, err := toJSON(p)
	if err != nil {
		return err
	}
	_, err = l.t.exec(sqlPutPromotion, string(p.ID), string(p.Project), string(p.Status), p.StartedAt.UnixNano(), data)
	if isUnique(err) {
		return sandbox.Errorf(sandbox.ErrConflict, "promotion_running", "another promotion of project %s has not ended: 'sandbox project show %s' tells how far it is", p.Project, p.Project)
	}
	return err
}

func (l labTx) Tell(e sandbox.Event) error {
	_, err := l.t.appendEvents(e)
	return err
}

// Project returns a project by its id. ErrNotFound.
func (d *DB) Project(ctx context.Context, id project.ID) (project.Project, error) {
	return lookUp[project.Project](ctx, d, "project", string(id), sqlProject)
}

// ProjectByName returns the caller's project of a name, or with NAME@OWNER that of
// another: rather one that was not killed, and the newest of those. Work that no
// caller asked for gets that of any owner. ErrNotFound.
func (d *DB) ProjectByName(ctx context.Context, name string) (project.Project, error) {
	name, owner, called := meant(ctx, name)
	if called {
		return lookUp[project.Project](ctx, d, "project", name, sqlOwnProjectNamed, owner)
	}
	return lookUp[project.Project](ctx, d, "project", name, sqlProjectByName)
}

// Projects returns every project, the oldest first.
func (d *DB) Projects(ctx context.Context) ([]project.Project, error) {
	return listed[project.Project](ctx, d, sqlProjects)
}

// LiveProjects returns those that were not killed, the oldest first.
func (d *DB) LiveProjects(ctx context.Context) ([]project.Project, error) {
	return listed[project.Project](ctx, d, sqlLiveProjects)
}

// Agent returns one agent. ErrNotFound.
func (d *DB) Agent(ctx context.Context, id project.AgentID) (project.Agent, error) {
	return lookUp[project.Agent](ctx, d, "agent", string(id), sqlAgent)
}

// Agents returns those of a project, or with an empty id all, the oldest
// first.
func (d *DB) Agents(ctx context.Context, id project.ID) ([]project.Agent, error) {
	if id == "" {
		return listed[project.Agent](ctx, d, sqlAllAgents)
	}
	return listed[project.Agent](ctx, d, sqlAgents, string(id))
}

// Experiments returns those of a project, or with an empty id all that run.
func (d *DB) Experiments(ctx context.Context, id project.ID) ([]project.Experiment, error) {
	if id == "" {
		return listed[project.Experiment](ctx, d, sqlRunningExperiments)
	}
	return listed[project.Experiment](ctx, d, sqlExperiments, string(id))
}

// Evaluations returns the last evaluations of a project, the newest first.
func (d *DB) Evaluations(ctx context.Context, id project.ID, limit int) ([]project.Evaluation, error) {
	return listed[project.Evaluation](ctx, d, sqlEvaluations, string(id), limit)
}

// Promotions returns those of a project, the newest first, or with an empty id
// all that have not ended.
func (d *DB) Promotions(ctx context.Context, id project.ID) ([]project.Promotion, error) {
	if id == "" {
		return listed[project.Promotion](ctx, d, sqlPromotionsNow)
	}
	return listed[project.Promotion](ctx, d, sqlPromotions, string(id))
}

func missing(what, id string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, what+"_not_found", "no %s %.70q: 'sandbox project ls' and 'sandbox project show' list what there is", what, id)
}

// recordOf reads one record in a transaction.
func recordOf[T any](t *tx, what, id, query string) (v T, err error) {
	found, err := t.row(query, id)
	if errors.Is(err, sql.ErrNoRows) {
		return v, missing(what, id)
	}
	if err != nil {
		return v, err
	}
	return scanRecord[T](found)
}

// recordsOf reads every record of a query in a transaction.
func recordsOf[T any](t *tx, query string, args ...any) ([]T, error) {
	rows, err := t.all(query, args...)
	var out []T
	for _, r := range rows {
		v, err := scanRecord[T](r)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, err
}

func lookUp[T any](ctx context.Context, d *DB, what, id, query string, more ...any) (v T, err error) {
	found, err := d.first(ctx, query, append([]any{id}, more...)...)
	if errors.Is(err, sql.ErrNoRows) {
		return v, missing(what, id)
	}
	if err != nil {
		return v, err
	}
	return scanRecord[T](found)
}

func listed[T any](ctx context.Context, d *DB, query string, args ...any) ([]T, error) {
	rows, err := d.reader.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, scanRecord[T])
	return all, translate(err)
}

func scanRecord[T any](s scanner) (v T, err error) {
	var data []byte
	if err := s.Scan(&data); err != nil {
		return v, err
	}
	if err := json.Unmarshal(data, &v); err != nil {
		return v, fmt.Errorf("reading a %T: %w", v, err)
	}
	return v, nil
}

// all returns every row of a query's result.
func (c *conn) all(query string, args ...any) (out []record, err error) {
	s, bound, err := c.find(query, args)
	if err != nil {
		return nil, err
	}
	rows, err := s.QueryContext(context.Background(), bound)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for n := len(rows.Columns()); ; {
		r := make(record, n)
		switch err := rows.Next(r); {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return nil, err
		}
		out = append(out, r)
	}
}
