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

// BenchmarkTableWithRules tells what a policy of twenty rules costs in the
// table, in turns with others, where so many other sandboxes have as many.
func BenchmarkTableWithRules(b *testing.B) {
	policies := []sandbox.NetworkPolicy{{Mode: sandbox.NetworkOff}, {Mode: sandbox.NetworkOpen}, twentyRules(1)}
	names := []string{"off", "open", "rules"}
	for _, crowd := range []int{0, 1000} {
		b.Run(fmt.Sprintf("crowd=%d", crowd), func(b *testing.B) {
			newWorld(b)
			h := openHost(b, Config{})
			for i := range crowd { // no links: the table is what matters
				l, err := h.planLink(Attachment{ID: sandbox.NewID(), Slot: 2000 + i, Policy: twentyRules(i)})
				must(b, err)
				must(b, h.enforce(l))
			}
			made, removed := make([][]time.Duration, len(names)), make([][]time.Duration, len(names))
			for i := 0; b.Loop(); i++ {
				for j, policy := range policies {
					id, slot := sandbox.NewID(), (3*i+j)%1000
					l, err := h.planLink(Attachment{ID: id, Slot: slot, Policy: policy})
					must(b, err)
					start := time.Now()
					must(b, h.enforce(l))
					made[j] = append(made[j], time.Since(start))
					start = time.Now()
					must(b, h.Detach(b.Context(), id, slot))
					removed[j] = append(removed[j], time.Since(start))
				}
			}
			for j, name := range names {
				slices.Sort(made[j])
				slices.Sort(removed[j])
				b.ReportMetric(float64(made[j][len(made[j])/2].Microseconds()), "us-"+name)
				b.ReportMetric(float64(removed[j][len(removed[j])/2].Microseconds()), "us-"+name+"-removed")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
