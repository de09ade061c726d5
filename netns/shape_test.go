package netns

import (
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestPlanShape(t *testing.T) {
	limits := sandbox.NetworkLimits{EgressBPS: 50e6, IngressBPS: 100e6}
	none := sandbox.NetworkLimits{}
	for name, c := range map[string]struct {
		limits sandbox.NetworkLimits
		fault  *sandbox.NetworkFault
		want   shape
	}{
		"nothing":        {},
		"limits":         {limits, nil, shape{in: end{rate: 100e6}, out: end{rate: 50e6}}},
		"one way":        {sandbox.NetworkLimits{EgressBPS: 1e6}, nil, shape{out: end{rate: 1e6}}},
		"other limits":   {sandbox.NetworkLimits{Flows: 5, PacketsPerSecond: 7}, nil, shape{}},
		"latency halves": {none, &sandbox.NetworkFault{LatencyMS: 201, JitterMS: 20}, both(end{delay: 100500 * time.Microsecond, jitter: 10 * time.Millisecond, fault: true})},
		"loss each way":  {none, &sandbox.NetworkFault{LossPercent: 5}, both(end{loss: 5, fault: true})},
		"lower rate of fault": {
			limits, &sandbox.NetworkFault{RateBPS: 75e6},
			shape{in: end{rate: 75e6, fault: true}, out: end{rate: 50e6, fault: true}},
		},
		"partition is all": {limits, &sandbox.NetworkFault{Partition: true, LatencyMS: 5, LossPercent: 1, RateBPS: 1e6}, both(end{cut: true, fault: true})},
	} {
		if got := planShape(c.limits, c.fault); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

func both(e end) shape { return shape{in: e, out: e} }

// describe writes queues down as kind@parent=handle.
func describe(queues []netlink.Qdisc) string {
	s := ""
	for _, q := range queues {
		s += fmt.Sprintf("%s@%x=%x ", q.Type(), q.Attrs().Parent, q.Attrs().Handle)
	}
	return s
}

func TestQueuesOfAnEnd(t *testing.T) {
	for _, c := range []struct {
		e    end
		fair bool
		want string
	}{
		{end{}, true, ""},
		{end{fault: true}, true, ""}, // of a rate that the other end has
		{end{rate: 1e6}, false, "tbf@ffffffff=5b100000 "},
		{end{rate: 1e6}, true, "tbf@ffffffff=5b100000 fq_codel@5b100001=5b1f0000 "},
		{end{rate: 1e6, fault: true}, true, "tbf@ffffffff=5b110000 "},
		{end{delay: 1, fault: true}, true, "netem@ffffffff=5b200000 "},
		{end{loss: 1, fault: true}, true, "netem@ffffffff=5b200000 "},
		{end{loss: 1, rate: 1e6, fault: true}, true, "netem@ffffffff=5b200000 tbf@5b200001=5b210000 "},
		{end{cut: true, fault: true}, true, "blackhole@ffffffff=5b300000 "},
	} {
		queues := c.e.queues(7, c.fair)
		if got := describe(queues); got != c.want {
			t.Errorf("%+v: %q, want %q", c.e, got, c.want)
		}
		for _, q := range queues {
			if q.Attrs().LinkIndex != 7 {
				t.Errorf("%+v: %s on link %d", c.e, q.Type(), q.Attrs().LinkIndex)
			}
		}
		if root := c.e.root(); ofFault(root) != (c.e.fault && root != 0) {
			t.Errorf("%+v: root %x, of a fault: %v", c.e, root, ofFault(root))
		}
	}
}

// TestSupplant: a bucket grows in place and never shrinks there.
func TestSupplant(t *testing.T) {
	for _, c := range []struct {
		now, next end
		other     bool // the present one has the second handle
		want      string
		flows     uint32
	}{
		{end{rate: 1e6}, end{rate: 2e6}, false, "tbf@ffffffff=5b100000 fq_codel@5b100001=5b1f0000 ", 0},
		{end{rate: 2e6}, end{rate: 2e6}, false, "tbf@ffffffff=5b100000 fq_codel@5b100001=5b1f0000 ", 0},
		{end{rate: 2e6}, end{rate: 1e6}, false, "tbf@ffffffff=5b120000 fq_codel@5b120001=5b1f0000 ", 256},
		{end{rate: 1e6}, end{rate: 2e6}, true, "tbf@ffffffff=5b120000 fq_codel@5b120001=5b1f0000 ", 0},
		{end{rate: 2e6}, end{rate: 1e6}, true, "tbf@ffffffff=5b100000 fq_codel@5b100001=5b1f0000 ", 256},
		{end{rate: 2e6, fault: true}, end{rate: 1e6, fault: true}, false, "tbf@ffffffff=5b130000 ", 0},
		{end{rate: 1e6, fault: true}, end{rate: 2e6}, false, "tbf@ffffffff=5b100000 fq_codel@5b100001=5b1f0000 ", 256},
		{end{cut: true, fault: true}, end{rate: 2e6}, false, "tbf@ffffffff=5b100000 fq_codel@5b100001=5b1f0000 ", 256},
		{end{rate: 2e6}, end{cut: true, fault: true}, true, "blackhole@ffffffff=5b300000 ", 0},
	} {
		now, next := c.now.queues(7, true)[0], c.next.queues(7, true)
		if c.other {
			now.Attrs().Handle ^= majorOther << 16
		}
		supplant(now, next)
		if got := describe(next); got != c.want {
			t.Errorf("%+v (second handle %v) then %+v: %q, want %q", c.now, c.other, c.next, got, c.want)
		}
		if len(next) > 1 {
			if flows := next[1].(*netlink.FqCodel).Flows; flows != c.flows {
				t.Errorf("%+v then %+v: sets %d flows, want %d", c.now, c.next, flows, c.flows)
			}
		}
		if root := majorOf(next[0]); ofFault(root) != c.next.fault {
			t.Errorf("%+v then %+v: root %x, of a fault: %v", c.now, c.next, root, ofFault(root))
		}
	}
}

// TestBucketSizes checks what must hold of a bucket at every rate.
func TestBucketSizes(t *testing.T) {
	for rate := uint64(8 << 10); rate <= 400e9; rate *= 2 {
		b := end{rate: rate}.bucket(netlink.QdiscAttrs{})
		if b.Rate != rate/8 {
			t.Errorf("%d bit/s: %d bytes/s", rate, b.Rate)
		}
		burst := netlink.Xmitsize(b.Rate, b.Buffer)
		if burst < leastBurst*9/10 {
			t.Errorf("%d bit/s: a burst of %d bytes does not take a packet", rate, burst)
		}
		wait := time.Duration(float64(b.Limit) / float64(b.Rate) * float64(time.Second))
		if wait > queueTime+time.Millisecond && b.Limit > leastQueue {
			t.Errorf("%d bit/s: %d bytes wait %s", rate, b.Limit, wait)
		}
		if b.Limit < leastQueue || b.Limit > mostQueue {
			t.Errorf("%d bit/s: a queue of %d bytes", rate, b.Limit)
		}
		f := end{rate: rate}.flows(netlink.QdiscAttrs{})
		if f.Target < 5000 || f.Interval < f.Target {
			t.Errorf("%d bit/s: target %d µs, interval %d µs", rate, f.Target, f.Interval)
		}
	}
}
