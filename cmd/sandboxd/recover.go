package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/cgroup"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// recovery is what 'sandboxd recover' finds in one world, while no daemon runs.
type recovery struct {
	out   io.Writer
	db    *state.DB
	roots *rootfs.Store
	tree  *cgroup.Tree
	whose identity
	asked decision

	uppers map[sandbox.ID]bool // of sandboxes in no row; true: somebody wrote files
	theirs int                 // living sandboxes of another installation
	layers []string            // that no row names
	lost   []sandbox.Sandbox   // rows that say running, without a living process
}

// decision is what 'sandboxd recover' was told.
type decision struct {
	adopt, remove []string // sandboxes and layers
	yes           bool     // remove is meant
	moved, copied bool     // what was found elsewhere is there no more, or goes on there
	found         map[string]bool
}

// lastAll names everything found.
const lastAll = "all"

func (d decision) check() error {
	for _, name := range d.adopt {
		if slices.Contains(d.remove, name) {
			return fmt.Errorf("%s cannot be both adopted and removed", name)
		}
	}
	if d.moved && d.copied {
		return errors.New("use --moved if nobody uses the original any more, else --copied")
	}
	return nil
}

// recoverAll lists, adopts or removes what databases do not know.
func recoverAll(ctx context.Context, c config, log *slog.Logger, out io.Writer, d decision) (err error) {
	if err := d.check(); err != nil {
		return err
	}
	unlock, err := lockAll(c, log)
	if err != nil {
		return err
	}
	defer unlock()
	d.found = map[string]bool{lastAll: true}
	if err := recoverWorld(ctx, c, "sandboxd", false, out, d); err != nil {
		return err
	}
	if (&worlds{c: c}).exists() {
		fmt.Fprintln(out, "\nThe production world:")
		if err := recoverWorld(ctx, c.production(), "../production", true, out, d); err != nil {
			return err
		}
	}
	for _, name := range slices.Concat(d.adopt, d.remove) {
		if !d.found[name] {
			return sandbox.Errorf(sandbox.ErrNotFound, "not_found", "nothing that the database does not know is called %q: 'sandboxd recover' lists what there is", name)
		}
	}
	return nil
}

func recoverWorld(ctx context.Context, c config, name string, second bool, out io.Writer, d decision) (err error) {
	var opened closers
	defer func() { err = errors.Join(err, opened.close()) }()
	r := recovery{out: out, asked: d}
	if r.db, err = state.Open(ctx, filepath.Join(c.StateDir, name+".db")); err != nil {
		return err
	}
	opened.add(r.db.Close)
	best := c.Cgroup == cgroupBestEffort
	if r.roots, err = rootfs.Open(ctx, rootfs.Config{Dir: c.StateDir, VolumeBytes: int64(c.Volume.Size), BestEffort: best, Second: second}); err != nil {
		return err
	}
	opened.add(r.roots.Close)
	if r.tree, err = cgroup.Open(cgroup.Config{Mount: "/sys/fs/cgroup", Parent: c.CgroupRoot, BestEffort: best}); err != nil {
		return err
	}
	if r.whose, err = judgeWorld(r.db, r.roots, r.tree); err != nil {
		return err
	}
	if err := r.look(ctx); err != nil {
		return err
	}
	if err := r.act(ctx); err != nil {
		return err
	}
	return r.settle(ctx)
}

// look finds what no row knows.
func (r *recovery) look(ctx context.Context) error {
	r.uppers, r.layers, r.lost, r.theirs = map[sandbox.ID]bool{}, nil, nil, 0
	uppers, err := r.roots.Uppers()
	groups, gerr := r.tree.List()
	if err := errors.Join(err, gerr); err != nil {
		return err
	}
	for _, id := range slices.Concat(uppers, groups) {
		if _, err := r.db.Sandbox(ctx, id); errors.Is(err, sandbox.ErrNotFound) {
			if _, pids, _ := r.tree.Processes(id); r.whose.another && len(pids) > 0 && !slices.Contains(uppers, id) {
				r.theirs++
				continue
			}
			same, err := r.roots.Unchanged(id)
			r.uppers[id] = !same && !errors.Is(err, sandbox.ErrNotFound)
		}
	}
	used, err := r.db.LayersInUse(ctx)
	have, herr := r.roots.Layers()
	rows, rerr := r.db.Living(ctx)
	for _, l := range have {
		if !slices.Contains(used, l) {
			r.layers = append(r.layers, l)
		}
	}
	for _, row := range rows {
		if _, pids, err := r.tree.Processes(row.ID); err == nil && len(pids) == 0 && row.Status != sandbox.StatusStopped && slices.Contains(uppers, row.ID) {
			r.lost = append(r.lost, row.Sandbox)
		}
	}
	return errors.Join(err, herr, rerr)
}

// act shows what was found and does what was asked.
func (r *recovery) act(ctx context.Context) error {
	if r.whose.why != "" {
		fmt.Fprintln(r.out, "Quarantine:", r.whose.why)
	}
	asked := func(list []string, name string) bool {
		r.asked.found[name] = true
		return slices.Contains(list, lastAll) || slices.Contains(list, name)
	}
	remove := func(name string) bool { return r.asked.yes && asked(r.asked.remove, name) }
	would := func(name string) string {
		if asked(r.asked.remove, name) {
			return "; removed for good with --yes"
		}
		return ""
	}
	ready := 0
	for id, written := range r.uppers {
		work, pids, _ := r.tree.Processes(id)
		switch {
		case remove(string(id)), asked(r.asked.adopt, string(id)) && !written:
			fmt.Fprintf(r.out, "removing %s: %d processes, files: %v\n", id, len(pids), written)
			if err := r.end(ctx, id); err != nil {
				return err
			}
			if err := r.roots.Discard(id, -1); err != nil {
				return err
			}
			delete(r.uppers, id)
		case asked(r.asked.adopt, string(id)):
			image, err := r.adoptUpper(ctx, id)
			if err != nil {
				return err
			}
			fmt.Fprintf(r.out, "adopted what %s wrote as image %s (%d processes ended)\n", id, image, len(pids))
			delete(r.uppers, id)
		case !written && work == 0 && !r.whose.elsewhere:
			ready++
			delete(r.uppers, id)
		default:
			fmt.Fprintf(r.out, "sandbox %s, in no row: %d processes, files: %v%s\n", id, len(pids), written, would(string(id)))
		}
	}
	if ready > 0 {
		fmt.Fprintf(r.out, "%d shells of the pool hold nobody's files: the next start outside a quarantine removes them.\n", ready)
	}
	for _, l := range slices.Clone(r.layers) {
		switch {
		case remove(l):
			fmt.Fprintf(r.out, "removing layer %s\n", l)
			if err := r.roots.RemoveLayer(l); err != nil {
				return err
			}
		case asked(r.asked.adopt, l):
			image := recovered(l)
			if err := r.db.PutImage(ctx, recoveredImage(image, l)); err != nil {
				return err
			}
			fmt.Fprintf(r.out, "adopted layer %s as image %s\n", l, image)
		default:
			fmt.Fprintf(r.out, "layer %s, of no image, snapshot or sandbox%s\n", l, would(l))
			continue
		}
		r.layers = slices.DeleteFunc(r.layers, func(x string) bool { return x == l })
	}
	return nil
}

func (r *recovery) end(ctx context.Context, id sandbox.ID) error {
	return errors.Join(r.tree.Kill(ctx, id), r.tree.Remove(ctx, id))
}

// adoptUpper ends what may run on an upper and keeps its files as an image.
func (r *recovery) adoptUpper(ctx context.Context, id sandbox.ID) (string, error) {
	if err := r.end(ctx, id); err != nil {
		return "", err
	}
	layer := rootfs.NewUpperLayer()
	if err := errors.Join(r.roots.FreezeUpper(id, layer), r.roots.Sync()); err != nil {
		return "", err
	}
	image := recovered(string(id))
	return image, r.db.PutImage(ctx, recoveredImage(image, layer))
}

func recovered(of string) string {
	_, name, found := strings.Cut(of, ":")
	if !found {
		name = of
	}
	return "recovered-" + name[:min(len(name), 26)]
}

func recoveredImage(name, layer string) sandbox.Image {
	return sandbox.Image{Name: name, Digest: layer, Kind: sandbox.ImageTar, Layers: []string{layer}, CreatedAt: time.Now().UTC()}
}

// mustStand makes sure that nothing runs on the files that were copied or moved:
// it stands on those that there were.
func (r *recovery) mustStand() error {
	running, err := r.tree.List()
	for _, id := range running {
		if _, pids, err := r.tree.Processes(id); err == nil && len(pids) > 0 {
			return sandbox.Errorf(sandbox.ErrConflict, "sandboxes_run", "sandbox %s runs beneath the parent cgroup, on files that are not these: stop it where it was started ('sandboxd retire' with that state directory), or choose another --cgroup-parent for a copy", id)
		}
	}
	return err
}

// settle ends the quarantine once nothing is left to decide.
func (r *recovery) settle(ctx context.Context) error {
	d := r.asked
	decided := d.moved || d.copied || !r.whose.elsewhere && len(d.adopt)+len(d.remove) > 0
	switch {
	case r.theirs > 0:
		fmt.Fprintf(r.out, "%d sandboxes beneath the parent cgroup are the other installation's, and were left alone.\n", r.theirs)
		return nil
	case len(r.uppers)+len(r.layers) > 0:
		fmt.Fprintf(r.out, "%d sandboxes and %d layers are to be decided: 'sandboxd recover --adopt ID' or '--remove ID --yes', or 'all'. Nothing else was changed.\n", len(r.uppers), len(r.layers))
		return nil
	case r.whose.elsewhere && !decided: // it said what to do
		fmt.Fprintln(r.out, "Nothing was changed.")
		return nil
	case r.whose.why != "" && !decided:
		fmt.Fprintln(r.out, "Nothing is unknown: put the right database back, or go on with this one ('sandboxd recover --adopt all'). Nothing was changed.")
		return nil
	}
	if r.whose.why == "" {
		fmt.Fprintln(r.out, "Nothing is left to decide; database and volume agree.")
		return nil
	}
	for _, sb := range r.lost { // what a start would call crashed, and delete
		detail := "it had no process when its database was recovered; its files are kept"
		zero, none := 0, uint64(0)
		if _, err := r.db.Move(ctx, sb.ID, []sandbox.Status{sb.Status}, sandbox.StatusStopped, state.Change{Detail: &detail, InitPID: &zero, InitStart: &none, Actor: "recover"}); err != nil {
			fmt.Fprintf(r.out, "sandbox %s stays %s: %v\n", sb.ID, sb.Status, err)
		}
	}
	mark, _ := r.roots.Mark() // one that cannot be read is written anew
	generation := max(mark.Generation, r.db.Installation().Generation)
	event, err := r.db.LastEventSeq(ctx)
	if err != nil {
		return err
	}
	if r.whose.elsewhere {
		if err := r.mustStand(); err != nil {
			return err
		}
	}
	nonce := newNonce()
	if d.copied {
		r.whose.id = newNonce()
	}
	if err := r.db.Stamp(ctx, r.whose.id, generation, nonce); err != nil {
		return err
	}
	next := rootfs.Mark{ID: r.whose.id, Generation: generation, Nonce: nonce, LastEvent: event, Boot: r.roots.Boot(), Place: r.roots.Place()}
	if err := errors.Join(r.roots.PutMark(next, true), r.tree.SetInstallation(r.whose.id)); err != nil {
		return err
	}
	fmt.Fprintln(r.out, "Database and volume agree again: start sandboxd.")
	return nil
}
