//go:build root

package rootfs

import (
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// BenchmarkMount times Mount alone; ns/op is the whole life of an upper.
func BenchmarkMount(b *testing.B) {
	s := openTest(b)
	in := startInside(b, testBase)
	host, err := s.HostImage(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	many := fakeLayers(b, s, 32)
	one := many
	one.Layers = one.Layers[:1]
	// Two layers with the mount points, and one without: the skeleton is the second.
	two := many
	two.Layers = two.Layers[:2]
	bare := sandbox.Image{Kind: sandbox.ImageTar, Layers: []string{layerTest(b, s, tarEntry{name: "x"})}}
	for m := s.mode; m <= modeString; m++ {
		for name, img := range map[string]sandbox.Image{"1": one, "2": two, "bare": bare, "32": many, "host": host} {
			b.Run(m.String()+"/"+name, func(b *testing.B) {
				s.mode = m
				var took []time.Duration
				for b.Loop() {
					id := create(b, s)
					begin := time.Now()
					root, err := s.Mount(b.Context(), MountSpec{ID: id, Image: img, UserNS: in.userns, UIDBase: in.base})
					took = append(took, time.Since(begin))
					if err != nil {
						b.Fatal(err)
					}
					root.Close()
					if err := s.Discard(id, 0); err != nil {
						b.Fatal(err)
					}
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[0].Microseconds()), "µs-min")
				b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-median")
			})
		}
	}
	b.Run("create", func(b *testing.B) {
		for b.Loop() {
			create(b, s)
		}
	})
	b.Run("discard", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			id := create(b, s)
			b.StartTimer()
			if err := s.Discard(id, 0); err != nil {
				b.Fatal(err)
			}
		}
	})
}
