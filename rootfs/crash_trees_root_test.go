//go:build root

package rootfs

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// treeWork is what a daemon that will be killed does over and over.
type treeWork struct {
	Do     string // freeze, copy, delta or flatten
	ID     sandbox.ID
	Layers []string
}

// treesUntilKilled is that daemon. It reads the work from a file.
func treesUntilKilled(dir, work string) int {
	var w treeWork
	b, err := os.ReadFile(work)
	if err == nil {
		err = json.Unmarshal(b, &w)
	}
	var s *Store
	if err == nil {
		s, err = Open(context.Background(), Config{Dir: dir, BestEffort: true})
	}
	for err == nil {
		switch w.Do {
		case "freeze":
			// A copy to freeze, in the place of a sandbox's upper.
			id := sandbox.NewID()
			if err = s.CreateUpper(id, 0, sandbox.Limits{}); err == nil {
				upper := s.vol.path(sandboxesDir, string(id), "upper")
				_, err = s.copyTree(context.Background(), s.vol.path(sandboxesDir, string(w.ID), "upper"), upper)
			}
			if err == nil {
				err = s.FreezeUpper(id, NewUpperLayer())
			}
		case "copy":
			_, err = s.CopyUpper(context.Background(), w.ID, NewUpperLayer())
		case "delta":
			if err = nextGeneration(s, w.ID); err == nil {
				_, err = s.CopyUpper(context.Background(), w.ID, NewUpperLayer())
			}
		case "flatten":
			_, err = s.Flatten(context.Background(), w.Layers)
		}
	}
	fmt.Fprintln(os.Stderr, "the work ended:", err)
	return 1
}

// TestKilledTrees kills a daemon while it makes layers of uppers, at growing
// distances, and starts another: every layer there is is whole, and nothing
// else is left.
func TestKilledTrees(t *testing.T) {
	for _, do := range []string{"freeze", "copy", "flatten"} {
		t.Run(do, func(t *testing.T) { killedTrees(t, do) })
	}
}

func killedTrees(t *testing.T, do string) {
	s := openTest(t)
	w := treeWork{Do: do, ID: create(t, s)}
	source := fillUpper(t, s, w.ID, 400, 3000)
	oddTree(t, source)
	if err := os.RemoveAll(filepath.Join(source, "dir", "sub")); err != nil { // it has a redirect to nowhere
		t.Fatal(err)
	}
	for range 2 {
		layer := NewUpperLayer()
		if _, err := s.CopyUpper(t.Context(), w.ID, layer); err != nil {
			t.Fatal(err)
		}
		w.Layers = append(w.Layers, layer)
	}
	flat, err := s.Flatten(t.Context(), w.Layers)
	if err != nil {
		t.Fatal(err)
	}
	list := func(layer string) []string {
		tree, err := layerTree(layer)
		if err != nil {
			t.Fatal(err)
		}
		return listTree(t, s.vol.path(tree), true)
	}
	want := list(flat)
	if do != "flatten" {
		want = listTree(t, source, true)
	}
	before := append([]string{flat}, w.Layers...)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	work := filepath.Join(t.TempDir(), "work")
	b, err := json.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(work, b, 0o600); err != nil {
		t.Fatal(err)
	}
	whole := 0
	for round := range testenv.Cycles(t, 4, 200) {
		killAtWork(t, s.dir, work, do, round)
		s = openIn(t, Config{Dir: s.dir, BestEffort: true})
		testenv.Eventually(t, 60*time.Second, "nothing left of the work", func() bool { return trashEmpty(t, s) })
		layers, err := s.Layers()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range before {
			if !slices.Contains(layers, l) {
				t.Errorf("layer %s is gone", l)
			}
		}
		for _, l := range layers {
			if slices.Contains(before, l) {
				continue
			}
			whole++
			sameTree(t, fmt.Sprintf("round %d, layer %s", round, l), want, list(l))
			if err := s.RemoveLayer(l); err != nil {
				t.Fatal(err)
			}
		}
		ids, err := s.Uppers()
		if err != nil || do != "freeze" && len(ids) != 1 || len(ids) > 2 {
			t.Errorf("uppers %v, %v", ids, err)
		}
		for _, id := range ids {
			if id == w.ID {
				continue
			}
			if err := s.Discard(id, 0); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if whole == 0 {
		t.Error("no layer was ever finished: this shows half of it")
	}
}

// killAtWork starts the daemon and kills it, every other round in the middle
// of something, else just after a layer came to be.
func killAtWork(t *testing.T, dir, work, do string, round int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), envKill+"="+dir, envKillTrees+"="+work)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	count := func(pattern string) int {
		found, err := filepath.Glob(filepath.Join(dir, "volume", pattern))
		if err != nil {
			t.Fatal(err)
		}
		return len(found)
	}
	layers := count(layersDir + "/upper-*")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	partly := stagingDir + "/upper-*/upper/d*"
	if do == "freeze" {
		partly = sandboxesDir + "/*/upper/d*"
	}
	resting := count(partly)
	testenv.Eventually(t, 60*time.Second, "work under way", func() bool {
		if round%2 == 0 {
			return count(layersDir+"/upper-*") > layers+round%5
		}
		return count(partly) > resting+round%9
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
}
