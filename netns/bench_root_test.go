//go:build root

package netns

import (
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func BenchmarkAttachDetach(b *testing.B) {
	for _, mode := range []sandbox.NetworkMode{sandbox.NetworkOff, sandbox.NetworkOpen} {
		for _, half := range []string{"attach", "detach"} {
			b.Run(string(mode)+"/"+half, func(b *testing.B) {
				newWorld(b)
				h := openHost(b, Config{})
				for i := 0; b.Loop(); i++ {
					b.StopTimer()
					x := newBox(b, i%1000, mode)
					if half == "attach" {
						b.StartTimer()
					}
					must(b, h.Attach(b.Context(), x.Attachment))
					b.StopTimer()
					x.kill()
					if half == "detach" {
						b.StartTimer()
					}
					must(b, h.Detach(b.Context(), x.ID, x.Slot))
					b.StartTimer()
				}
			})
		}
	}
}

func BenchmarkCounters(b *testing.B) {
	newWorld(b)
	h := openHost(b, Config{})
	x := newBox(b, 1, sandbox.NetworkOff)
	attach(b, h, x)
	for b.Loop() {
		if _, _, _, known, err := h.Counters(x.ID, x.Slot); err != nil || !known {
			b.Fatal(known, err)
		}
	}
}

func BenchmarkSetPolicy(b *testing.B) {
	newWorld(b)
	h := openHost(b, Config{})
	x := newBox(b, 1, sandbox.NetworkOpen)
	attach(b, h, x)
	live := x.Attachment
	live.NetNS = nil
	modes := []sandbox.NetworkMode{sandbox.NetworkOff, sandbox.NetworkOpen}
	for i := 0; b.Loop(); i++ {
		live.Policy.Mode = modes[i%2]
		must(b, h.SetPolicy(b.Context(), live))
	}
}
