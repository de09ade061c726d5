package main

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/state"
)

// TestJudge: what agrees starts as it always did, and all else in quarantine.
func TestJudge(t *testing.T) {
	const apart = "went on apart from its volume"
	db := func(f func(*state.Installation)) evidence {
		e := evidence{boot: "b", db: state.Installation{ID: "i", Generation: 5, Nonce: "five", LastEvent: 10}}
		e.mark = rootfs.Mark{ID: "i", Generation: 5, Nonce: "five", LastEvent: 10, Boot: "b"}
		f(&e.db)
		return e
	}
	with := func(f func(*evidence)) evidence {
		e := db(func(*state.Installation) {})
		f(&e)
		return e
	}
	at := func(f func(*evidence)) evidence {
		e := with(func(e *evidence) {
			e.place = rootfs.Place{System: "s", Hardware: "h", Object: "o"}
			e.mark.Place = e.place
		})
		f(&e)
		return e
	}
	for name, c := range map[string]struct {
		e    evidence
		want string
	}{
		"same":                          {db(func(*state.Installation) {}), ""},
		"nothing yet":                   {evidence{empty: true, db: state.Installation{Made: true}}, ""},
		"volume empty":                  {with(func(e *evidence) { e.empty, e.mark, e.db.ID = true, rootfs.Mark{}, "other" }), ""},
		"both made anew":                {with(func(e *evidence) { e.empty, e.mark, e.db = true, rootfs.Mark{}, state.Installation{Made: true} }), ""},
		"made anew, of an empty volume": {with(func(e *evidence) { e.empty, e.db = true, state.Installation{Made: true} }), "keys, budgets"},
		"older, of an empty volume":     {with(func(e *evidence) { e.empty, e.db.Generation = true, 4 }), "older than its volume"},
		"before marks":                  {evidence{}, ""},
		"made anew":                     {evidence{mark: rootfs.Mark{ID: "i"}, db: state.Installation{Made: true}}, "made anew"},
		"before its stamp":              {evidence{mark: rootfs.Mark{ID: "i", Next: "one"}}, ""},
		"of before marks":               {evidence{mark: rootfs.Mark{ID: "i", Generation: 1, Next: "two"}}, "before the volume was marked"},
		"of before marks, too":          {evidence{mark: rootfs.Mark{ID: "i"}}, "before the volume was marked"},
		"mark missing":                  {with(func(e *evidence) { e.mark = rootfs.Mark{} }), "no mark"},
		"another's":                     {db(func(in *state.Installation) { in.ID = "j" }), "another installation's"},

		"older":             {db(func(in *state.Installation) { in.Generation, in.Nonce = 4, "four" }), "older than its volume"},
		"far ahead":         {db(func(in *state.Installation) { in.Generation, in.Nonce = 7, "seven" }), "older than its database"},
		"far ahead, named":  {with(func(e *evidence) { e.db.Generation, e.db.Nonce, e.mark.Next = 7, "six", "six" }), "older than its database"},
		"no nonces yet":     {with(func(e *evidence) { e.db.Nonce, e.mark.Nonce = "", "" }), ""},
		"nonce in one only": {with(func(e *evidence) { e.mark.Nonce = "" }), apart},
		"nonce in database": {db(func(in *state.Installation) { in.Nonce = "" }), apart},
		"branch, as far":    {db(func(in *state.Installation) { in.Nonce = "fifth" }), apart},
		"branch, as far, while the next one began": {with(func(e *evidence) { e.db.Nonce, e.mark.Next = "six", "six" }), apart},
		"before the database's write":              {with(func(e *evidence) { e.mark.Next = "six" }), ""},
		"before the volume's":                      {with(func(e *evidence) { e.db.Generation, e.db.Nonce, e.mark.Next = 6, "six", "six" }), ""},
		"branch, one ahead":                        {db(func(in *state.Installation) { in.Generation, in.Nonce = 6, "six" }), apart},
		"branch, one ahead of one that began":      {with(func(e *evidence) { e.db.Generation, e.db.Nonce, e.mark.Next = 6, "sixth", "six" }), apart},
		"one ahead without nonces":                 {with(func(e *evidence) { e.db.Generation, e.db.Nonce, e.mark.Nonce = 6, "", "" }), apart},

		"in its place":        {at(func(*evidence) {}), ""},
		"place not known yet": {at(func(e *evidence) { e.mark.Place = rootfs.Place{} }), ""},
		"place not to be had": {at(func(e *evidence) { e.place = rootfs.Place{} }), ""},
		"copied":              {at(func(e *evidence) { e.place.Object = "o2" }), "is a copy"},
		"another system":      {at(func(e *evidence) { e.place.System = "s2" }), "another machine"},
		"other hardware":      {at(func(e *evidence) { e.place.Hardware = "h2" }), "another machine"},
		"image of a machine":  {at(func(e *evidence) { e.empty, e.place.System = true, "s2" }), ""},
		"copied, and older":   {at(func(e *evidence) { e.place.Object, e.db.Generation = "o2", 4 }), "older than its volume"},

		"older events": {db(func(in *state.Installation) { in.LastEvent = 9 }), "a copy was put back"},
		"older events, one ahead": {with(func(e *evidence) {
			e.db = state.Installation{ID: "i", Generation: 6, Nonce: "six"}
			e.mark.Next = "six"
		}), "a copy was put back"},
		"older events, of a power cut":      {with(func(e *evidence) { e.boot, e.db.LastEvent = "c", 9 }), ""},
		"older events after an orderly end": {with(func(e *evidence) { e.boot, e.db.LastEvent, e.mark.Clean = "c", 9, true }), "a copy was put back"},
		"newer events":                      {db(func(in *state.Installation) { in.LastEvent = 11 }), ""},

		"cgroup its own":                       {with(func(e *evidence) { e.busy, e.cgroup = true, "i" }), ""},
		"cgroup another's":                     {with(func(e *evidence) { e.busy, e.cgroup = true, "j" }), "parent cgroup"},
		"cgroup another's, idle":               {with(func(e *evidence) { e.cgroup = "j" }), ""},
		"cgroup of nobody, database made anew": {evidence{empty: true, busy: true, db: state.Installation{Made: true}}, "parent cgroup"},
	} {
		v := c.e.judge()
		if c.want == "" && v.why != "" || !strings.Contains(v.why, c.want) || v.id == "" {
			t.Errorf("%s: id %q, %q; want %q", name, v.id, v.why, c.want)
		}
	}
}

// paper is a volume's mark. It fails at the write that broken counts down to.
type paper struct {
	rootfs.Mark
	broken int
}

func (p *paper) PutMark(m rootfs.Mark, _ bool) error {
	if p.broken--; p.broken == 0 {
		return errors.New("no volume")
	}
	p.Mark = m
	return nil
}

// TestGenerations: at whatever write a generation's end breaks off, database and
// volume agree, with the same daemon or the next; and a copy that goes on from
// there does not.
func TestGenerations(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	p := &paper{}
	var db *state.DB
	begin := func(why string) *keeper {
		t.Helper()
		if db != nil {
			_ = db.Close()
		}
		var err error
		if db, err = state.Open(t.Context(), path); err != nil {
			t.Fatal(err)
		}
		in := db.Installation()
		in.Made = false
		if got := (evidence{db: in, mark: p.Mark, boot: "b"}).disagreement(); got != "" {
			t.Fatalf("%s: %+v, %+v: %s", why, in, p.Mark, got)
		}
		return &keeper{db: db, roots: p, mark: rootfs.Mark{ID: "i", Generation: in.Generation, Nonce: in.Nonce, Boot: "b"}}
	}
	t.Cleanup(func() { _ = db.Close() })
	nonces := map[string]bool{}
	whole := func(k *keeper, last bool) {
		t.Helper()
		if err := k.bump(t.Context(), last); err != nil {
			t.Fatal(err)
		}
		if p.Nonce == "" || nonces[p.Nonce] || p.Next != "" || p.Clean != last {
			t.Fatalf("after a generation: %+v", p.Mark)
		}
		nonces[p.Nonce] = true
	}
	for _, again := range []bool{false, true} { // with the same daemon, or the next
		for _, at := range []string{"first word", "database", "second word"} {
			k := begin("before " + at)
			before := p.Mark
			var err error
			switch at {
			case "first word":
				p.broken = 1
				err = k.bump(t.Context(), false)
			case "database": // as it is left where the stamp fails
				k.mark.Next = newNonce()
				err = errors.Join(k.put(t.Context()), errors.New("no database"))
			case "second word":
				p.broken = 2
				err = k.bump(t.Context(), false)
			}
			if err == nil {
				t.Fatalf("%s: no error", at)
			}
			if at == "second word" && p.Next == "" || at == "first word" && p.Mark != before {
				t.Fatalf("%s: %+v", at, p.Mark)
			}
			if again {
				k = begin(at)
			} else if err := k.put(t.Context()); err != nil {
				t.Fatal(err)
			}
			begun := p.Mark
			whole(k, false)
			whole(k, true)
			now := begin("after " + at).db.Installation()
			if why := (evidence{db: now, mark: begun, boot: "b"}).disagreement(); begun.ID != "" && why == "" {
				t.Fatalf("%s: a copy that went on agrees: %+v, %+v", at, now, begun)
			}
		}
	}
}
