//go:build root

package rootfs

import (
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// fillUpper makes files of random content in directories of a hundred.
func fillUpper(b testing.TB, s *Store, id sandbox.ID, files, size int) string {
	b.Helper()
	upper := s.vol.path(sandboxesDir, string(id), "upper")
	content := make([]byte, size)
	_, _ = rand.Read(content)
	for i := range files {
		dir := filepath.Join(upper, fmt.Sprintf("d%d", i/100))
		if i%100 == 0 {
			if err := os.Mkdir(dir, 0o755); err != nil {
				b.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%d", i)), content, 0o644); err != nil {
			b.Fatal(err)
		}
	}
	return upper
}

const (
	benchFiles = 10_000
	benchSize  = 1 << 30 / benchFiles
)

// BenchmarkCopyUpper copies 1 GiB in 10,000 files: clean, as after a sync, and
// still in memory; beside it cp -a, which clones files too, and cp -a told not to.
func BenchmarkCopyUpper(b *testing.B) {
	s := openXFS(b, 12<<30)
	for _, state := range []string{"clean", "dirty"} {
		ways := map[string]func(b *testing.B, id sandbox.ID, upper string){
			"ours": func(b *testing.B, id sandbox.ID, _ string) {
				if _, err := s.CopyUpper(b.Context(), id, NewUpperLayer()); err != nil {
					b.Fatal(err)
				}
			},
		}
		for way, option := range map[string]string{"cp": "--reflink=auto", "cp-bytes": "--reflink=never"} {
			ways[way] = func(b *testing.B, _ sandbox.ID, upper string) {
				to := s.vol.path(stagingDir, fmt.Sprint(time.Now().UnixNano()))
				if out, err := exec.CommandContext(b.Context(), "cp", "-a", option, upper, to).CombinedOutput(); err != nil {
					b.Fatalf("%v: %s", err, out)
				}
			}
		}
		for _, way := range []string{"ours", "cp", "cp-bytes"} {
			b.Run(state+"/"+way, func(b *testing.B) {
				var id sandbox.ID
				var upper string
				best := time.Hour // of a loaded machine, the least says most
				for b.Loop() {
					b.StopTimer()
					if id == "" || state == "dirty" {
						id = create(b, s)
						upper = fillUpper(b, s, id, benchFiles, benchSize)
					}
					if state == "clean" {
						if err := s.Sync(); err != nil {
							b.Fatal(err)
						}
					}
					b.StartTimer()
					begin := time.Now()
					ways[way](b, id, upper)
					best = min(best, time.Since(begin))
					b.StopTimer()
					clearVolume(b, s, id, state == "dirty")
					b.StartTimer()
				}
				b.ReportMetric(float64(best.Milliseconds()), "ms-min")
			})
		}
	}
}

// clearVolume throws away copies, and the upper if asked to, and waits until
// they are gone.
func clearVolume(b testing.TB, s *Store, id sandbox.ID, upper bool) {
	b.Helper()
	layers, err := s.Layers()
	if err != nil {
		b.Fatal(err)
	}
	for _, l := range layers {
		if err := s.RemoveLayer(l); err != nil {
			b.Fatal(err)
		}
	}
	if err := s.discardStaging(); err != nil {
		b.Fatal(err)
	}
	if upper {
		if err := s.Discard(id, 0); err != nil {
			b.Fatal(err)
		}
	}
	testenv.Eventually(b, time.Minute, "the copies gone", func() bool { return trashEmpty(b, s) })
}

// BenchmarkFreezeUpper freezes an upper of 1 GiB in 10,000 files, and an empty
// one.
func BenchmarkFreezeUpper(b *testing.B) {
	s := openXFS(b, 4<<30)
	for name, files := range map[string]int{"empty": 0, "10000": benchFiles} {
		b.Run(name, func(b *testing.B) {
			id := create(b, s)
			fillUpper(b, s, id, files, benchSize)
			for b.Loop() {
				layer := NewUpperLayer()
				if err := s.FreezeUpper(id, layer); err != nil {
					b.Fatal(err)
				}
				b.StopTimer() // and back
				rel, err := s.upperLayerDir(layer)
				if err != nil {
					b.Fatal(err)
				}
				if err := os.Rename(s.vol.path(rel), s.vol.path(sandboxesDir, string(id))); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			clearVolume(b, s, id, true)
		})
	}
}

func BenchmarkUpperStamp(b *testing.B) {
	s := openXFS(b, 4<<30)
	id := create(b, s)
	fillUpper(b, s, id, benchFiles, 100)
	for b.Loop() {
		if _, err := s.UpperStamp(id); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkDiff compares a sandbox that changed 100 files with the stack of 64
// layers and 10,000 files it was begun from.
func BenchmarkDiff(b *testing.B) {
	s := openXFS(b, 4<<30)
	img := fakeLayers(b, s, 63)
	big := create(b, s)
	fillUpper(b, s, big, benchFiles, 100)
	stack := append(img.Layers, freeze(b, s, big))
	id := create(b, s)
	fillUpper(b, s, id, 100, 200)
	for b.Loop() {
		if got := len(diffOf(b, s, stack, stack, id)); got != 100 {
			b.Fatalf("%d changes", got)
		}
	}
}

// BenchmarkFlatten merges 16 layers of 500 files each.
func BenchmarkFlatten(b *testing.B) {
	s := openXFS(b, 4<<30)
	var layers []string
	for range 16 {
		id := create(b, s)
		fillUpper(b, s, id, 500, 10_000)
		layers = append(layers, freeze(b, s, id))
	}
	if err := s.Sync(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.Flatten(b.Context(), layers); err != nil {
			b.Fatal(err)
		}
	}
}
