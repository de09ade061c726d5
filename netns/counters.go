package netns

import (
	"slices"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Counters returns a sandbox's absolute counters since its Attach. They
// survive the link, until Detach, and a daemon's restart. Where somebody
// removed the table they go on from what was last told. known is false when
// the sandbox has no counters.
func (h *Host) Counters(id sandbox.ID, slot int) (c sandbox.NetCounters, known bool, err error) {
	_ = slot // the link's name is enough
	for {
		before := h.lostCounters(id)
		c, known, err := h.readCounters(id)
		if err != nil {
			return sandbox.NetCounters{}, false, err
		}
		h.mu.Lock()
		if h.lost[id] != before { // the table was made again meanwhile
			h.mu.Unlock()
			continue
		}
		if _, attached := h.known[id]; !known && attached { // it is about to be
			c, known = h.seen[id]
		} else if known {
			c = sum(c, before)
			if attached {
				h.seen[id] = c
			}
		}
		h.mu.Unlock()
		return c, known, nil
	}
}

// readCounters reads what the kernel counted.
func (h *Host) readCounters(id sandbox.ID) (c sandbox.NetCounters, known bool, err error) {
	key := linkKey(linkName(id))
	if c.RxPackets, c.RxBytes, known, err = h.table.count(setReceived, key); err != nil || !known {
		return sandbox.NetCounters{}, false, err
	}
	if c.TxPackets, c.TxBytes, _, err = h.table.count(setSent, key); err != nil {
		return sandbox.NetCounters{}, false, err
	}
	if c.Dropped, _, _, err = h.table.count(setDropped, key); err != nil {
		return sandbox.NetCounters{}, false, err
	}
	return c, true, nil
}

func (h *Host) lostCounters(id sandbox.ID) sandbox.NetCounters {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lost[id]
}

// keepCounters notes what was counted by elements that are gone: those made in
// their place begin with nothing.
func (h *Host) keepCounters(have map[string]held) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, l := range h.known {
		c, before := h.lost[id], h.lost[id]
		key, told := string(linkKey(l.name)), h.seen[id]
		for set, keep := range map[string]func(){
			setReceived: func() { c.RxBytes, c.RxPackets = told.RxBytes, told.RxPackets },
			setSent:     func() { c.TxBytes, c.TxPackets = told.TxBytes, told.TxPackets },
			setDropped:  func() { c.Dropped = told.Dropped },
		} {
			if !slices.Contains(have[l.name].elements, element{set: set, key: key}) {
				keep()
			}
		}
		if c != before {
			h.lost[id] = c
		}
	}
}

func (h *Host) forgetCounters(id sandbox.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.seen, id)
	delete(h.lost, id)
}

func sum(a, b sandbox.NetCounters) sandbox.NetCounters {
	return sandbox.NetCounters{
		RxBytes: a.RxBytes + b.RxBytes, RxPackets: a.RxPackets + b.RxPackets,
		TxBytes: a.TxBytes + b.TxBytes, TxPackets: a.TxPackets + b.TxPackets,
		Dropped: a.Dropped + b.Dropped,
	}
}

// AllBytes returns the bytes each attached sandbox received and sent, as
// Counters does, with two questions to the kernel for all of them together.
// One whose counters are just being made again may be missing.
func (h *Host) AllBytes() (map[sandbox.ID]sandbox.NetCounters, error) {
	before := map[sandbox.ID]sandbox.NetCounters{}
	h.mu.Lock()
	for id := range h.known {
		before[id] = h.lost[id]
	}
	h.mu.Unlock()
	received, err := h.table.bytesOf(setReceived)
	if err != nil {
		return nil, err
	}
	sent, err := h.table.bytesOf(setSent)
	if err != nil {
		return nil, err
	}
	out := map[sandbox.ID]sandbox.NetCounters{}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, lost := range before {
		name := linkName(id)
		rx, known := received[name]
		if _, attached := h.known[id]; known && attached && h.lost[id] == lost {
			out[id] = sandbox.NetCounters{RxBytes: rx + lost.RxBytes, TxBytes: sent[name] + lost.TxBytes}
		}
	}
	return out, nil
}
