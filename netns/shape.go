package netns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// This file bounds rates and sets faults, by queueing disciplines (tc(8)) on
// both ends of a link: the host's end queues what goes into the sandbox, the
// one inside what comes out of it. Nobody inside may change that: it takes
// CAP_NET_ADMIN. A link without a limit has no queue at all, and costs nothing.

// end is what one end of a link does with the packets that leave by it. The
// zero value is no queue.
type end struct {
	rate   uint64        // bits per second; 0: no bound
	delay  time.Duration // one way
	jitter time.Duration
	loss   float64 // percent
	cut    bool    // nothing passes
	fault  bool    // a fault has a part in it
}

// shape is both ends of one link: into the sandbox and out of it.
type shape struct{ in, out end }

// planShape says what a policy's limits and a fault make of a link.
func planShape(l sandbox.NetworkLimits, f *sandbox.NetworkFault) shape {
	s := shape{in: end{rate: l.IngressBPS}, out: end{rate: l.EgressBPS}}
	if f != nil {
		s.in, s.out = s.in.disturbed(*f), s.out.disturbed(*f)
	}
	return s
}

// disturbed is an end under a fault. Latency is that of the round trip: half
// of it falls to each end.
func (e end) disturbed(f sandbox.NetworkFault) end {
	if f.Partition {
		return end{cut: true, fault: true}
	}
	e.fault = true
	e.delay = time.Duration(f.LatencyMS) * time.Millisecond / 2
	e.jitter = time.Duration(f.JitterMS) * time.Millisecond / 2
	e.loss = f.LossPercent
	if f.RateBPS != 0 && (e.rate == 0 || f.RateBPS < e.rate) {
		e.rate = f.RateBPS
	}
	return e
}

// Handles of our queues. A root of a fault is told from that of a limit by it,
// which is how faults of an earlier daemon are found. One handle has always
// the same kind of queue: the kernel changes those in place. Roots that are tbf
// have a second handle, to take each other's place.
const (
	majorLimit     = 0x5b10 // root: tbf
	majorFaultRate = 0x5b11 // root: tbf
	majorNetem     = 0x5b20 // root: netem
	majorNetemRate = 0x5b21 // tbf beneath netem
	majorCut       = 0x5b30 // root: blackhole
	majorFair      = 0x5b1f // fq_codel beneath tbf
	majorOther     = 0x0002 // this bit tells the two handles of a tbf apart
)

// root returns the major number of the end's outermost queue; 0 for none.
func (e end) root() uint16 {
	switch {
	case e.cut:
		return majorCut
	case e.delay > 0 || e.loss > 0:
		return majorNetem
	case e.rate > 0 && e.fault:
		return majorFaultRate
	case e.rate > 0:
		return majorLimit
	}
	return 0
}

// ofFault tells the roots of faults.
func ofFault(major uint16) bool {
	major &^= majorOther
	return major == majorCut || major == majorNetem || major == majorFaultRate
}

// Sizes of a token bucket.
const (
	// burstTime is what a bucket may save up: more than a busy host's timers
	// are late by, or the rate would fall short.
	burstTime = 5 * time.Millisecond
	// leastBurst is four packets of a link with their headers. Packets made larger
	// for segmentation offload are cut where they exceed the bucket.
	leastBurst = 4 * (1500 + 14)
	// queueTime is how long a packet may wait at the most for its tokens.
	queueTime = 50 * time.Millisecond
	// leastQueue holds the first flight of a TCP connection (RFC 6928: ten
	// segments) twice, so that slow links do not begin with a loss.
	leastQueue = 20 * (1500 + 14)
	// mostQueue bounds the memory behind one end.
	mostQueue = 16 << 20
	// netemPackets bounds the packets under way in a delayed link.
	netemPackets = 4096
)

// bytesIn is how much a rate carries in a time.
func bytesIn(bits uint64, d time.Duration) uint64 {
	return uint64(float64(bits) / 8 * d.Seconds())
}

// queues returns the queues of an end, outermost first. fair puts a queue for
// each flow into the bucket, so that one that fills it does not delay others.
func (e end) queues(index int, fair bool) []netlink.Qdisc {
	at := func(parent uint32, major uint16) netlink.QdiscAttrs {
		return netlink.QdiscAttrs{LinkIndex: index, Parent: parent, Handle: netlink.MakeHandle(major, 0)}
	}
	root := e.root()
	switch root {
	case 0:
		return nil
	case majorCut:
		return []netlink.Qdisc{&netlink.GenericQdisc{QdiscAttrs: at(netlink.HANDLE_ROOT, root), QdiscType: "blackhole"}}
	case majorNetem:
		out := []netlink.Qdisc{netlink.NewNetem(at(netlink.HANDLE_ROOT, root), netlink.NetemQdiscAttrs{
			Latency: uint32(e.delay.Microseconds()), Jitter: uint32(e.jitter.Microseconds()),
			Loss: float32(e.loss), Limit: netemPackets,
		})}
		if e.rate > 0 {
			out = append(out, e.bucket(at(netlink.MakeHandle(root, 1), majorNetemRate)))
		}
		return out
	}
	out := []netlink.Qdisc{e.bucket(at(netlink.HANDLE_ROOT, root))}
	if fair && root == majorLimit {
		out = append(out, e.flows(at(netlink.MakeHandle(root, 1), majorFair)))
	}
	return out
}

// bucket is the token bucket (tc-tbf(8)) of a rate.
func (e end) bucket(at netlink.QdiscAttrs) *netlink.Tbf {
	rate := e.rate / 8
	burst := max(bytesIn(e.rate, burstTime), leastBurst)
	limit := min(max(bytesIn(e.rate, queueTime), leastQueue), mostQueue)
	return &netlink.Tbf{QdiscAttrs: at, Rate: rate, Limit: uint32(limit), Buffer: netlink.Xmittime(rate, uint32(min(burst, mostQueue)))}
}

// flows is the fair queue (tc-fq_codel(8)) within a bucket. Below some 4 Mbit/s
// one packet takes longer than the usual target of 5 ms (RFC 8290, 5.2.3).
func (e end) flows(at netlink.QdiscAttrs) *netlink.FqCodel {
	const usual = 5 * time.Millisecond
	packet := time.Duration(float64(leastBurst/4*8) / float64(e.rate) * float64(time.Second))
	target := max(usual, packet*3/2)
	return &netlink.FqCodel{
		QdiscAttrs: at, Target: uint32(target.Microseconds()), Interval: uint32((20 * target).Microseconds()),
		MemoryLimit: mostQueue, Limit: netemPackets, Flows: 256,
	}
}

// shaped is what this daemon knows of the queues of a link.
type shaped struct {
	shape
	// Set for ends that an earlier daemon, or a change that failed half way,
	// may have left otherwise.
	unsureIn, unsureOut bool
}

// wantShape returns what a sandbox's link should have and what it has.
func (h *Host) wantShape(a Attachment) (want shape, have shaped) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return planShape(a.Policy.Limits, h.faults[a.ID]), h.shapes[a.ID]
}

// noteShape remembers what a link has now.
func (h *Host) noteShape(id sandbox.ID, s shape, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil && s == (shape{}) {
		delete(h.shapes, id)
		return
	}
	h.shapes[id] = shaped{shape: s, unsureIn: err != nil, unsureOut: err != nil}
}

// doubtShape makes the next change look at a link that had queues first: it
// may be another one by now.
func (h *Host) doubtShape(id sandbox.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s, ok := h.shapes[id]; ok {
		s.unsureIn, s.unsureOut = true, true
		h.shapes[id] = s
	}
}

func (h *Host) forgetShape(id sandbox.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.shapes, id)
	delete(h.faults, id)
}

// settled reports whether there is nothing to do.
func (s shaped) settled(want shape) bool { return !s.unsureIn && !s.unsureOut && s.shape == want }

// queue gives one end the queues it should have. A rate is raised in place:
// what waits goes on waiting. Doing it again changes nothing.
func (h *Host) queue(route *netlink.Handle, index int, have end, unsure bool, want end) error {
	if !unsure && have == want {
		return nil
	}
	var root netlink.Qdisc
	if unsure || have.root() != 0 {
		var err error
		if root, err = rootQueue(route, index); err != nil {
			return err
		}
	}
	queues := want.queues(index, !h.unfair.Load())
	if root != nil {
		if major := majorOf(root); len(queues) == 0 || major == majorNetem { // what is beneath a netem may differ
			if err := deleteRootQueue(route, index, major); err != nil {
				return err
			}
		} else {
			supplant(root, queues)
		}
	}
	for _, q := range queues {
		err := route.QdiscReplace(q)
		switch {
		case errors.Is(err, unix.ENOENT) && q.Type() == "fq_codel":
			h.unfair.Store(true) // this kernel has none: one queue for all flows
		case errors.Is(err, unix.ENOENT) && q.Type() == "netem":
			return sandbox.Errorf(sandbox.ErrUnsupported, "no_netem", "delaying or losing packets: this kernel has no netem: load it (modprobe sch_netem) or boot a kernel with CONFIG_NET_SCH_NETEM; rates and partitions work without")
		case errors.Is(err, unix.ENOENT):
			return sandbox.Errorf(sandbox.ErrUnsupported, "no_queue", "making a queue on a link: this kernel has no %[1]s: load it (modprobe sch_%[1]s)", q.Type())
		case err != nil:
			return fmt.Errorf("making a %s queue: %w", q.Type(), err)
		}
	}
	return nil
}

// supplant gives queues the handles by which they change those of a present
// root, or take their place. A bucket must not become smaller in place: a
// packet that waits in it and is larger than the new one would wait for ever,
// and everything behind it. A new bucket loses what waits.
func supplant(root netlink.Qdisc, queues []netlink.Qdisc) {
	now, ok := root.(*netlink.Tbf)
	next, same := queues[0].(*netlink.Tbf)
	if !ok || !same || majorOf(now)&^majorOther != majorOf(next) {
		return // of another kind: their handles differ
	}
	major := majorOf(now)
	inPlace := next.Rate >= now.Rate
	if !inPlace {
		major ^= majorOther
	}
	next.Handle = netlink.MakeHandle(major, 0)
	for _, q := range queues[1:] {
		q.Attrs().Parent = netlink.MakeHandle(major, 1)
		if fair, ok := q.(*netlink.FqCodel); ok && inPlace {
			fair.Flows = 0 // the kernel refuses to change their number
		}
	}
}

func majorOf(q netlink.Qdisc) uint16 {
	major, _ := netlink.MajorMinor(q.Attrs().Handle)
	return major
}

// rootQueue returns a link's outermost queue; nil if it has only the kernel's
// own.
func rootQueue(route *netlink.Handle, index int) (netlink.Qdisc, error) {
	roots, err := rootQueues(route)
	return roots[index], err
}

// rootQueues returns the outermost queues of all links that have other than
// the kernel's own, by index. The kernel lists no single link's.
func rootQueues(route *netlink.Handle) (map[int]netlink.Qdisc, error) {
	all, err := listing(func() ([]netlink.Qdisc, error) { return route.QdiscList(nil) })
	if err != nil {
		return nil, fmt.Errorf("listing queues: %w", err)
	}
	roots := map[int]netlink.Qdisc{}
	for _, q := range all {
		if majorOf(q) != 0 && q.Attrs().Parent == netlink.HANDLE_ROOT {
			roots[q.Attrs().LinkIndex] = q
		}
	}
	return roots, nil
}

func deleteRootQueue(route *netlink.Handle, index int, major uint16) error {
	q := &netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(major, 0),
	}}
	// EINVAL: another one's queue is there by now.
	if err := route.QdiscDel(q); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("deleting the queue of a link: %w", err)
	}
	return nil
}

// reshape gives the existing link of a sandbox the queues it should have.
func (h *Host) reshape(a Attachment, outer int) error {
	want, have := h.wantShape(a)
	if have.settled(want) {
		return nil
	}
	err := h.reshapeEnds(a.NetNS, outer, have, want)
	h.noteShape(a.ID, want, err)
	return err
}

func (h *Host) reshapeEnds(ns *os.File, outer int, have shaped, want shape) error {
	err := linux.InNetNS(ns, func() error {
		inside, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("opening a netlink socket inside: %w", err)
		}
		defer inside.Close()
		link, err := inside.LinkByName(guestLink)
		if err != nil {
			return fmt.Errorf("finding %s inside: %w", guestLink, err)
		}
		return h.queue(inside, link.Attrs().Index, have.out, have.unsureOut, want.out)
	})
	if err != nil {
		return err
	}
	return h.queue(h.route, outer, have.in, have.unsureIn, want.in)
}

// SetFault disturbs the link of a living sandbox until the next SetFault, its
// Detach, or a Recover; nil ends the disturbance. Policy is the sandbox's
// present one: its rates hold on. On an error everything is as before. Errors
// are of class ErrConflict (no link) or ErrUnsupported (code no_netem).
func (h *Host) SetFault(ctx context.Context, a Attachment, f *sandbox.NetworkFault) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	link, err := h.route.LinkByName(linkName(a.ID))
	if isNoLink(err) && f == nil {
		h.putFault(a.ID, nil)
		return nil
	}
	if isNoLink(err) || a.NetNS == nil {
		return sandbox.Errorf(sandbox.ErrConflict, "no_link", "sandbox %s has no network link to disturb: give it a network first", a.ID)
	}
	if err != nil {
		return fmt.Errorf("finding link %s: %w", linkName(a.ID), err)
	}
	before := h.putFault(a.ID, f)
	if err := h.reshape(a, link.Attrs().Index); err != nil {
		h.putFault(a.ID, before)
		return fmt.Errorf("disturbing the link of sandbox %s: %w", a.ID, errors.Join(err, h.reshape(a, link.Attrs().Index)))
	}
	return nil
}

// putFault notes a sandbox's fault and returns the one before.
func (h *Host) putFault(id sandbox.ID, f *sandbox.NetworkFault) (before *sandbox.NetworkFault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before = h.faults[id]
	if f == nil {
		delete(h.faults, id)
	} else {
		h.faults[id] = f
	}
	return before
}

// reshapeKept ends the faults an earlier daemon left on the links of kept
// sandboxes, whose policies alone say what their queues are. Those it found
// are Disturbed.
func (h *Host) reshapeKept(ctx context.Context, keep map[sandbox.ID]Attachment) error {
	links, err := listing(h.route.LinkList)
	if err != nil {
		return fmt.Errorf("listing links: %w", err)
	}
	roots, err := rootQueues(h.route)
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		id, ours := linkID(l.Attrs().Name)
		a, kept := keep[id]
		if !ours || !kept || a.NetNS == nil {
			continue
		}
		a.ID = id
		root := roots[l.Attrs().Index]
		h.mu.Lock()
		h.shapes[id] = shaped{unsureIn: root != nil, unsureOut: true}
		if root != nil && ofFault(majorOf(root)) {
			h.disturbed = append(h.disturbed, id)
		}
		h.mu.Unlock()
		if err := h.reshape(a, l.Attrs().Index); err != nil {
			errs = append(errs, fmt.Errorf("recovering the rates of sandbox %s: %w", id, err))
		}
	}
	return errors.Join(errs...)
}

// Disturbed returns the sandboxes whose links still had a fault of an earlier
// daemon when Recover ended it.
func (h *Host) Disturbed() []sandbox.ID {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := h.disturbed
	h.disturbed = nil
	return out
}

// QueueKinds tells which of the queues that rates and faults need this kernel
// lacks: it tries them in a network namespace of its own.
func QueueKinds() (missing []string, err error) {
	err = linux.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network namespace: %w", err)
		}
		route, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("opening a netlink socket: %w", err)
		}
		defer route.Close()
		const loopback = 1
		for _, e := range []end{{rate: 1e6}, {delay: time.Millisecond, fault: true}, {cut: true, fault: true}} {
			for _, q := range e.queues(loopback, true) {
				switch err := route.QdiscReplace(q); {
				case errors.Is(err, unix.ENOENT):
					missing = append(missing, q.Type())
				case err != nil:
					return fmt.Errorf("making a %s queue: %w", q.Type(), err)
				}
			}
		}
		return nil
	})
	return missing, err
}
