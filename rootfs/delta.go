package rootfs

import (
	"strings"

	"golang.org/x/sys/unix"
)

// deltaDir is what one directory of a layer gets that shows, over an earlier
// copy of an upper, the upper as it is now.
type deltaDir struct {
	of     *seenFile
	over   bool        // the earlier copy has it, with the marks it needs
	opaque bool        // the earlier copy has something else there
	files  []*seenFile // no directories
	gone   []string    // names to hide
	dirs   []*deltaDir
}

func (d *deltaDir) empty() bool { return len(d.files)+len(d.gone)+len(d.dirs) == 0 }

// deltaPlanner compares two looks at one upper. What it cannot prove right it
// gives up; the upper is then copied whole.
//
// A name that was in the upper and is no more shows nothing now: an overlay
// takes a name out of its upper only where nothing below would come to light,
// and leaves a whiteout else. So each such name is hidden.
type deltaPlanner struct {
	linked map[uint64]bool // inodes with several names that are copied
	kept   map[uint64]bool // and that are not
	force  map[uint64]bool // to copy although they did not change
	files  int             // to copy
	whole  bool            // give up
}

// planDelta returns what changed between two looks; false where the upper must
// be copied whole.
func planDelta(was, now *seen) (*deltaDir, bool) {
	var force map[uint64]bool
	for {
		p := &deltaPlanner{linked: map[uint64]bool{}, kept: map[uint64]bool{}, force: force}
		d := p.merge(&was.root, &now.root, false)
		if p.whole || wasteful(p.files, now.files) {
			return nil, false
		}
		again := false
		for ino := range p.linked {
			again = again || p.kept[ino]
		}
		if !again {
			return d, true
		}
		// Names of one file must stay names of one file, though only some of
		// them came to lie elsewhere.
		force = p.linked
	}
}

// wasteful reports whether a copy of so many of so many files is as dear as
// one of all, which later ones can build upon.
func wasteful(files, all int) bool { return files > 1000 && files > all/2 }

// sameMarks reports whether two directories of one path go on in the same way
// in what lies below.
func sameMarks(a, b *seenDir) bool { return a.opaque == b.opaque && a.redirect == b.redirect }

// closed reports whether nothing from below shows in a directory, in one that
// is closed or not.
func (d *seenDir) closed(parent bool) bool { return d.opaque || parent && d.redirect == "" }

// merge compares a directory that both looks saw with the same marks. closed
// is whether its parent is.
func (p *deltaPlanner) merge(was, now *seenFile, closed bool) *deltaDir {
	d := &deltaDir{of: now, over: true}
	closed = now.dir.closed(closed)
	a, b := was.dir.files, now.dir.files
	for len(a)+len(b) > 0 && !p.whole {
		order := -1
		switch {
		case len(a) == 0:
			order = 1
		case len(b) > 0:
			order = strings.Compare(a[0].name, b[0].name)
		}
		switch {
		case order < 0:
			if !a[0].whiteout() {
				d.gone = append(d.gone, a[0].name)
			}
		case order > 0:
			p.add(d, &b[0])
		default:
			p.both(d, &a[0], &b[0], closed)
		}
		if order <= 0 {
			a = a[1:]
		}
		if order >= 0 {
			b = b[1:]
		}
	}
	return d
}

// both compares a name that both looks saw.
func (p *deltaPlanner) both(d *deltaDir, was, now *seenFile, closed bool) {
	switch {
	case now.whiteout() && was.whiteout():
	case now.whiteout() || now.kind() != unix.DT_DIR:
		if now.same(was) && !p.force[now.ino] {
			if now.links {
				p.kept[now.ino] = true
			}
			return
		}
		p.add(d, now)
	case was.dir != nil && sameMarks(was.dir, now.dir):
		if sub := p.merge(was, now, closed); !sub.empty() || !now.same(was) {
			d.dirs = append(d.dirs, sub)
		}
	case now.dir.opaque, closed && now.dir.redirect == "":
		sub := p.all(now)
		sub.opaque = true
		d.dirs = append(d.dirs, sub)
	default:
		p.whole = true
	}
}

// add adds a name that the earlier copy does not have, or not so.
func (p *deltaPlanner) add(d *deltaDir, f *seenFile) {
	switch {
	case f.whiteout():
		d.gone = append(d.gone, f.name)
	case f.dir != nil:
		d.dirs = append(d.dirs, p.all(f))
	default:
		p.files++
		if f.links {
			p.linked[f.ino] = true
		}
		d.files = append(d.files, f)
	}
}

// all takes everything in a directory. One that a rename made an heir of
// another directory below would find that one's earlier copy too.
func (p *deltaPlanner) all(f *seenFile) *deltaDir {
	d := &deltaDir{of: f}
	if f.dir.redirect != "" && !f.dir.opaque {
		p.whole = true
	}
	p.files++
	for i := range f.dir.files {
		if p.whole {
			break
		}
		p.add(d, &f.dir.files[i])
	}
	return d
}
