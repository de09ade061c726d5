package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/cgroup"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/state"
)

// identity is whether a database and what it speaks of belong together: ADR 17.
type identity struct {
	id  string // of the installation, as the volume says, or the database
	why string // why they do not belong together; empty: they do
	// elsewhere: they do, and are not where they were.
	elsewhere bool
	// another: they do, and what lives beneath the parent cgroup is another's.
	another bool
}

// sure reports whether id is this installation's beyond doubt.
func (v identity) sure() bool { return v.why == "" || v.elsewhere || v.another }

// evidence is what database, volume and cgroup say.
type evidence struct {
	db    state.Installation
	mark  rootfs.Mark
	empty bool   // the volume holds nothing
	boot  string // this one
	place rootfs.Place

	cgroup string // whose sandboxes the parent cgroup holds
	busy   bool   // it holds some
}

// judge decides whether they belong together.
func (e evidence) judge() identity {
	v := identity{id: e.mark.ID}
	if v.id == "" {
		v.id = e.db.ID
	}
	if v.id == "" {
		v.id = newNonce()
	}
	v.why = e.disagreement()
	if v.why == "" {
		v.why = e.moved()
		v.elsewhere = v.why != ""
	}
	if v.why == "" && e.busy {
		switch {
		case e.cgroup != "" && e.cgroup != v.id:
			v.another = true
			v.why = "the parent cgroup holds sandboxes of another installation (" + e.cgroup + "): start with another --cgroup-parent, or first stop them where they belong ('sandboxd retire' with that configuration)"
		case e.cgroup == "" && e.db.Made:
			v.why = "the database was missing or empty and was made anew, and the parent cgroup holds sandboxes"
		}
	}
	return v
}

func newNonce() string { return strings.ToLower(rand.Text()) }

func (e evidence) disagreement() string {
	db, mark := e.db, e.mark
	switch {
	case e.empty && mark.Generation == 0: // a new volume
		return ""
	case db.Made && e.empty:
		return "the database was missing or empty and was made anew: keys, budgets and what was used are lost with it; 'sandboxd restore' puts the newest backup back"
	case db.Made:
		return "the database was missing or empty and was made anew, and the volume holds files"
	case db.ID == "" && mark.ID == "": // of before there were marks
		return ""
	case db.ID == "" && mark.Generation == 0 && mark.Next != "": // ended before the first stamp
		return ""
	case db.ID == "":
		return "the database is older than its volume: it is of a time before the volume was marked"
	case mark.ID == "":
		return "the volume is not the database's: it has no mark"
	case db.ID != mark.ID:
		return "the database is another installation's than the volume"
	case db.Generation < mark.Generation:
		return fmt.Sprintf("the database is older than its volume (generation %d, of %d)", db.Generation, mark.Generation)
	case db.Generation > mark.Generation+1: // one more, where the daemon ended between the two
		return fmt.Sprintf("the volume is older than its database (generation %d, of %d)", mark.Generation, db.Generation)
	case db.Generation == mark.Generation && db.Nonce != mark.Nonce,
		db.Generation == mark.Generation+1 && (mark.Next == "" || db.Nonce != mark.Next):
		return "the database went on apart from its volume (a copy of both was used elsewhere, then put back)"
	case (mark.Clean || mark.Boot == e.boot) && db.LastEvent < mark.LastEvent:
		return fmt.Sprintf("the database is older than its volume (event %d, of %d): a copy was put back, or its write-ahead log is lost", db.LastEvent, mark.LastEvent)
	}
	return ""
}

// moved tells of a database and a volume that agree, and are not where they
// were: moved, or copied, and then the original may go on. Where nothing lies on
// the volume, as in the image of a machine to be, that is no matter.
func (e evidence) moved() string {
	was, is := e.mark.Place, e.place
	do := "; 'sandboxd recover --moved' if nobody uses them where they were, or '--copied'"
	differ := func(a, b string) bool { return a != "" && b != "" && a != b }
	switch {
	case e.empty:
	case differ(was.System, is.System), differ(was.Hardware, is.Hardware):
		return "the state directory comes from another machine" + do
	case differ(was.Object, is.Object):
		return "the state directory is a copy of the one that was used before" + do
	}
	return ""
}

// identify looks at a world. In a quarantine its volume is held as it is.
func identify(db *state.DB, roots *rootfs.Store, tree *cgroup.Tree) (identity, error) {
	v, err := judgeWorld(db, roots, tree)
	if v.why != "" {
		roots.Hold()
	}
	return v, err
}

func judgeWorld(db *state.DB, roots *rootfs.Store, tree *cgroup.Tree) (identity, error) {
	empty, err := roots.Empty()
	if err != nil {
		return identity{}, err
	}
	ids, err := tree.List()
	if err != nil {
		return identity{}, err
	}
	mark, err := roots.Mark()
	e := evidence{db: db.Installation(), mark: mark, empty: empty, boot: roots.Boot(), place: roots.Place(), cgroup: tree.Installation(), busy: len(ids) > 0}
	v := e.judge()
	if err != nil {
		v.why = err.Error()
	}
	return v, nil
}

// meet lets the network keep what a quarantine keeps, and tells a quarantine of
// what lives in the network.
func (v *identity) meet(network *netns.Host, roots *rootfs.Store) {
	if other := network.Foreign(); other != "" && v.why == "" {
		v.why = "sandboxes of another installation (" + other + ") live in this network namespace"
		roots.Hold()
	}
	if v.why != "" {
		network.Hold()
	}
}

const (
	// markEvery is how soon the volume hears of new events.
	markEvery = 50 * time.Millisecond
	// bumpEvery is how often, while things happen, a generation ends.
	bumpEvery = time.Minute
)

// keeper keeps database and volume in step, off everybody's way:
//
//	an event → within 50 ms its number in the volume's mark, in memory
//	a start, an orderly end, a minute with events → a new generation in both, on disk
//
// So a copy of the database that is put back later is known as older, and one
// that went on with another volume as apart.
type keeper struct {
	db    *state.DB
	roots interface {
		PutMark(m rootfs.Mark, durable bool) error
	}
	log  *slog.Logger
	mark rootfs.Mark
	quit chan struct{}
	done sync.WaitGroup
}

// keepInStep stamps what belongs together, and goes on doing so, and
// makes backups. A world in quarantine is left as it is, with its backups.
func keepInStep(ctx context.Context, c config, name string, v identity, db *state.DB, roots *rootfs.Store, tree *cgroup.Tree, log *slog.Logger) (stop func()) {
	if v.why != "" {
		return func() {}
	}
	k := &keeper{db: db, roots: roots, log: log, quit: make(chan struct{})}
	// The database's: the volume is the one that follows.
	in := db.Installation()
	k.mark = rootfs.Mark{ID: v.id, Generation: in.Generation, Nonce: in.Nonce, Boot: roots.Boot(), Place: roots.Place()}
	events, cancel := db.Subscribe()
	if err := k.bump(ctx, false); err != nil {
		log.ErrorContext(ctx, "mark database and volume as belonging together: tried again", "err", err)
	}
	if err := tree.SetInstallation(v.id); err != nil {
		log.WarnContext(ctx, "mark the parent cgroup", "err", err)
	}
	k.done.Go(func() { k.run(events) })
	rest := keepBackups(c, name, db, log)
	return sync.OnceFunc(func() {
		rest()
		cancel()
		close(k.quit)
		k.done.Wait()
		if err := k.bump(context.WithoutCancel(ctx), true); err != nil {
			log.Error("mark database and volume as belonging together, at the end", "err", err)
		}
	})
}

func (k *keeper) run(events <-chan struct{}) {
	bumped := time.Now()
	for {
		select {
		case <-k.quit:
			return
		case <-events:
		}
		select {
		case <-k.quit:
			return
		case <-time.After(markEvery):
		}
		ctx := context.Background()
		var err error
		if time.Since(bumped) > bumpEvery {
			bumped, err = time.Now(), k.bump(ctx, false)
		} else {
			err = k.put(ctx)
		}
		if err != nil {
			k.log.Warn("mark the volume", "err", err)
		}
	}
}

// bump ends a generation. The volume says what the next one will be called,
// then it begins in the database, then in the volume. Where the volume could not
// follow the last time, its first word is that it does, and without it there is
// no other generation.
func (k *keeper) bump(ctx context.Context, last bool) (err error) {
	if k.mark.LastEvent, err = k.db.LastEventSeq(ctx); err != nil { // before: the stamp takes it to disk
		return err
	}
	if k.mark.Next == "" { // else a stamp failed, and may be there even so
		k.mark.Next = newNonce()
	}
	if err := k.roots.PutMark(k.mark, true); err != nil {
		return err
	}
	if err := k.db.Stamp(ctx, k.mark.ID, k.mark.Generation+1, k.mark.Next); err != nil {
		return err
	}
	k.mark.Generation++
	k.mark.Nonce, k.mark.Next, k.mark.Clean = k.mark.Next, "", last
	return k.roots.PutMark(k.mark, true)
}

// put writes the mark with the newest event's number.
func (k *keeper) put(ctx context.Context) (err error) {
	if k.mark.LastEvent, err = k.db.LastEventSeq(ctx); err != nil {
		return err
	}
	return k.roots.PutMark(k.mark, false)
}
