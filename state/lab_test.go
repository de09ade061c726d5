package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

func aProject(name string) project.Project {
	return project.Project{
		ID: project.NewID(), Name: name, Status: project.StatusActive, CreatedAt: time.Now().UTC(),
		Settings: project.Settings{Goal: "g", Criteria: project.Criteria{MinProfit: cost.Unit / 2}, Webhooks: []project.Hook{{URL: "http://x", Secret: "s"}}},
	}
}

func anAgent(p project.ID, kind string) project.Agent {
	return project.Agent{
		ID: project.NewAgentID(p, kind), Project: p, Type: kind, Status: project.AgentActive, CreatedAt: time.Now().UTC(),
		Spec: project.AgentSpec{Command: []string{"x"}, Config: map[string]any{"k": "v"}},
	}
}

// lab runs a transaction that must work.
func (d *DB) lab(t *testing.T, f func(tx project.Tx) error) {
	t.Helper()
	if err := d.UpdateLab(t.Context(), f); err != nil {
		t.Fatal(err)
	}
}

func TestLabRows(t *testing.T) {
	d := open(t)
	ctx := t.Context()
	p, q := aProject("shop"), aProject("market")
	a, b := anAgent(p.ID, "bot"), anAgent(q.ID, "bot")
	e := project.Experiment{ID: project.NewExperimentID(), Project: p.ID, Status: project.ExperimentRunning, Hypothesis: "h", StartedAt: time.Now().UTC()}
	pr := project.Promotion{ID: project.NewPromotionID(), Project: p.ID, Status: project.PromotionMoving, StartedAt: time.Now().UTC(), Moves: []project.Move{{From: a.ID, To: a.ID.Promoted()}}}
	d.lab(t, func(tx project.Tx) error {
		err := errors.Join(tx.PutProject(p), tx.PutProject(q), tx.PutAgent(a), tx.PutAgent(b), tx.PutExperiment(e), tx.PutPromotion(pr))
		// What was written is seen in the transaction.
		if got, err := tx.Agents(p.ID); err != nil || len(got) != 1 || got[0].ID != a.ID {
			t.Errorf("agents in the transaction: %+v, %v", got, err)
		}
		return err
	})

	if got, err := d.Project(ctx, p.ID); err != nil || !reflect.DeepEqual(got, p) {
		t.Errorf("project %+v, want %+v, %v", got, p, err)
	}
	if got, err := d.ProjectByName(ctx, "market"); err != nil || got.ID != q.ID {
		t.Errorf("by name %+v, %v", got, err)
	}
	if got, err := d.Projects(ctx); err != nil || len(got) != 2 {
		t.Errorf("projects %+v, %v", got, err)
	}
	if got, err := d.Agent(ctx, a.ID); err != nil || !reflect.DeepEqual(got, a) {
		t.Errorf("agent %+v, want %+v, %v", got, a, err)
	}
	for id, n := range map[project.ID]int{"": 2, p.ID: 1, "prj_none": 0} {
		if got, err := d.Agents(ctx, id); err != nil || len(got) != n {
			t.Errorf("agents of %q: %d, %v", id, len(got), err)
		}
	}
	for id, n := range map[project.ID]int{"": 1, p.ID: 1, q.ID: 0} {
		if got, err := d.Experiments(ctx, id); err != nil || len(got) != n {
			t.Errorf("experiments of %q: %d, %v", id, len(got), err)
		}
		if got, err := d.Promotions(ctx, id); err != nil || len(got) != n {
			t.Errorf("promotions of %q: %d, %v", id, len(got), err)
		}
	}
	pr.Status, e.Status = project.PromotionDone, project.ExperimentCompleted
	d.lab(t, func(tx project.Tx) error { return errors.Join(tx.PutPromotion(pr), tx.PutExperiment(e)) })
	if now, err := d.Promotions(ctx, ""); err != nil || len(now) != 0 {
		t.Errorf("promotions under way: %+v, %v", now, err)
	}
	if now, err := d.Experiments(ctx, ""); err != nil || len(now) != 0 {
		t.Errorf("experiments that run: %+v, %v", now, err)
	}

	d.lab(t, func(tx project.Tx) error { return tx.DeleteProject(p.ID) })
	_, err := d.Agent(ctx, a.ID)
	want(t, err, sandbox.ErrNotFound, "agent_not_found")
	_, err = d.Project(ctx, p.ID)
	want(t, err, sandbox.ErrNotFound, "project_not_found")
	if all, err := d.Agents(ctx, ""); err != nil || len(all) != 1 || all[0].ID != b.ID {
		t.Errorf("agents after one project went: %+v, %v", all, err)
	}
	if all, err := d.Experiments(ctx, p.ID); err != nil || len(all) != 0 {
		t.Errorf("experiments of a project that is gone: %+v, %v", all, err)
	}
}

func TestLabNamesAndPromotionsAreUnique(t *testing.T) {
	d := open(t)
	p := aProject("shop")
	pr := project.Promotion{ID: project.NewPromotionID(), Project: p.ID, Status: project.PromotionWatching}
	d.lab(t, func(tx project.Tx) error { return errors.Join(tx.PutProject(p), tx.PutPromotion(pr)) })

	again := aProject("shop")
	err := d.UpdateLab(t.Context(), func(tx project.Tx) error { return tx.PutProject(again) })
	want(t, err, sandbox.ErrConflict, "project_exists")
	second := project.Promotion{ID: project.NewPromotionID(), Project: p.ID, Status: project.PromotionMoving}
	err = d.UpdateLab(t.Context(), func(tx project.Tx) error { return tx.PutPromotion(second) })
	want(t, err, sandbox.ErrConflict, "promotion_running")

	// The controls: once the first is over, both may be.
	pr.Status, p.Status = project.PromotionRolledBack, project.StatusKilled
	d.lab(t, func(tx project.Tx) error { return errors.Join(tx.PutPromotion(pr), tx.PutProject(p)) })
	d.lab(t, func(tx project.Tx) error { return errors.Join(tx.PutPromotion(second), tx.PutProject(again)) })
	if got, err := d.LiveProjects(t.Context()); err != nil || len(got) != 1 || got[0].ID != again.ID {
		t.Errorf("projects that were not killed: %+v, %v", got, err)
	}
	if got, err := d.ProjectByName(t.Context(), "shop"); err != nil || got.ID != again.ID {
		t.Errorf("the name is of %s, want %s, %v", got.ID, again.ID, err)
	}
}

func TestLabTransactionIsWhole(t *testing.T) {
	d := open(t)
	p := aProject("shop")
	no := errors.New("no")
	err := d.UpdateLab(t.Context(), func(tx project.Tx) error {
		return errors.Join(tx.PutProject(p), tx.Tell(sandbox.Event{Type: "x"}), no)
	})
	if !errors.Is(err, no) {
		t.Fatal(err)
	}
	if all, err := d.Projects(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("of a transaction that failed: %+v, %v", all, err)
	}
	if all, err := d.Events(t.Context(), 0, "", 0); err != nil || len(all) != 0 {
		t.Errorf("of a transaction that failed: %+v, %v", all, err)
	}
}

func TestEvaluationsAreBounded(t *testing.T) {
	d := open(t)
	p := aProject("shop")
	d.lab(t, func(tx project.Tx) error {
		err := tx.PutProject(p)
		for i := range keptEvaluations + 20 {
			e := project.Evaluation{ID: project.NewEvaluationID(), Project: p.ID, At: time.Unix(int64(i), 0).UTC(), Actor: fmt.Sprint(i)}
			err = errors.Join(err, tx.PutEvaluation(e))
		}
		return err
	})
	all, err := d.Evaluations(t.Context(), p.ID, 2*keptEvaluations)
	if err != nil || len(all) != keptEvaluations || all[0].Actor != fmt.Sprint(keptEvaluations+19) || all[len(all)-1].Actor != "20" {
		t.Errorf("%d evaluations, the first %+v, %v", len(all), all[0], err)
	}
}

// TestLabFixture reads what an older daemon wrote.
func TestLabFixture(t *testing.T) {
	script, err := os.ReadFile("testdata/v0008.sql")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state.db")
	db := bare(t, path)
	if _, err := db.Exec(string(script)); err != nil {
		t.Fatal(err)
	}
	_ = db.Close()
	d, ctx := openAt(t, path), t.Context()
	p, err := d.ProjectByName(ctx, "shop")
	if err != nil || p.ID != "prj_aaaaaaaaaaaa" || p.Status != project.StatusPromoting || p.Criteria.MinProfit != 3*cost.Unit/2 {
		t.Errorf("project %+v, %v", p, err)
	}
	agents, err := d.Agents(ctx, p.ID)
	if err != nil || len(agents) != 1 || agents[0].Restarts != 2 || agents[0].Held != "prm_aaaaaaaaaaaa" {
		t.Errorf("agents %+v, %v", agents, err)
	}
	running, err := d.Promotions(ctx, "")
	if err != nil || len(running) != 1 || running[0].Moves[0].To != "bot_aaaaaaaa" || running[0].Window != 600_000 {
		t.Errorf("promotions %+v, %v", running, err)
	}
	evaluations, err := d.Evaluations(ctx, p.ID, 1)
	if err != nil || len(evaluations) != 1 || evaluations[0].Recommendation != project.Recommend || evaluations[0].Inputs.Total.Profit != cost.SumOf(cost.Unit) {
		t.Errorf("evaluations %+v, %v", evaluations, err)
	}
	if experiments, err := d.Experiments(ctx, p.ID); err != nil || len(experiments) != 1 {
		t.Errorf("experiments %+v, %v", experiments, err)
	}
}
