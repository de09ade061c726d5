//go:build root

package rootfs

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// generations is how many directories of an upper say which generation of it
// this is.
const generations = 40

// constant is how many files beside them stay as they are.
const constant = 500

// nextGeneration changes a file in each of these directories, and puts another
// in the place of a third.
func nextGeneration(s *Store, id sandbox.ID) error {
	upper := s.vol.path(sandboxesDir, string(id), "upper")
	b, err := os.ReadFile(filepath.Join(upper, "d0", "generation"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	n, _ := strconv.Atoi(string(b)) // 0: none yet
	now := strconv.Itoa(n + 1)
	for i := range generations {
		dir := filepath.Join(upper, fmt.Sprintf("d%d", i))
		err := os.MkdirAll(dir, 0o755)
		was, _ := filepath.Glob(filepath.Join(dir, "is-*"))
		for _, path := range was {
			err = errors.Join(err, os.Remove(path))
		}
		err = errors.Join(err,
			os.WriteFile(filepath.Join(dir, "generation"), []byte(now), 0o600),
			os.WriteFile(filepath.Join(dir, "is-"+now), nil, 0o600))
		if err != nil {
			return err
		}
	}
	return nil
}

// TestKilledDeltas kills a daemon while it copies, again and again, an upper
// that changes in between: every copy there is shows one generation of it, and
// the next builds on what is there.
func TestKilledDeltas(t *testing.T) {
	s := openXFS(t, 500<<20)
	w := treeWork{Do: "delta", ID: create(t, s)}
	upper := fillUpper(t, s, w.ID, constant, 100)
	work := filepath.Join(t.TempDir(), "work")
	b, err := json.Marshal(w)
	if err == nil {
		err = os.WriteFile(work, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	deltas := 0
	var stack []string
	for round := range testenv.Cycles(t, 4, 200) {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		killAtWork(t, s.dir, work, w.Do, round)
		s = openIn(t, Config{Dir: s.dir, BestEffort: true})
		testenv.Eventually(t, 60*time.Second, "nothing left of the work", func() bool { return trashEmpty(t, s) })
		layers, err := s.Layers()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range layers {
			if slices.Contains(stack, l) { // looked at when it was made
				continue
			}
			info, err := s.upperInfo(l)
			if err != nil {
				t.Fatal(err)
			}
			if len(info.On) > 0 {
				deltas++
			}
			oneGeneration(t, s, append(slices.Clone(info.On), l))
		}
		if err := nextGeneration(s, w.ID); err != nil { // the kill may have left a mix
			t.Fatal(err)
		}
		stack = again(t, s, w.ID)
		whole := wholeCopy(t, s, w.ID)
		sameTree(t, fmt.Sprintf("round %d, the next copy, on %d", round, len(stack)-1), listStack(t, s, whole), listStack(t, s, stack...))
		for _, l := range append(layers, whole) {
			if slices.Contains(stack, l) {
				continue
			}
			if err := s.RemoveLayer(l); err != nil {
				t.Fatal(err)
			}
		}
		if names, err := readNames(s.vol.path(copiesDir)); err != nil || !slices.Equal(names, []string{string(w.ID)}) {
			t.Errorf("accounts: %q, %v", names, err)
		}
		if t.Failed() {
			return
		}
	}
	if _, err := os.Lstat(upper); err != nil || deltas == 0 {
		t.Errorf("no copy of what changed was ever finished: %v", err)
	}
}

// oneGeneration wants layers to show one generation, and the files there
// always are.
func oneGeneration(t testing.TB, s *Store, layers []string) {
	t.Helper()
	plan, err := s.planView(layers)
	if err != nil {
		t.Fatal(err)
	}
	dir, detach := attached(t, s, plan)
	defer detach()
	names, err := filepath.Glob(filepath.Join(dir, "d*", "is-*"))
	if err != nil || len(names) != generations {
		t.Errorf("%d files whose name is a generation, %v: %q", len(names), err, names)
	}
	if files, err := filepath.Glob(filepath.Join(dir, "d*", "f*")); err != nil || len(files) != constant {
		t.Errorf("%d files that stay, %v", len(files), err)
	}
	all := map[string]int{}
	for _, path := range names {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(path), "generation"))
		if err != nil {
			t.Error(err)
		}
		all[strings.TrimPrefix(filepath.Base(path), "is-")]++
		all[string(b)]++
	}
	if len(all) != 1 {
		t.Errorf("generations, and how often they are named: %v", all)
	}
}
