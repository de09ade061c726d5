//go:build root

package rootfs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// BenchmarkCopyUpperAgain copies an upper of 10,000 files once more, after some
// of them changed; beside it cp -a, which clones files too, of all.
func BenchmarkCopyUpperAgain(b *testing.B) {
	s := openXFS(b, 6<<30)
	id := create(b, s)
	upper := fillUpper(b, s, id, benchFiles, benchSize)
	if err := s.Sync(); err != nil {
		b.Fatal(err)
	}
	aged(b)
	again(b, s, id)
	content := make([]byte, benchSize)
	for _, changed := range []int{0, 10, 100, 1000} {
		for _, way := range []string{"ours", "cp"} {
			b.Run(fmt.Sprintf("%d/%s", changed, way), func(b *testing.B) {
				best := time.Hour
				for b.Loop() {
					b.StopTimer()
					for i := range changed {
						n := i * (benchFiles / changed)
						content[0]++
						if err := os.WriteFile(filepath.Join(upper, fmt.Sprintf("d%d", n/100), fmt.Sprintf("f%d", n)), content, 0o644); err != nil {
							b.Fatal(err)
						}
					}
					aged(b)
					b.StartTimer()
					begin := time.Now()
					to := s.vol.path(stagingDir, "cp")
					if way == "cp" {
						if out, err := exec.CommandContext(b.Context(), "cp", "-a", upper, to).CombinedOutput(); err != nil {
							b.Fatalf("%v: %s", err, out)
						}
					} else if on, err := s.CopyUpper(b.Context(), id, NewUpperLayer()); err != nil {
						b.Fatal(err)
					} else if len(on) == 0 {
						b.Log("a whole copy")
					}
					best = min(best, time.Since(begin))
					b.StopTimer()
					if err := os.RemoveAll(to); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
				b.ReportMetric(float64(best.Microseconds())/1000, "best-ms")
			})
		}
	}
}
