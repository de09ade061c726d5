//go:build root

package netns

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// BenchmarkAttachDetach tells the least and the median time of each call, as
// the namespaces around them take much longer. "crowd" is how many sandboxes
// stay attached meanwhile.
func BenchmarkAttachDetach(b *testing.B) {
	for _, mode := range []sandbox.NetworkMode{sandbox.NetworkOff, sandbox.NetworkOpen} {
		for _, crowd := range []int{0, 200} {
			b.Run(fmt.Sprintf("%s/crowd=%d", mode, crowd), func(b *testing.B) {
				newWorld(b)
				h := openHost(b, Config{})
				for i := range crowd {
					attach(b, h, newBox(b, 1000+i, mode))
				}
				var attached, detached []time.Duration
				for i := 0; b.Loop(); i++ {
					x := newBox(b, i%1000, mode)
					start := time.Now()
					must(b, h.Attach(b.Context(), x.Attachment))
					attached = append(attached, time.Since(start))
					x.kill()
					start = time.Now()
					must(b, h.Detach(b.Context(), x.ID, x.Slot))
					detached = append(detached, time.Since(start))
				}
				for name, d := range map[string][]time.Duration{"attach": attached, "detach": detached} {
					slices.Sort(d)
					b.ReportMetric(float64(d[0].Microseconds()), "us-least-"+name)
					b.ReportMetric(float64(d[len(d)/2].Microseconds()), "us-median-"+name)
				}
				b.ReportMetric(0, "ns/op")
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
		if _, known, err := h.Counters(x.ID, x.Slot); err != nil || !known {
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

// twentyRules is a policy as an agent's is: names and prefixes with ports.
func twentyRules(n int) sandbox.NetworkPolicy {
	p := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow}
	for i := range 10 {
		p.Allow = append(p.Allow, fmt.Sprintf("host%d.example.com:443", i), fmt.Sprintf("9.%d.%d.0/24:80,8000-8100/tcp", n%250, i))
	}
	return p
}

// BenchmarkAttachWithRules tells what a policy of twenty rules costs at
// creation, where so many other sandboxes have as many.
func BenchmarkAttachWithRules(b *testing.B) {
	for _, crowd := range []int{0, 200, 1000} {
		for _, rules := range []bool{false, true} {
			b.Run(fmt.Sprintf("crowd=%d/rules=%v", crowd, rules), func(b *testing.B) {
				newWorld(b)
				h := openHost(b, Config{})
				for i := range crowd { // no links: the table is what matters
					l, err := h.planLink(Attachment{ID: sandbox.NewID(), Slot: 2000 + i, Policy: twentyRules(i)})
					must(b, err)
					must(b, h.enforce(l))
				}
				policy := sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}
				if rules {
					policy = twentyRules(1)
				}
				var attached, detached []time.Duration
				for i := 0; b.Loop(); i++ {
					x := newBox(b, i%1000, sandbox.NetworkOpen)
					x.Policy = policy
					start := time.Now()
					must(b, h.Attach(b.Context(), x.Attachment))
					attached = append(attached, time.Since(start))
					x.kill()
					start = time.Now()
					must(b, h.Detach(b.Context(), x.ID, x.Slot))
					detached = append(detached, time.Since(start))
				}
				for name, d := range map[string][]time.Duration{"attach": attached, "detach": detached} {
					slices.Sort(d)
					b.ReportMetric(float64(d[0].Microseconds()), "us-least-"+name)
					b.ReportMetric(float64(d[len(d)/2].Microseconds()), "us-median-"+name)
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
