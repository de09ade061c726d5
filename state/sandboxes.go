package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// maxTail is the most output kept of a sandbox or process, its end.
const maxTail = 64 << 10

const (
	sqlSandbox    = `SELECT ` + columns + ` FROM sandboxes WHERE id = ?`
	sqlStatus     = `SELECT status FROM sandboxes WHERE id = ?`
	sqlPruneEnded = `DELETE FROM sandboxes WHERE id IN (
		SELECT id FROM (SELECT id, ended_at, row_number() OVER (PARTITION BY owner ORDER BY ended_at DESC, id DESC) AS place
			FROM sandboxes WHERE status IN ('completed', 'failed'))
		ORDER BY place, ended_at DESC, id DESC LIMIT -1 OFFSET ?)
		AND NOT EXISTS (SELECT 1 FROM slots WHERE sandbox = sandboxes.id)`
	sqlEventBeyond = `SELECT seq FROM events ORDER BY seq DESC LIMIT 1 OFFSET ?`
	sqlEventsUpTo  = `SELECT count(*) FROM events WHERE seq <= ?`
	sqlEventOwners = `SELECT owner, count(*) FROM events WHERE owner <> '' GROUP BY owner`
	sqlNoisy       = `SELECT sandbox, (SELECT owner FROM events WHERE sandbox = noisy.sandbox AND sandbox <> '' LIMIT 1) FROM (
		SELECT sandbox FROM events WHERE sandbox <> '' GROUP BY sandbox HAVING count(*) > ?) AS noisy`
	sqlPruneNoise = `DELETE FROM events WHERE seq IN (
		SELECT seq FROM events WHERE sandbox IN (SELECT value FROM json_each(?1)) AND sandbox <> '' AND type GLOB 'net.*'
		ORDER BY seq LIMIT ?2) RETURNING seq`
	sqlNotePruned = `UPDATE events_pruned SET upto = max(upto, ?1, coalesce((SELECT min(seq) - 1 FROM events), 0))`
)

// noisyShare is which part of all events one sandbox may have, before those of
// its network go first.
const noisyShare = 16

func notFound(ref any) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "no sandbox %v", ref)
}

func eventType(s sandbox.Status) string { return "sandbox." + string(s) }

// Move takes a sandbox from one of the statuses in from to another, with what
// ch sets and an event, in one transaction. A terminal status also frees the
// slot and the name, forgets PID 1 and, if ch does not say it, takes now as
// the end: so nothing the slot names may exist any more, except with KeepSlot.
//
// ErrConflict with code wrong_state, naming the present status, where that is
// not in from: someone else was faster. ErrInvalid with code illegal_move
// where the statuses themselves do not permit it. ErrNotFound.
func (d *DB) Move(ctx context.Context, id sandbox.ID, from []sandbox.Status, to sandbox.Status, ch Change) (sandbox.Sandbox, error) {
	var moves []move
	if ch.Completing != nil {
		first, err := newMove(id, from, sandbox.StatusCompleting, *ch.Completing)
		if err != nil {
			return sandbox.Sandbox{}, err
		}
		moves, from = append(moves, first), []sandbox.Status{sandbox.StatusCompleting}
	}
	last, err := newMove(id, from, to, ch)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	var out sandbox.Sandbox
	err = d.write(ctx, func(t *tx) error {
		for _, m := range append(moves, last) {
			if out, err = t.move(m); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return out, nil
}

// move is one change of status, ready to be written.
type move struct {
	id    sandbox.ID
	from  []sandbox.Status
	to    sandbox.Status
	ch    Change
	set   columnSet
	ended [][]any
}

func newMove(id sandbox.ID, from []sandbox.Status, to sandbox.Status, ch Change) (move, error) {
	for _, f := range from {
		if !f.CanMove(to) {
			return move{}, sandbox.Errorf(sandbox.ErrInvalid, "illegal_move", "sandbox %s: nothing moves from %q to %q", id, f, to)
		}
	}
	set, err := ch.columns()
	if err != nil {
		return move{}, err
	}
	ended, err := ch.processes(id)
	return move{id, from, to, ch, set, ended}, err
}

func (t *tx) move(m move) (sandbox.Sandbox, error) {
	now := time.Now()
	if m.to.Terminal() {
		m.set.end(now)
	}
	if mustLast(m.from, m.to, m.ch) {
		if err := t.mustLast(); err != nil {
			return sandbox.Sandbox{}, err
		}
	}
	out, err := t.update(m.id, m.from, m.to, m.set)
	if err != nil {
		return out, err
	}
	if err := t.note(m.id, m.ch.Readings, m.to.Terminal()); err != nil {
		return out, err
	}
	if m.to.Terminal() && !m.ch.KeepSlot {
		if _, err := t.exec(sqlFree, string(m.id)); err != nil {
			return out, err
		}
	}
	if m.ch.Reason != nil && *m.ch.Reason == sandbox.ReasonCreateFailed { // nobody was given it: who asks again gets another
		if _, err := t.exec(sqlFreeKey, string(m.id)); err != nil {
			return out, err
		}
	}
	if err := t.putProcesses(m.ended); err != nil {
		return out, err
	}
	_, err = t.appendEvents(m.ch.event(m.id, m.to, now))
	return out, err
}

// mustLast tells which moves must survive a power cut: those that say how a
// sandbox ended and what it used, that its files are whole (stopped), and,
// before they are touched again, that they no longer need be.
func mustLast(from []sandbox.Status, to sandbox.Status, ch Change) bool {
	switch to {
	case sandbox.StatusStopped, sandbox.StatusCompleted, sandbox.StatusFailed:
		return true
	}
	return ch.Usage != nil || slices.Contains(from, sandbox.StatusStopped)
}

// Update sets columns without a change of status, and appends an event only
// if ch names a type. ErrNotFound.
func (d *DB) Update(ctx context.Context, id sandbox.ID, ch Change) error {
	set, err := ch.columns()
	if err != nil {
		return err
	}
	ended, err := ch.processes(id)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		if ch.Usage != nil {
			if err := t.mustLast(); err != nil {
				return err
			}
		}
		if err := t.set(id, set); err != nil {
			return err
		}
		if err := t.putProcesses(ended); err != nil {
			return err
		}
		if err := t.note(id, ch.Readings, false); err != nil || ch.EventType == "" {
			return err
		}
		_, err := t.appendEvents(ch.event(id, "", time.Now()))
		return err
	})
}

// processes is the pure half of putProcesses.
func (c Change) processes(id sandbox.ID) (ended [][]any, err error) {
	ended = make([][]any, len(c.Processes))
	for i, r := range c.Processes {
		if ended[i], err = processArgs(id, r); err != nil {
			return nil, err
		}
	}
	return ended, nil
}

func (t *tx) putProcesses(ended [][]any) error {
	for _, args := range ended {
		if _, err := t.exec(sqlPutProcess, args...); err != nil {
			return err
		}
	}
	return nil
}

// update writes the columns of set if the status is one of from.
func (t *tx) update(id sandbox.ID, from []sandbox.Status, to sandbox.Status, set columnSet) (sandbox.Sandbox, error) {
	permitted := " "
	for _, f := range from {
		permitted += string(f) + " "
	}
	found, err := t.row(sqlMove, append([]any{string(id), permitted, string(to)}, set.args()...)...)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Sandbox{}, t.lost(id, from)
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	row, err := scanRow(found)
	return row.Sandbox, err
}

// lost says why a move found no row.
func (t *tx) lost(id sandbox.ID, from []sandbox.Status) error {
	present, err := t.text(sqlStatus, string(id))
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return notFound(id)
	case err != nil:
		return err
	}
	return sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "sandbox %s is %s, not %s", id, present, joinStatuses(from))
}

// set writes the columns of set whatever the status is.
func (t *tx) set(id sandbox.ID, set columnSet) error {
	ok, err := t.changed(sqlSet, append([]any{string(id), nil, nil}, set.args()...)...)
	if err == nil && !ok {
		err = notFound(id)
	}
	return err
}

func joinStatuses(all []sandbox.Status) string {
	words := make([]string, len(all))
	for i, s := range all {
		words[i] = string(s)
	}
	return strings.Join(words, " or ")
}

// Prune deletes what is beyond keepEnded ended sandboxes, the oldest of the
// owners who have most, with their processes and idempotency keys, and what is beyond keepEvents events,
// of the owners who have most: first the oldest that sandboxes with many of them have of their networks,
// which hostile code makes at will, then the oldest. Living sandboxes, and ended ones that still hold their slot, stay
// whatever their number.
func (d *DB) Prune(ctx context.Context, keepEnded, keepEvents int) error {
	if keepEnded < 0 || keepEvents < 0 {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_prune", "keeping %d sandboxes and %d events: use 0 or more", keepEnded, keepEvents)
	}
	for more := true; more; {
		err := d.write(ctx, func(t *tx) (err error) {
			if _, err := t.exec(sqlPruneEnded, keepEnded); err != nil {
				return fmt.Errorf("pruning ended sandboxes: %w", err)
			}
			if more, err = t.pruneEvents(keepEvents); err != nil {
				return fmt.Errorf("pruning events: %w", err)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// pruneAtOnce is how many events one transaction deletes, which keeps all other
// writers waiting.
const pruneAtOnce = 5000

func (t *tx) pruneEvents(keep int) (more bool, err error) {
	last, err := t.number(sqlEventBeyond, keep)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	over, err := t.number(sqlEventsUpTo, last)
	if err != nil {
		return false, err
	}
	has, owned, err := t.perOwner(sqlEventOwners)
	if err != nil {
		return false, err
	}
	has[""] = int64(keep+over) - owned
	noisy, err := t.noisy(keep / noisyShare)
	if err != nil {
		return false, err
	}
	upto := 0
	for owner, n := range displaced(has, int64(min(over, pruneAtOnce))) {
		gone, err := t.pruneOwner(owner, int(n), noisy[owner])
		if err != nil {
			return false, err
		}
		upto = max(upto, gone)
	}
	_, err = t.exec(sqlNotePruned, upto)
	return over > pruneAtOnce, err
}

// noisy returns, by owner, the sandboxes with more than so many events.
func (t *tx) noisy(most int) (map[string][]string, error) {
	rows, err := t.all(sqlNoisy, most)
	if err != nil {
		return nil, err
	}
	noisy := map[string][]string{}
	for _, r := range rows {
		var id, owner string
		if err := r.Scan(&id, &owner); err != nil {
			return nil, err
		}
		noisy[owner] = append(noisy[owner], id)
	}
	return noisy, nil
}

// pruneOwner deletes n events of an owner, those of the networks of noisy
// sandboxes first, and returns the highest number among them.
func (t *tx) pruneOwner(owner string, n int, noisy []string) (upto int, err error) {
	if len(noisy) > 0 && n > 0 {
		list, err := toJSON(noisy)
		if err != nil {
			return 0, err
		}
		noise, err := t.all(sqlPruneNoise, list, n)
		if err != nil {
			return 0, err
		}
		n -= len(noise)
		for _, r := range noise {
			var seq int
			if err := r.Scan(&seq); err != nil {
				return 0, err
			}
			upto = max(upto, seq)
		}
	}
	if n == 0 {
		return upto, nil
	}
	of := `owner = ?1`
	if owner != "" {
		of += ` AND owner <> ''` // for the partial index
	}
	last, err := t.number(`SELECT seq FROM events WHERE `+of+` ORDER BY seq LIMIT 1 OFFSET ?2`, owner, n-1)
	if err != nil {
		return 0, err
	}
	_, err = t.exec(`DELETE FROM events WHERE `+of+` AND seq <= ?2`, owner, last)
	return max(upto, last), err
}
