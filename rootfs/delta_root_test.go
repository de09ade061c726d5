//go:build root

package rootfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// again copies an upper and returns the layers that show it.
func again(t testing.TB, s *Store, id sandbox.ID) []string {
	t.Helper()
	layer := NewUpperLayer()
	on, err := s.CopyUpper(t.Context(), id, layer)
	if err != nil {
		t.Fatal(err)
	}
	once, err := s.CopyUpper(t.Context(), id, layer) // does nothing, and says the same
	if err != nil || !slices.Equal(on, once) {
		t.Fatalf("the same copy once more: on %v, %v; it was on %v", once, err, on)
	}
	return append(slices.Clone(on), layer)
}

// aged lets the clock of file times go on.
func aged(t testing.TB) {
	t.Helper()
	begin := time.Now()
	testenv.Eventually(t, time.Minute, "the clock to go on", func() bool { return time.Since(begin) > coarseClock+15*time.Millisecond })
}

func upperOf(s *Store, id sandbox.ID) string { return s.vol.path(sandboxesDir, string(id), "upper") }

// filesIn counts the inodes of a layer.
func filesIn(t testing.TB, s *Store, layer string) int64 {
	t.Helper()
	_, n, err := s.LayerUsage(t.Context(), layer)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// wholeCopy makes a layer of everything in an upper.
func wholeCopy(t testing.TB, s *Store, id sandbox.ID) string {
	t.Helper()
	layer := NewUpperLayer()
	err := s.buildUpperLayer(layer, func(tree string) (upperInfo, error) {
		return s.copyTree(t.Context(), upperOf(s, id), tree)
	})
	if err != nil {
		t.Fatal(err)
	}
	return layer
}

// TestDeltaIsTheUpper: whatever a sandbox does to its files, on whatever
// layers, copies that have only what changed show, on each other, what a whole
// copy shows.
func TestDeltaIsTheUpper(t *testing.T) {
	s := openXFS(t, 500<<20)
	var whole, deltas, files, all int64
	for seed := range testenv.Cycles(t, 3, 800) {
		h := newHistory(t, s, uint64(seed)+7, seed%3, 25)
		h.rnd = rand.New(rand.NewPCG(uint64(seed), 1))
		id := create(t, s)
		plan, err := planOverlay(id, h.layers)
		if err != nil {
			t.Fatal(err)
		}
		dir, detach := attached(t, s, plan)
		var made []string
		for step := range 30 {
			for range 1 + h.rnd.IntN(8) {
				h.operate(dir)
			}
			if h.rnd.IntN(3) > 0 {
				aged(t)
			}
			stack := again(t, s, id)
			top := stack[len(stack)-1]
			made = append(made, top)
			full := wholeCopy(t, s, id)
			want := listStack(t, s, append(slices.Clone(h.layers), full)...)
			what := fmt.Sprintf("seed %d, step %d, %d layers", seed, step, len(stack))
			if !sameTree(t, what, want, listStack(t, s, slices.Concat(h.layers, stack)...)) {
				return
			}
			if len(stack) == 1 {
				whole++
			} else {
				deltas++
				files += filesIn(t, s, top)
				all += filesIn(t, s, full)
				if step%7 == 0 { // merged into one they show it, too
					flat, err := s.Flatten(t.Context(), stack)
					if err != nil {
						t.Fatal(err)
					}
					exported(t, s, h.layers, stack, what)
					sameTree(t, what+", flattened", want, listStack(t, s, append(slices.Clone(h.layers), flat)...))
					made = append(made, flat)
				}
			}
			if err := s.RemoveLayer(full); err != nil {
				t.Fatal(err)
			}
		}
		detach()
		if err := s.Discard(id, 0); err != nil {
			t.Fatal(err)
		}
		h.remove(t, made...)
	}
	t.Logf("%d whole copies; %d of what changed, with %d of %d files", whole, deltas, files, all)
	if whole == 0 || deltas < whole || files*2 > all {
		t.Error("the copies are not what this is to test")
	}
}

// exported writes a stack as layers of an image, which show the same.
func exported(t testing.TB, s *Store, base, own []string, what string) {
	t.Helper()
	var images []string
	before, err := s.Layers()
	if err != nil {
		t.Fatal(err)
	}
	stack := slices.Concat(base, own)
	for _, b := range exportAll(t, s, stack) {
		l, err := s.ImportLayer(t.Context(), diffIDOf(b), bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		images = append(images, l.Digest)
	}
	var got []string
	for _, c := range diffOf(t, s, stack, images, "") {
		got = append(got, string(c.Kind)+" "+c.Path)
	}
	if len(got) > 0 {
		t.Errorf("%s, as an image: %q", what, got[:min(10, len(got))])
	}
	for _, l := range slices.Compact(slices.Sorted(slices.Values(images))) {
		if !slices.Contains(before, l) {
			if err := s.RemoveLayer(l); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestDeltaMapped: what a process stores through a shared mapping after a
// copy, without any system call, is in the next one.
func TestDeltaMapped(t *testing.T) {
	s := openXFS(t, 400<<20)
	id := create(t, s)
	path := filepath.Join(upperOf(s, id), "mapped")
	const size = 64 << 10
	if err := os.WriteFile(path, bytes.Repeat([]byte("0"), size), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	if !testenv.Within(10*time.Second, func() bool {
		m[size/2]++ // the page is dirty from here on, unless just now it is written to disk
		was := statOf(t, path).Ctim
		aged(t)
		m[size/2]++
		return statOf(t, path).Ctim == was
	}) {
		t.Error("a store to a page that is dirty leaves a trace, which it is the point that it does not")
	}
	for round := range 5 {
		m[size/2] = byte('a' + round) // the page is dirty, and may be written
		aged(t)                       // long before the copy
		stack := again(t, s, id)
		m[size/2] = byte('A' + round)
		aged(t)
		for range 2 { // the second time nothing has changed
			stack = again(t, s, id)
			if len(stack) < 2 {
				t.Fatalf("round %d: a whole copy", round)
			}
		}
		if n := filesIn(t, s, stack[len(stack)-1]); n != 1 {
			t.Errorf("round %d: nothing changed, and the copy has %d files", round, n)
		}
		got := shown(t, s, stack, "mapped")
		if want := byte('A' + round); len(got) != size || got[size/2] != want {
			t.Errorf("round %d: the copies show %q, want %q", round, got[size/2], want)
		}
	}
}

// shown reads a file of a stack.
func shown(t testing.TB, s *Store, stack []string, name string) string {
	t.Helper()
	plan, err := s.planView(stack)
	if err != nil {
		t.Fatal(err)
	}
	dir, detach := attached(t, s, plan)
	defer detach()
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// TestDeltaFresh: a file that changes again in the tick of the clock in which
// it was copied is copied again.
func TestDeltaFresh(t *testing.T) {
	s := openXFS(t, 400<<20)
	id := create(t, s)
	path := filepath.Join(upperOf(s, id), "f")
	for round := range 30 {
		// In place, and of one size.
		for i, text := range []string{"before", "after!"} {
			f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
			if err == nil {
				_, err = f.WriteString(text)
				err = errors.Join(err, f.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := shown(t, s, again(t, s, id), "f"); got != text {
				t.Fatalf("round %d.%d: %q, want %q", round, i, got, text)
			}
		}
	}
}

// TestDeltaAccount: a copy builds upon an earlier one only if that is there
// and of this very upper, whoever made it; it is a whole one else.
func TestDeltaAccount(t *testing.T) {
	s := openXFS(t, 400<<20)
	id := create(t, s)
	upper := fillUpper(t, s, id, 110, 100)
	aged(t)
	touch := func() {
		t.Helper()
		if err := os.WriteFile(filepath.Join(upper, "d1", "f105"), []byte(time.Now().String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	record := s.vol.path(copiesDir, string(id))
	first := again(t, s, id)
	second := again(t, s, id)
	if len(first) != 1 || len(second) != 2 || second[0] != first[0] {
		t.Fatalf("copies %v, then %v", first, second)
	}
	touch()
	third := again(t, s, id)
	if n := filesIn(t, s, third[len(third)-1]); len(third) != 3 || n != 3 { // the root, d1 and f105
		t.Fatalf("the third copy: %d layers, %d files", len(third), n)
	}
	wantLen := func(what string, n int) {
		t.Helper()
		touch()
		stack := again(t, s, id)
		if len(stack) != n {
			t.Errorf("%s: %d layers, want %d", what, len(stack), n)
		}
		sameTree(t, what, listStack(t, s, wholeCopy(t, s, id)), listStack(t, s, stack...))
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openIn(t, Config{Dir: s.dir, BestEffort: true})
	wantLen("another daemon", 4)
	for name, spoil := range map[string]func(b []byte) []byte{
		"cut short":   func(b []byte) []byte { return b[:len(b)/2] },
		"one bit off": func(b []byte) []byte { b[len(b)-20] ^= 1; return b },
		"empty":       func([]byte) []byte { return nil },
		"of another start of the machine": func(b []byte) []byte {
			return []byte(string(bytes.Replace(b, []byte(s.boot), []byte("00000000-0000-0000-0000-000000000000"), 1)))
		},
	} {
		b, err := os.ReadFile(record)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(record, spoil(b), 0o600); err != nil {
			t.Fatal(err)
		}
		wantLen(name, 1)
		wantLen(name+", the next one", 2)
	}
	boot := s.boot
	s.boot = "another"
	wantLen("after another start", 1)
	s.boot = boot
	wantLen("and this one again", 1)
	stack := again(t, s, id)
	if err := s.RemoveLayer(stack[0]); err != nil {
		t.Fatal(err)
	}
	wantLen("without the first copy", 1)
	// A frozen upper takes its account along, a fresh one has none.
	frozen := freeze(t, s, id)
	if err := s.CreateUpper(id, 0, sandbox.Limits{}); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(upper, "d1"), 0o755); err != nil {
		t.Fatal(err)
	}
	wantLen("another upper", 1)
	if err := s.ThawUpper(id, frozen); err != nil {
		t.Fatal(err)
	}
	wantLen("the first upper again", 1)
	for n := 2; n <= maxDeltas+1; n++ {
		wantLen("more", n)
	}
	wantLen("too many on each other", 1)
	if err := s.Discard(id, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(record); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of a discarded upper the account is left: %v", err)
	}
}

// TestDeltaNames: names of one file stay names of one file, and what takes
// the place of something else shows nothing of it.
func TestDeltaNames(t *testing.T) {
	s := openXFS(t, 400<<20)
	img := importTest(t, s, tarEntry{name: "in/d/old", data: "old"}, tarEntry{name: "in/e/x", data: "x"})
	id := create(t, s)
	plan, err := planOverlay(id, img.Layers)
	if err != nil {
		t.Fatal(err)
	}
	dir, detach := attached(t, s, plan)
	defer detach()
	p := func(n string) string { return filepath.Join(dir, n) }
	write := func(n, text string) error { return os.WriteFile(p(n), []byte(text), 0o644) }
	do := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	do(os.MkdirAll(p("a/b"), 0o755), os.MkdirAll(p("c"), 0o755), write("a/b/f", "1"), os.Link(p("a/b/f"), p("c/g")), write("a/h", "h"), write("in/d/new", "n"))
	whole := 1
	for _, c := range []struct {
		what  string
		do    func() error
		whole bool
	}{
		{"first", func() error { return nil }, true},
		{"a directory with one of two names moves", func() error { return os.Rename(p("a/b"), p("a/z")) }, false},
		{"the other name goes", func() error { return os.Remove(p("c/g")) }, false},
		{"a directory takes the place of another", func() error {
			return errors.Join(os.RemoveAll(p("a/z")), os.MkdirAll(p("a/z/y"), 0o700), write("a/z/y/n", "n"))
		}, false},
		{"a file takes its place", func() error { return errors.Join(os.RemoveAll(p("a/z")), write("a/z", "file")) }, false},
		{"and a directory that one's", func() error { return errors.Join(os.Remove(p("a/z")), os.Mkdir(p("a/z"), 0o711)) }, false},
		{"one of the image goes", func() error { return os.RemoveAll(p("in/d")) }, false},
		{"and comes again", func() error { return errors.Join(os.Mkdir(p("in/d"), 0o755), write("in/d/other", "o")) }, false},
		{"one of the image gets another name", func() error { return os.Rename(p("in/e"), p("in/renamed")) }, true},
		{"and changes", func() error { return write("in/renamed/more", "m") }, false},
		{"the root changes", func() error { return os.Chmod(dir, 0o700) }, false},
		{"an attribute", func() error { return unix.Lsetxattr(p("a/h"), "user.x", []byte("y"), 0) }, false},
		{"a time of long ago", func() error { return os.Chtimes(p("a/h"), time.Unix(5, 0), time.Unix(6, 0)) }, false},
		{"many names", func() error {
			for i := range 300 {
				if err := errors.Join(write(fmt.Sprintf("a/%d", i), "x"), os.Remove(p("in/e"))); err != nil && !errors.Is(err, os.ErrNotExist) {
					return err
				}
			}
			return nil
		}, false},
		{"gone", func() error { return os.RemoveAll(p("a")) }, false},
	} {
		do(c.do())
		aged(t)
		stack := again(t, s, id)
		if whole++; c.whole {
			whole = 1
		}
		if len(stack) != whole {
			t.Errorf("%s: %d layers, want %d", c.what, len(stack), whole)
		}
		want := listStack(t, s, append(slices.Clone(img.Layers), wholeCopy(t, s, id))...)
		sameTree(t, c.what, want, listStack(t, s, slices.Concat(img.Layers, stack)...))
	}
}

// TestDeltaCancelled: nothing is left of a copy that ends early, and the next
// one builds upon the one before.
func TestDeltaCancelled(t *testing.T) {
	s := openXFS(t, 400<<20)
	id := create(t, s)
	upper := fillUpper(t, s, id, 1500, 100)
	aged(t)
	first := again(t, s, id)
	for i := range 500 {
		if err := os.WriteFile(filepath.Join(upper, fmt.Sprintf("d%d", i/100), fmt.Sprintf("f%d", i)), []byte("other"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	layer := NewUpperLayer()
	ended := make(chan error, 1)
	go func() { _, err := s.CopyUpper(ctx, id, layer); ended <- err }()
	testenv.Eventually(t, 30*time.Second, "a copy under way", func() bool {
		staged, err := filepath.Glob(s.vol.path(stagingDir, "*", "upper", "d*"))
		return err != nil || len(staged) > 0 || s.HasLayer(layer)
	})
	cancel()
	if err := <-ended; err != nil && (!errors.Is(err, context.Canceled) || s.HasLayer(layer)) {
		t.Errorf("cancelled: %v", err)
	}
	testenv.Eventually(t, 30*time.Second, "nothing left", func() bool { return trashEmpty(t, s) })
	stack := again(t, s, id)
	if len(stack) < 2 || stack[0] != first[0] {
		t.Errorf("the next copy: %v on %v", stack, first)
	}
	sameTree(t, "the next copy", listStack(t, s, wholeCopy(t, s, id)), listStack(t, s, stack...))
}
