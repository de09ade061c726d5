//go:build root

package netns

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// snapshot is all that Host keeps in the kernel, as lines.
func snapshot(t testing.TB, h *Host) []string {
	t.Helper()
	var out []string
	for _, s := range h.table.plan.sets {
		keys, err := h.table.keys(s.name)
		must(t, err)
		for _, k := range keys {
			out = append(out, fmt.Sprintf("%s %q", s.name, k))
		}
	}
	for _, c := range h.table.plan.chains {
		for _, handle := range ruleHandles(t, c.name) {
			out = append(out, fmt.Sprintf("rule %s %x", c.name, handle))
		}
	}
	h.table.mu.Lock()
	sets, chains, err := h.table.existing()
	h.table.mu.Unlock()
	must(t, err)
	for _, s := range sets {
		out = append(out, "set "+s.Name)
	}
	for _, c := range chains {
		out = append(out, "chain "+c.Name)
		if _, owned := ownedBy(c.Name); owned {
			for _, handle := range ruleHandles(t, c.Name) {
				out = append(out, fmt.Sprintf("rule %s %x", c.Name, handle))
			}
		}
	}
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		flags := l.Attrs().Flags &^ net.FlagRunning // the kernel sets it when it finds the time
		out = append(out, fmt.Sprintf("link %s %d %s", l.Attrs().Name, l.Attrs().Index, flags))
	}
	routes, err := netlink.RouteList(nil, unix.AF_INET)
	must(t, err)
	for _, r := range routes {
		out = append(out, "route "+r.String())
	}
	slices.Sort(out)
	return out
}

// ruleHandles returns the handles of a chain's rules. (The library cannot read
// what it writes of a flow's first direction.)
func ruleHandles(t testing.TB, chain string) [][]byte {
	t.Helper()
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_INET, Version: unix.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(tableName)))
	req.AddData(nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(chain)))
	msgs, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	must(t, err)
	var out [][]byte
	for _, m := range msgs {
		if h, ok := attribute(m[nl.SizeofNfgenmsg:], unix.NFTA_RULE_HANDLE); ok {
			out = append(out, h)
		}
	}
	return out
}

// quiet leaves out what the kernel itself forgets when it finds the time.
func quiet(lines []string) []string {
	return slices.DeleteFunc(lines, func(s string) bool { return strings.HasPrefix(s, setFlows+" ") })
}

// leftovers lists what single sandboxes have in the sets and as links.
func leftovers(t testing.TB, h *Host) []string {
	t.Helper()
	return slices.DeleteFunc(snapshot(t, h), func(s string) bool {
		return strings.HasPrefix(s, "rule ") || !strings.Contains(s, linkPrefix)
	})
}

func TestAttachIsIdempotent(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 20, sandbox.NetworkOpen)
	attach(t, h, b)
	before := snapshot(t, h)
	attach(t, h, b)
	if d := cmp.Diff(before, snapshot(t, h)); d != "" {
		t.Errorf("the second Attach changed:\n%s", d)
	}
	// Half made: the inner side lost its route and address.
	must(t, linux.InNetNS(b.NetNS, func() error {
		l, err := netlink.LinkByName(guestLink)
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(l)
	}))
	denied(t, b, "tcp4", publicAddr+":80")
	attach(t, h, b)
	reaches(t, b, "tcp4", publicAddr+":80")
}

func TestManyComeAndGo(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 50 {
				slot := w*50 + i
				mode := sandbox.NetworkOpen
				if i%5 == 0 {
					mode = sandbox.NetworkOff
				}
				b := newBox(t, slot, mode)
				if err := h.Attach(t.Context(), b.Attachment); err != nil {
					t.Errorf("attaching %d: %v", slot, err)
				}
				b.kill()
				if err := h.Detach(t.Context(), b.ID, slot); err != nil {
					t.Errorf("detaching %d: %v", slot, err)
				}
			}
		})
	}
	wg.Wait()
	eventually(t, "no link, element or route of 200 sandboxes left", func() bool { return len(leftovers(t, h)) == 0 })
}

func TestDetach(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	never := sandbox.NewID()
	must(t, h.Detach(t.Context(), never, 30))

	b := newBox(t, 30, sandbox.NetworkOpen)
	attach(t, h, b)
	reaches(t, b, "tcp4", publicAddr+":80")
	must(t, h.Detach(t.Context(), b.ID, b.Slot))
	denied(t, b, "tcp4", publicAddr+":80")
	must(t, h.Detach(t.Context(), b.ID, b.Slot))
	if _, known, err := h.Counters(b.ID, b.Slot); known || err != nil {
		t.Errorf("counters after Detach: known %v, %v", known, err)
	}
	// Somebody keeps the namespace alive: the link must go nevertheless.
	eventually(t, "the link deleted in the background", func() bool { return len(leftovers(t, h)) == 0 })
}

// TestOrphanedSocketsDoNotKeepTheNamespace: a killed process leaves a TCP
// connection whose end is never acknowledged, as Detach cut it. The namespace
// must end soon by itself: the background deletion is off here. Without the
// resets it takes the kernel's orphan time-out, more than a minute.
func TestOrphanedSocketsDoNotKeepTheNamespace(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 34, sandbox.NetworkOpen)
	attach(t, h, b)
	var c net.Conn
	must(t, linux.InNetNS(b.NetNS, func() (err error) {
		c, err = net.Dial("tcp4", publicAddr+":80")
		return err
	}))
	_, err := c.Read(make([]byte, 100)) // or what is unread would reset it
	must(t, err)
	h.reap.stop()
	must(t, h.Detach(t.Context(), b.ID, b.Slot))
	must(t, c.Close())
	b.kill()
	eventually(t, "the link gone with its namespace", func() bool {
		ids, err := h.Links()
		must(t, err)
		return len(ids) == 0
	})
	h.reap, err = startReaper(h)
	must(t, err)
}

// TestSameSandboxAgain: a stopped sandbox starts in a new namespace while the
// link of the old one is still there.
func TestSameSandboxAgain(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	old := newBox(t, 31, sandbox.NetworkOpen)
	attach(t, h, old)
	must(t, h.Detach(t.Context(), old.ID, old.Slot))
	b := newBox(t, 31, sandbox.NetworkOpen)
	b.ID = old.ID
	attach(t, h, b)
	reaches(t, b, "tcp4", publicAddr+":80")
	index := linkIndex(t, linkName(b.ID))
	eventually(t, "the old link forgotten", func() bool {
		h.reap.mu.Lock()
		defer h.reap.mu.Unlock()
		return len(h.reap.graves) == 0
	})
	if now := linkIndex(t, linkName(b.ID)); now != index {
		t.Errorf("the new link %d was replaced by %d", index, now)
	}
	reaches(t, b, "tcp4", publicAddr+":80")
}

// TestAddressIsCleanForTheNextUser: tracked connections of one user of an
// address must not let packets in to the next.
func TestAddressIsCleanForTheNextUser(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	first := newBox(t, 32, sandbox.NetworkOpen)
	addr := attach(t, h, first)
	reaches(t, first, "udp4", publicAddr+":99")
	tracked := func() int {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		must(t, err)
		n := 0
		for _, f := range flows {
			if f.Forward.SrcIP.Equal(addr.AsSlice()) {
				n++
			}
		}
		return n
	}
	if tracked() == 0 {
		t.Fatal("control: the connection is not tracked")
	}
	must(t, h.Detach(t.Context(), first.ID, first.Slot))
	next := newBox(t, 32, sandbox.NetworkOpen)
	attach(t, h, next)
	if n := tracked(); n != 0 {
		t.Errorf("%d tracked connections of the first user left", n)
	}
}

func TestCountersAddUp(t *testing.T) {
	newWorld(t)
	h, err := Open(t.Context(), Config{})
	must(t, err)
	b := newBox(t, 33, sandbox.NetworkOpen)
	attach(t, h, b)
	const packets, size = 20, 1000
	echo := func() {
		var c net.Conn
		must(t, linux.InNetNS(b.NetNS, func() (err error) {
			c, err = net.Dial("udp4", publicAddr+":99")
			return err
		}))
		defer c.Close()
		for range packets {
			_, err := c.Write(make([]byte, size))
			must(t, err)
			must(t, c.SetReadDeadline(time.Now().Add(5*time.Second)))
			_, err = c.Read(make([]byte, size))
			must(t, err)
		}
	}
	check := func(when string, rounds uint64, wantDropped uint64) {
		t.Helper()
		want := sandbox.NetCounters{RxBytes: rounds * packets * (size + 28), RxPackets: rounds * packets, Dropped: wantDropped} // with IP and UDP headers
		want.TxBytes, want.TxPackets = want.RxBytes, want.RxPackets
		if got, known, err := h.Counters(b.ID, b.Slot); err != nil || !known || got != want {
			t.Errorf("%s: %+v, known %v, %v; want %+v", when, got, known, err, want)
		}
		if all, err := h.AllBytes(); err != nil || len(all) != 1 || all[b.ID] != (sandbox.NetCounters{RxBytes: want.RxBytes, TxBytes: want.TxBytes}) {
			t.Errorf("%s: of all %+v, %v; want %+v", when, all, err, want)
		}
	}
	check("at first", 0, 0)
	echo()
	check("after one round", 1, 0)
	_, _ = dial(b.NetNS, "udp4", privateAddr+":99", permittedWait)
	// The rejection itself comes from the host and is received: read anew.
	before, _, err := h.Counters(b.ID, b.Slot)
	must(t, err)
	if before.Dropped != 1 {
		t.Errorf("dropped %d after one denied packet", before.Dropped)
	}
	// A daemon's restart keeps them.
	must(t, h.Close())
	h = openHost(t, Config{})
	must(t, h.Recover(t.Context(), map[sandbox.ID]Attachment{b.ID: b.Attachment}))
	after, known, err := h.Counters(b.ID, b.Slot)
	if err != nil || !known || after != before {
		t.Errorf("after a restart: %+v (was %+v) known %v, %v", after, before, known, err)
	}
	echo()
	before.RxBytes, before.TxBytes = before.RxBytes+packets*(size+28), before.TxBytes+packets*(size+28)
	before.RxPackets, before.TxPackets = before.RxPackets+packets, before.TxPackets+packets
	if got, _, err := h.Counters(b.ID, b.Slot); err != nil || got != before {
		t.Errorf("after a restart and a round: %+v, want %+v, %v", got, before, err)
	}
}

func TestRecover(t *testing.T) {
	newWorld(t)
	h, err := Open(t.Context(), Config{})
	must(t, err)
	kept, off, lost := newBox(t, 40, sandbox.NetworkOpen), newBox(t, 41, sandbox.NetworkOff), newBox(t, 42, sandbox.NetworkOpen)
	for _, b := range []*box{kept, off, lost} {
		attach(t, h, b)
	}
	must(t, h.Close())
	reaches(t, kept, "tcp4", publicAddr+":80") // without a daemon

	h = openHost(t, Config{})
	reaches(t, kept, "tcp4", publicAddr+":80") // before Recover
	keep := map[sandbox.ID]Attachment{kept.ID: kept.Attachment, off.ID: off.Attachment}
	must(t, h.Recover(t.Context(), keep))
	reaches(t, kept, "tcp4", publicAddr+":80")
	denied(t, lost, "tcp4", publicAddr+":80")
	for _, s := range leftovers(t, h) {
		if strings.Contains(s, string(lost.ID)) {
			t.Errorf("left of the lost sandbox: %s", s)
		}
	}
	before := quiet(snapshot(t, h))
	must(t, h.Recover(t.Context(), keep))
	if d := cmp.Diff(before, quiet(snapshot(t, h))); d != "" {
		t.Errorf("the second Recover changed:\n%s", d)
	}
	// Damage: the kept one's elements and link are gone.
	must(t, h.deleteLink(linkName(kept.ID)))
	must(t, h.table.apply(change{remove: []element{{set: setOpen, key: string(linkKey(linkName(kept.ID)))}}}))
	denied(t, kept, "tcp4", publicAddr+":80")
	must(t, h.Recover(t.Context(), keep))
	reaches(t, kept, "tcp4", publicAddr+":80")
}

// TestFlushedRulesComeBack: somebody runs `nft flush ruleset`.
func TestFlushedRulesComeBack(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	a, b := newBox(t, 43, sandbox.NetworkOpen), newBox(t, 44, sandbox.NetworkOpen)
	attach(t, h, a)
	flush(t, h, h.table.conn.FlushRuleset)
	attach(t, h, b) // a change finds out at once
	reaches(t, a, "tcp4", publicAddr+":80")
	reaches(t, b, "tcp4", publicAddr+":80")
	denied(t, a, "tcp4", metadataAddr+":80")
	flush(t, h, h.table.conn.FlushRuleset)
	eventually(t, "the table made again without any change", func() bool {
		ok, err := h.table.present()
		must(t, err)
		return ok
	})
	eventually(t, "the sandbox connected again", func() bool {
		_, err := dial(a.NetNS, "tcp4", publicAddr+":80", deniedWait)
		return err == nil
	})
	denied(t, a, "tcp4", metadataAddr+":80")
}

func TestTooManyConnections(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 45, sandbox.NetworkOpen)
	addr := attach(t, h, b)
	dst := netipAddr(publicAddr)
	p := packet(addr, dst, 99, "?")
	var fd int
	must(t, linux.InNetNS(b.NetNS, func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	}))
	defer unix.Close(fd)
	// A burst may lose packets on its way; what was lost is sent again.
	eventually(t, "connections over the bound refused", func() bool {
		for port := range flowsPerSandbox + 200 {
			p[20], p[21] = byte((port+1024)>>8), byte(port+1024)
			must(t, unix.Sendto(fd, p, 0, &unix.SockaddrInet4{Addr: dst.As4()}))
		}
		c, _, err := h.Counters(b.ID, b.Slot)
		must(t, err)
		return c.Dropped >= 50
	})
	denied(t, b, "udp4", publicAddr+":99")
	other := newBox(t, 46, sandbox.NetworkOpen)
	attach(t, h, other)
	reaches(t, other, "udp4", publicAddr+":99") // control: the bound is each sandbox's own
}

// TestDetachAfterAnotherPool: the slot means nothing in the pool of today.
func TestDetachAfterAnotherPool(t *testing.T) {
	newWorld(t)
	h, err := Open(t.Context(), Config{})
	must(t, err)
	b := newBox(t, 3000, sandbox.NetworkOpen)
	attach(t, h, b)
	must(t, h.Close())
	must(t, h.Close())
	h = openHost(t, Config{Pool: prefix("10.214.0.0/24")})
	if err := h.Recover(t.Context(), map[sandbox.ID]Attachment{b.ID: b.Attachment}); errors.Is(sandbox.ClassOf(err), sandbox.ErrExhausted) && errors.As(err, new(PartlyError)) {
		t.Log(err)
	} else {
		t.Errorf("recovering a sandbox outside the pool: %v, want exhausted, of a part", err)
	}
	denied(t, b, "tcp4", publicAddr+":80")
	must(t, h.Detach(t.Context(), b.ID, b.Slot))
	b.kill()
	eventually(t, "nothing left of it", func() bool { return len(leftovers(t, h)) == 0 })
}

func TestDenyFurtherRanges(t *testing.T) {
	newWorld(t)
	h, err := Open(t.Context(), Config{Deny: []netip.Prefix{prefix(publicAddr + "/24")}})
	must(t, err)
	b := newBox(t, 47, sandbox.NetworkOpen)
	attach(t, h, b)
	denied(t, b, "tcp4", publicAddr+":80")
	must(t, h.Close())
	openHost(t, Config{})
	reaches(t, b, "tcp4", publicAddr+":80") // control: configured away
}

func TestPoolMustNotShadowTheHost(t *testing.T) {
	newWorld(t)
	addAddr(t, uplink, "10.213.4.1/24")
	_, err := Open(t.Context(), Config{})
	if !errors.Is(sandbox.ClassOf(err), sandbox.ErrConflict) {
		t.Errorf("overlapping pool: %v, want a conflict", err)
	}
	openHost(t, Config{Pool: prefix("10.214.0.0/16")}) // control
}

// TestAddressIsCleanAfterARestart: what a daemon that ended had still to
// forget, the next one forgets.
func TestAddressIsCleanAfterARestart(t *testing.T) {
	newWorld(t)
	h, err := Open(t.Context(), Config{})
	must(t, err)
	first := newBox(t, 132, sandbox.NetworkOpen)
	stays := newBox(t, 133, sandbox.NetworkOpen)
	addr, kept := attach(t, h, first), attach(t, h, stays)
	reaches(t, first, "udp4", publicAddr+":99")
	reaches(t, stays, "udp4", publicAddr+":99")
	tracked := func(of netip.Addr) int {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		must(t, err)
		n := 0
		for _, f := range flows {
			if f.Forward.SrcIP.Equal(of.AsSlice()) {
				n++
			}
		}
		return n
	}
	must(t, h.Detach(t.Context(), first.ID, first.Slot))
	must(t, h.Close())
	if tracked(addr) == 0 {
		t.Fatal("control: the connection is not tracked any more")
	}
	h = openHost(t, Config{})
	must(t, h.Recover(t.Context(), map[sandbox.ID]Attachment{stays.ID: stays.Attachment}))
	next := newBox(t, 132, sandbox.NetworkOpen)
	attach(t, h, next)
	if n := tracked(addr); n != 0 {
		t.Errorf("%d tracked connections of the first user left", n)
	}
	if tracked(kept) == 0 {
		t.Error("control: the connections of a sandbox that lives are gone")
	}
}

// TestChangedTableIsMended: somebody empties the chains (`nft flush table inet
// sandboxd`) or lets a sandbox out by hand.
func TestChangedTableIsMended(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	a := policyBox(t, h, 134, opened(internetAddr))
	b := policyBox(t, h, 138, allowing(publicAddr))
	shelfOf := func(b *box) int {
		l, _ := h.lookup(b.ID)
		return l.shelf()
	}
	guarded := func() {
		t.Helper()
		eventually(t, "the denied range denied", func() bool {
			_, err := dial(a.NetNS, "tcp4", internetAddr+":80", deniedWait)
			return err != nil
		})
		eventually(t, "what is not allowed denied", func() bool {
			_, err := dial(b.NetNS, "tcp4", internetAddr+":80", deniedWait)
			return err != nil
		})
		reaches(t, a, "tcp4", publicAddr+":80")
		reaches(t, b, "tcp4", publicAddr+":80")
	}
	guarded()
	for _, change := range []string{
		"flush table inet " + tableName,
		"flush set inet " + tableName + " " + portsOn(shelfOf(a)),
		"flush map inet " + tableName + " " + placesOn(shelfOf(b)),
		"delete element inet " + tableName + " " + setShelves + " { \"" + linkName(a.ID) + "\" }",
		"add element inet " + tableName + " open { \"" + linkName(b.ID) + "\" }",
	} {
		if out, err := exec.Command("nft", change).CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v: %s", change, err, out)
		}
		if ok, err := h.table.untouched(); ok || err != nil {
			t.Errorf("nft %s was not noticed: %v", change, err)
		}
		eventually(t, "nft "+change+" mended", func() bool {
			ok, err := h.table.untouched()
			must(t, err)
			return ok
		})
		guarded()
	}
}

// TestOwnChangesAreNoDisagreement: what the daemon does itself never makes it
// look at the whole table, and what it finds there is what it should.
func TestOwnChangesAreNoDisagreement(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	d := dice{rand.New(rand.NewPCG(7, 11)), []string{publicAddr, internetAddr, "9.9.9.9"}}
	policy := func() sandbox.NetworkPolicy {
		p := d.policy()
		if p.Connected() {
			p.Allow = append(p.Allow, d.pick("*.example.com", "www.example.com:80", "example.org:1-5000"))
			p.Limits.Flows = uint32(d.IntN(2) * 100)
		}
		return p
	}
	boxes := make([]*box, 4)
	agrees := func(what string) {
		t.Helper()
		h.order.Lock()
		defer h.order.Unlock()
		ok, err := h.agrees()
		must(t, err)
		if present, err := h.table.present(); !ok || !present || err != nil {
			t.Fatalf("after %s: elements agree: %t, chains present: %t, %v", what, ok, present, err)
		}
		changes, err := h.table.changes()
		must(t, err)
		h.table.whole(changes)
	}
	for i := range boxes {
		boxes[i] = policyBox(t, h, 140+i, policy())
		agrees("Attach")
	}
	for range 30 {
		b := boxes[d.IntN(len(boxes))]
		b.become(t, h, policy())
		if b.Policy.Connected() {
			_, _ = dial(b.NetNS, "udp4", publicAddr+":99", 10*time.Millisecond)
		}
		pin(t, h, b, "www.example.com", publicAddr)
		if ok, err := h.table.untouched(); !ok || err != nil {
			t.Fatalf("a change of our own taken for another's: %v", err)
		}
		agrees(fmt.Sprintf("SetPolicy %+v", b.Policy))
	}
	for _, b := range boxes {
		must(t, h.Detach(t.Context(), b.ID, b.Slot))
		agrees("Detach")
	}
}

// TestCountersSurviveAFlush: they never go back.
func TestCountersSurviveAFlush(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 135, sandbox.NetworkOpen)
	attach(t, h, b)
	reaches(t, b, "tcp4", publicAddr+":80")
	before, _, err := h.Counters(b.ID, b.Slot)
	must(t, err)
	for range 2 {
		flush(t, h, h.table.conn.FlushRuleset)
		check := func() {
			t.Helper()
			after, known, err := h.Counters(b.ID, b.Slot)
			must(t, err)
			if !known || after.RxBytes < before.RxBytes || after.TxBytes < before.TxBytes {
				t.Fatalf("counters went back: %+v after %+v (known: %t)", after, before, known)
			}
			before = after
		}
		eventually(t, "the table again", func() bool {
			check()
			ok, err := h.table.untouched()
			must(t, err)
			return ok
		})
		was := before
		reaches(t, b, "tcp4", publicAddr+":80")
		if check(); before.TxBytes <= was.TxBytes {
			t.Errorf("nothing was counted since: %+v", before)
		}
	}
}

// TestForwardingComesBack: somebody switches ip_forward on and off again, which
// takes it from every interface.
func TestForwardingComesBack(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 136, sandbox.NetworkOpen)
	attach(t, h, b)
	reaches(t, b, "tcp4", publicAddr+":80")
	must(t, writeSysctl("net/ipv4/ip_forward", "1"))
	must(t, writeSysctl("net/ipv4/ip_forward", "0"))
	if forwarding(linkName(b.ID)) {
		t.Fatal("control: the sandbox's link still forwards")
	}
	eventually(t, "the sandbox connected again", func() bool {
		_, err := dial(b.NetNS, "tcp4", publicAddr+":80", deniedWait)
		return err == nil
	})
}

// TestOffKeepsWhatTheHostBegan: who reaches into a sandbox needs no policy of
// it, so a change of the policy breaks none of that.
func TestOffKeepsWhatTheHostBegan(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 145, sandbox.NetworkOpen)
	addr := attach(t, h, b)
	l := listenIn(t, b.NetNS, "tcp4", addr.String()+":8080")
	theirs := make(chan net.Conn, 1)
	go func() {
		if c, err := l.Accept(); err == nil {
			theirs <- c
		}
	}()
	c, err := net.DialTimeout("tcp4", addr.String()+":8080", 5*time.Second)
	must(t, err)
	defer c.Close()
	s := <-theirs
	defer s.Close()
	b.become(t, h, sandbox.NetworkPolicy{})
	eventually(t, "the reaper done", func() bool {
		h.reap.mu.Lock()
		defer h.reap.mu.Unlock()
		return len(h.reap.stale) == 0
	})
	must(t, c.SetReadDeadline(time.Now().Add(2*time.Second)))
	if _, err := s.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Errorf("a connection into the sandbox broke: %v", err)
	}
}

// TestOpenOverAnEarlierLayout: where lists were in chains and sets of each
// link's own, nobody gets past them before Recover has made them anew.
func TestOpenOverAnEarlierLayout(t *testing.T) {
	newWorld(t)
	id := sandbox.NewID()
	link := linkName(id)
	layout := fmt.Sprintf(`table inet %[1]s {
		map denied { type ifname : verdict; }
		set open { type ifname; elements = { %[2]s } }
		chain prohibited { drop; }
		set denied-%[2]s-00000001 { type ipv4_addr . inet_proto . inet_service; flags interval; }
		chain deny-%[2]s-00000001 { ip daddr . meta l4proto . th dport @denied-%[2]s-00000001 goto prohibited; }
		chain outbound { iifname vmap @denied; }
		chain forward { type filter hook forward priority -10; iifname "vsb*" goto outbound; }
		chain passed { type filter hook forward priority -9; iifname @open counter; }
	}
	add element inet %[1]s denied { %[2]s : goto deny-%[2]s-00000001 }`, tableName, link)
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(layout)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	h := openHost(t, Config{})
	if keys, err := h.table.keys(setOpen); err != nil || len(keys) > 0 {
		t.Errorf("links open without their lists: %q, %v", keys, err)
	}
	p := opened(internetAddr)
	b := newBox(t, 139, p.Mode)
	b.ID, b.Policy = id, p
	must(t, h.Recover(t.Context(), map[sandbox.ID]Attachment{id: b.Attachment}))
	denied(t, b, "tcp4", internetAddr+":80")
	reaches(t, b, "tcp4", publicAddr+":80")
	have, err := h.table.read(false)
	must(t, err)
	if l := have[link]; len(l.chains)+len(l.sets) > 0 {
		t.Errorf("left of the earlier layout: %q, %q", l.chains, l.sets)
	}
}
