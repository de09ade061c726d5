package lab

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// A promotion is one row in the lab's database, whose status says which way
// things go. Each status stands for acts that may be repeated:
//
//	moving        images copied; each agent stopped in the lab, then written
//	              and started in production
//	watching      their health decides until the window is over
//	finishing     their sandboxes in the lab are removed
//	rolling_back  their rows, sandboxes and volumes in production are removed
//
// The row is written before the acts begin and moves on after they ended. An
// agent runs in production only after it was stopped in the lab, and in the
// lab again only after it is gone from production: never in both.

// errCut marks that a test ended the work at a step.
var errCut = errors.New("the work was cut off")

// step tells a test where the work is.
func (l *Lab) step(format string, args ...any) error {
	if l.cfg.Step == nil {
		return nil
	}
	if err := l.cfg.Step(fmt.Sprintf(format, args...)); err != nil {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	return nil
}

const (
	moveTries    = 4                // before a move that does not work is rolled back
	moveTimeout  = 10 * time.Minute // for copying images and starting agents
	maxWindow    = 7 * 24 * time.Hour
	watchPoll    = 250 * time.Millisecond
	rollbackWait = 30 * time.Second // between two tries of a rollback, at most
)

// Promote evaluates a project and begins to move its agents into production.
// The promotion goes on by itself; it comes back as it is at its beginning.
// ErrConflict with code not_ready where the evaluation says so and req does
// not force it, nothing_to_promote, promotion_running or project_not_active.
func (l *Lab) Promote(ctx context.Context, ref string, req project.PromotionRequest) (project.Promotion, error) {
	var pr project.Promotion
	p, err := l.find(ctx, ref)
	if err != nil {
		return pr, err
	}
	if p.Status != project.StatusActive {
		return pr, notActive(p)
	}
	e, err := l.Evaluate(ctx, string(p.ID), req.Actor)
	if err != nil {
		return pr, err
	}
	if e.Recommendation == project.NotReady && !req.Force {
		return pr, sandbox.Errorf(sandbox.ErrConflict, "not_ready", "project %s is NOT_READY (%s): --force promotes it all the same", p.ID, failing(e))
	}
	roi := map[project.AgentID]int64{}
	for _, m := range e.Inputs.Agents {
		roi[m.Agent] = m.Rate()
	}
	agents, err := l.store.Agents(ctx, p.ID)
	if err != nil {
		return pr, err
	}
	moves, left, err := project.Plan(agents, roi)
	if err != nil {
		return pr, err
	}
	if err := l.nameImages(ctx, moves); err != nil {
		return pr, err
	}
	if req.Window < 0 || req.Window > maxWindow.Milliseconds() {
		return pr, sandbox.Errorf(sandbox.ErrInvalid, "invalid_window", "window of %d ms: use 0 (the daemon's setting) to %d", req.Window, maxWindow.Milliseconds())
	}
	window := time.Duration(req.Window) * time.Millisecond
	if window == 0 {
		window = l.cfg.Window
	}
	pr = project.Promotion{
		ID: project.NewPromotionID(), Project: p.ID, Status: project.PromotionMoving, Actor: req.Actor, Forced: e.Recommendation == project.NotReady,
		Evaluation: e.ID, Moves: moves, Left: left, StartedAt: time.Now().UTC(), Window: window.Milliseconds(),
	}
	if err := l.step("plan"); err != nil {
		return pr, err
	}
	if err := l.begin(ctx, pr); err != nil {
		return pr, err
	}
	l.drive(pr.ID)
	return pr, nil
}

// failing lists the criteria that did not pass.
func failing(e project.Evaluation) string {
	var names []string
	for _, v := range e.Verdicts {
		if !v.Pass {
			names = append(names, v.Name)
		}
	}
	return "failed: " + strings.Join(names, ", ")
}

// nameImages writes into the moves which images the agents run on, as their
// sandboxes say.
func (l *Lab) nameImages(ctx context.Context, moves []project.Move) error {
	for i, m := range moves {
		sb, err := l.cfg.Sandboxes.Sandbox(ctx, string(m.From))
		if err != nil {
			return fmt.Errorf("find the image of agent %s: %w", m.From, err)
		}
		img, err := l.cfg.Sandboxes.Image(ctx, sb.Spec.Image)
		if err != nil {
			return fmt.Errorf("find image %s of agent %s: %w", sb.Spec.Image, m.From, err)
		}
		if img.Digest != sb.Spec.ImageDigest && img.Kind != sandbox.ImageHost {
			return sandbox.Errorf(sandbox.ErrConflict, "image_changed", "image %s is no longer what agent %s runs on: stop the agent and deploy it anew", img.Name, m.From)
		}
		moves[i] = m.On(img.Name, img.Digest, img.Kind == sandbox.ImageHost)
	}
	return nil
}

// begin writes the plan, and holds the agents it moves: one transaction, after
// which the promotion is under way. Nothing was done before.
func (l *Lab) begin(ctx context.Context, pr project.Promotion) error {
	return l.update(ctx, func(t project.Tx) error {
		p, err := t.Project(pr.Project)
		if err != nil {
			return err
		}
		if !p.Status.CanMove(project.StatusPromoting) {
			return notActive(p)
		}
		p.Status = project.StatusPromoting
		if err := errors.Join(t.PutProject(p), t.PutPromotion(pr)); err != nil {
			return err
		}
		for _, m := range pr.Moves {
			a, err := t.Agent(m.From)
			if err != nil {
				return err
			}
			if a.Status != m.Was || a.Held != "" {
				return sandbox.Errorf(sandbox.ErrConflict, "agent_moved", "agent %s became %s meanwhile: promote again", a.ID, a.Status)
			}
			a.Held = pr.ID
			if err := t.PutAgent(a); err != nil {
				return err
			}
		}
		return t.Tell(newsOf(p, eventPromoting, pr.Actor, map[string]string{"promotion": string(pr.ID), "agents": fmt.Sprint(len(pr.Moves)), "forced": fmt.Sprint(pr.Forced)}))
	})
}

// Promotions lists a project's promotions, the newest first.
func (l *Lab) Promotions(ctx context.Context, ref string) ([]project.Promotion, error) {
	p, err := l.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	return l.store.Promotions(ctx, p.ID)
}

// drive takes a promotion to its end in the background. One is driven once.
func (l *Lab) drive(id project.PromotionID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.driving[id] {
		return
	}
	l.driving[id] = true
	l.spawn(func() {
		defer func() {
			l.mu.Lock()
			delete(l.driving, id)
			l.mu.Unlock()
		}()
		if err := l.driveOn(id); err != nil && l.life.Err() == nil {
			l.log.Error("promotion left where it is: the next start of the daemon goes on", "promotion", id, "err", err)
		}
	})
}

// driveOn goes from status to status.
func (l *Lab) driveOn(id project.PromotionID) error {
	wait := time.Second
	for tries := 1; ; tries++ {
		pr, err := l.promotion(l.life, id)
		if err != nil {
			return err
		}
		if pr.Status.Final() {
			return nil
		}
		before := pr.Status
		switch pr.Status {
		case project.PromotionMoving:
			if err = l.move(pr); err != nil && l.life.Err() == nil && !errors.Is(err, errCut) && tries >= moveTries {
				err = l.setPromotion(pr, project.PromotionRollingBack, eventRollingBack, "move: "+err.Error())
			}
		case project.PromotionWatching:
			err = l.watch(pr)
		case project.PromotionFinishing:
			err = l.finish(pr)
		case project.PromotionRollingBack:
			err = l.rollBack(pr)
		}
		if l.life.Err() != nil || errors.Is(err, errCut) {
			return err
		}
		if err == nil {
			tries, wait = 0, time.Second
			continue
		}
		l.log.Warn("promotion: tried again", "promotion", id, "status", before, "err", err)
		if pause(l.life, wait) != nil {
			return nil
		}
		wait = min(2*wait, rollbackWait)
	}
}

func (l *Lab) promotion(ctx context.Context, id project.PromotionID) (pr project.Promotion, err error) {
	err = l.store.UpdateLab(ctx, func(t project.Tx) error { pr, err = t.Promotion(id); return err })
	return pr, err
}

// setPromotion moves a promotion on.
func (l *Lab) setPromotion(pr project.Promotion, to project.PromotionStatus, kind, detail string) error {
	return l.update(l.life, func(t project.Tx) error {
		now, err := t.Promotion(pr.ID)
		if err != nil {
			return err
		}
		if !now.Status.CanMove(to) {
			return fmt.Errorf("promotion %s cannot go from %s to %s", pr.ID, now.Status, to)
		}
		now.Status = to
		if detail != "" {
			now.Detail = detail
		}
		if to == project.PromotionWatching {
			now.Until = time.Now().UTC().Add(time.Duration(now.Window) * time.Millisecond)
		}
		if err := t.PutPromotion(now); err != nil {
			return err
		}
		p, err := t.Project(pr.Project)
		if err != nil || kind == "" {
			return err
		}
		data := map[string]string{"promotion": string(pr.ID)}
		if detail != "" {
			data["detail"] = detail
		}
		return t.Tell(newsOf(p, kind, "daemon", data))
	})
}

// move stops the agents in the lab and starts them in production. Repeating
// it is safe: what was done is found done.
func (l *Lab) move(pr project.Promotion) error {
	ctx, cancel := context.WithTimeout(l.life, moveTimeout)
	defer cancel()
	if err := l.step("open"); err != nil {
		return err
	}
	to, err := l.inProduction(ctx)
	if err != nil {
		return err
	}
	for _, m := range pr.Moves {
		if err := l.step("image %s", m.Type); err != nil {
			return err
		}
		if err := l.copyImage(ctx, to.world.Sandboxes, m); err != nil {
			return err
		}
	}
	for _, m := range pr.Moves {
		if err := l.moveOne(ctx, to, pr, m); err != nil {
			return err
		}
	}
	if err := l.step("watch"); err != nil {
		return err
	}
	return l.setPromotion(pr, project.PromotionWatching, eventWatching, "")
}

// moveOne moves one agent.
func (l *Lab) moveOne(ctx context.Context, to *supervisor, pr project.Promotion, m project.Move) error {
	if err := l.step("stop %s", m.Type); err != nil {
		return err
	}
	a, err := l.store.Agent(ctx, m.From)
	if err != nil {
		return err
	}
	if a.Held != pr.ID {
		return fmt.Errorf("agent %s is held by %q, not by promotion %s", a.ID, a.Held, pr.ID)
	}
	if err := l.own.settle(ctx, a); err != nil {
		return fmt.Errorf("stop agent %s in the lab: %w", a.ID, err)
	}
	if err := l.atRest(ctx, m.From); err != nil {
		return err
	}
	if err := l.step("volume %s", m.Type); err != nil {
		return err
	}
	owner := a.Owner
	_, err = to.world.Sandboxes.CreateVolume(ctx, sandbox.VolumeRequest{Name: string(m.To), Actor: owner, Labels: map[string]string{project.LabelAgent: string(m.To)}})
	if err != nil && sandbox.CodeOf(err) != "volume_exists" {
		return fmt.Errorf("make the workspace of agent %s: %w", m.To, err)
	}
	if err := l.step("register %s", m.Type); err != nil {
		return err
	}
	var made project.Agent
	err = to.update(ctx, func(t project.Tx) error {
		if made, err = t.Agent(m.To); !is(err, sandbox.ErrNotFound) {
			return err // there already: a move before was cut off
		}
		made = m.Agent(pr, owner)
		if err := t.PutAgent(made); err != nil {
			return err
		}
		return tellAgent(t, made, eventDeployed, "promotion")
	})
	if err != nil {
		return fmt.Errorf("register agent %s: %w", m.To, err)
	}
	if err := l.step("start %s", m.Type); err != nil {
		return err
	}
	return to.settle(ctx, made)
}

// atRest makes sure that nothing of a lab agent runs.
func (l *Lab) atRest(ctx context.Context, id project.AgentID) error {
	sb, err := l.cfg.Sandboxes.Sandbox(ctx, string(id))
	if is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if sb.Status == sandbox.StatusStopped || sb.Status.Terminal() {
		return nil
	}
	return fmt.Errorf("agent %s still has a sandbox that is %s", id, sb.Status)
}

// copyImage brings an image into production, unless it is there: its name
// there tells its content.
func (l *Lab) copyImage(ctx context.Context, to Sandboxes, m project.Move) error {
	_, err := to.Image(ctx, m.Spec.Image)
	if err == nil || !is(err, sandbox.ErrNotFound) {
		return err
	}
	from, err := l.cfg.Sandboxes.Image(ctx, m.Image)
	if err != nil {
		return fmt.Errorf("find image %s of agent %s: %w", m.Image, m.From, err)
	}
	if from.Digest != m.Digest {
		return sandbox.Errorf(sandbox.ErrConflict, "image_changed", "image %s is no longer what agent %s ran on", m.Image, m.From)
	}
	r, err := l.cfg.Sandboxes.ExportImage(ctx, sandbox.ExportRequest{Source: from.Name, Actor: "promotion"})
	if err != nil {
		return fmt.Errorf("read image %s: %w", from.Name, err)
	}
	defer r.Close()
	if _, err := to.ImportImage(ctx, sandbox.ImportRequest{Name: m.Spec.Image, Actor: "promotion"}, r); err != nil {
		return fmt.Errorf("bring image %s into production: %w", from.Name, err)
	}
	return nil
}

// watch waits for the end of the window, or for the first agent that is
// unwell.
func (l *Lab) watch(pr project.Promotion) error {
	to, err := l.inProduction(l.life)
	if err != nil {
		return err
	}
	for {
		last := !time.Now().Before(pr.Until)
		why, err := l.unwell(l.life, to, pr, last)
		switch {
		case err != nil:
			return err
		case why != "":
			if err := l.step("unwell"); err != nil {
				return err
			}
			return l.setPromotion(pr, project.PromotionRollingBack, eventRollingBack, why)
		case last: // not: now; the window may have ended since they were asked
			if err := l.step("decide"); err != nil {
				return err
			}
			return l.setPromotion(pr, project.PromotionFinishing, "", "")
		}
		if err := pause(l.life, min(watchPoll, time.Until(pr.Until)+time.Millisecond)); err != nil {
			return err
		}
	}
}

// unwell tells which promoted agent is not well, and how. At the end of the
// window each must run, and have passed its check where it has one.
func (l *Lab) unwell(ctx context.Context, to *supervisor, pr project.Promotion, last bool) (string, error) {
	for _, m := range pr.Moves {
		a, err := to.world.Rows.Agent(ctx, m.To)
		switch {
		case is(err, sandbox.ErrNotFound):
			return fmt.Sprintf("agent %s is gone", m.To), nil
		case err != nil:
			return "", err
		case a.Restarts > 0 || a.Status == project.AgentFailed:
			return fmt.Sprintf("agent %s: %s", a.ID, a.Detail), nil
		case last && a.Status == project.AgentPending:
			return fmt.Sprintf("agent %s never came to run", a.ID), nil
		case last && a.Spec.Health != nil && a.Status == project.AgentActive && a.HealthyAt.Before(a.StartedAt):
			return fmt.Sprintf("agent %s never passed its health check", a.ID), nil
		}
	}
	return "", nil
}

// finish lets the lab go of what was promoted.
func (l *Lab) finish(pr project.Promotion) error {
	for _, m := range pr.Moves {
		if err := l.step("remove %s", m.Type); err != nil {
			return err
		}
		if err := l.own.remove(l.life, m.From); err != nil {
			return fmt.Errorf("remove the sandbox of agent %s: %w", m.From, err)
		}
	}
	if err := l.step("done"); err != nil {
		return err
	}
	return l.close(pr, project.PromotionDone, project.StatusPromoted, eventPromoted, func(a *project.Agent, m project.Move) {
		a.Status, a.PromotedTo, a.Detail = project.AgentStopped, m.To, "promoted"
	})
}

// rollBack takes the agents out of production and gives them back to the lab.
func (l *Lab) rollBack(pr project.Promotion) error {
	to, err := l.inProduction(l.life)
	if err != nil {
		return err
	}
	for _, m := range pr.Moves {
		if err := l.unregister(to, m); err != nil {
			return fmt.Errorf("take agent %s out of production: %w", m.To, err)
		}
	}
	if err := l.step("give back"); err != nil {
		return err
	}
	err = l.close(pr, project.PromotionRolledBack, project.StatusActive, eventRolledBack, func(a *project.Agent, m project.Move) {
		a.Status, a.Next, a.Failures, a.Restarts, a.Detail = project.AgentPending, time.Time{}, 0, 0, "its promotion was rolled back"
		if m.Was == project.AgentPaused {
			a.Status = project.AgentPaused
		}
	})
	if err != nil {
		return err
	}
	for _, m := range pr.Moves {
		l.own.keep(project.Agent{ID: m.From})
	}
	return nil
}

// unregister removes all of one agent in production.
func (l *Lab) unregister(to *supervisor, m project.Move) error {
	if err := l.step("halt %s", m.Type); err != nil {
		return err
	}
	// First it is not to run: then its keeper starts it no more.
	err := to.update(l.life, func(t project.Tx) error {
		a, err := t.Agent(m.To)
		if is(err, sandbox.ErrNotFound) || err == nil && a.Status == project.AgentStopped {
			return nil
		}
		if err != nil {
			return err
		}
		a.Status, a.Detail = project.AgentStopped, "its promotion was rolled back"
		if err := t.PutAgent(a); err != nil {
			return err
		}
		return tellAgent(t, a, eventAgentStopped, "promotion")
	})
	if err != nil {
		return err
	}
	if err := l.step("discard %s", m.Type); err != nil {
		return err
	}
	if err := to.remove(l.life, m.To); err != nil {
		return err
	}
	if err := to.world.Sandboxes.RemoveVolume(l.life, string(m.To), "promotion"); err != nil && !is(err, sandbox.ErrNotFound) {
		return err
	}
	if err := l.step("forget %s", m.Type); err != nil {
		return err
	}
	if err := to.dropBudgets(l.life, "promotion", m.To); err != nil {
		return err
	}
	return to.update(l.life, func(t project.Tx) error { return t.DeleteAgent(m.To) })
}

// close ends a promotion: its row, its project's and its agents', in one
// transaction.
func (l *Lab) close(pr project.Promotion, to project.PromotionStatus, status project.Status, kind string, each func(*project.Agent, project.Move)) error {
	return l.update(l.life, func(t project.Tx) error {
		now, err := t.Promotion(pr.ID)
		if err != nil {
			return err
		}
		p, err := t.Project(pr.Project)
		if err != nil {
			return err
		}
		if !now.Status.CanMove(to) || !p.Status.CanMove(status) {
			return fmt.Errorf("promotion %s cannot go from %s to %s with its project %s", pr.ID, now.Status, to, p.Status)
		}
		now.Status, now.EndedAt, p.Status = to, time.Now().UTC(), status
		if err := errors.Join(t.PutPromotion(now), t.PutProject(p)); err != nil {
			return err
		}
		for _, m := range now.Moves {
			a, err := t.Agent(m.From)
			if err != nil {
				return err
			}
			a.Held = ""
			each(&a, m)
			if err := t.PutAgent(a); err != nil {
				return err
			}
		}
		data := map[string]string{"promotion": string(pr.ID)}
		if now.Detail != "" {
			data["detail"] = now.Detail
		}
		return t.Tell(newsOf(p, kind, "daemon", data))
	})
}
