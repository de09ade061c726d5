package main

import (
	"net/netip"
	"testing"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestWorldsRecoverTogether(t *testing.T) {
	s := &sharedNetwork{}
	near, far := s.view(false, 0), s.view(true, 57000)
	a, b := sandbox.NewID(), sandbox.NewID()
	keep := func(id sandbox.ID) map[sandbox.ID]netns.Attachment {
		return map[sandbox.ID]netns.Attachment{id: {ID: id}}
	}
	done, all := s.tell(near, keep(a))
	if done == nil || all != nil {
		t.Fatalf("the first of two: %v, %v; it must wait", done, all)
	}
	again, all := s.tell(far, keep(b))
	if again != done || len(all) != 2 || all[a].ID != a || all[b].ID != b {
		t.Fatalf("the last of two: %v, want both", all)
	}
	late := s.view(true, 57000)
	if done, all := s.tell(late, nil); done != nil || all != nil {
		t.Errorf("one that came later: %v, %v; it has nothing to wait for", done, all)
	}

	alone := &sharedNetwork{}
	if done, all := alone.tell(alone.view(false, 0), keep(a)); done == nil || len(all) != 1 {
		t.Errorf("one world alone: %v, %v", done, all)
	}
}

func TestWorldsAreApartInTheNetwork(t *testing.T) {
	s := &sharedNetwork{}
	near, far := s.view(false, 0), s.view(true, 57000)
	a := netns.Attachment{ID: sandbox.NewID(), Slot: 3, Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Group: "team"}}
	if got := near.here(a); got.Slot != 3 || got.Policy.Group != "team" {
		t.Errorf("in the lab: %+v", got)
	}
	if got := far.here(a); got.Slot != 57003 || got.Policy.Group != "production.team" {
		t.Errorf("in production: %+v", got)
	}
	if err := near.CheckPolicy(sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Group: "production.team"}); sandbox.CodeOf(err) != "group_denied" {
		t.Errorf("a group of production's, in the lab: %v", err)
	}
	far.note(a.ID, true)
	if near.note("sbother", true); !s.inProduction(a.ID) || s.inProduction("sbother") {
		t.Error("production's sandboxes are not told from the lab's")
	}
	if far.note(a.ID, false); s.inProduction(a.ID) {
		t.Error("one that is gone is still known")
	}
}

func TestFirstSlot(t *testing.T) {
	for _, c := range []struct {
		name string
		pool string
		base uint32
		want int
	}{
		{"as built in", "10.213.0.0/16", 0x20000000, 57000},
		{"more addresses", "10.0.0.0/8", 0x20000000, 57000},
		{"fewer addresses", "10.213.0.0/20", 0x20000000, 4096 - 3 - 256},
		{"too few addresses", "10.213.0.0/24", 0x20000000, 256 - 3 - 256},
		{"higher ids", "10.213.0.0/16", 0x80000000, 32767 - 256},
	} {
		conf := builtinConfig()
		conf.Network.Pool, conf.UIDBase = netip.MustParsePrefix(c.pool), c.base
		got := conf.firstSlot()
		if got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
		if got < 0 {
			continue
		}
		// The last slot has an address, and ids below the two the kernel keeps.
		p := conf.production()
		if last := uint64(p.UIDBase) + uint64(p.Slots)<<16; last > 1<<32-2 {
			t.Errorf("%s: ids reach %#x", c.name, last)
		}
		if most := 1<<(32-conf.Network.Pool.Bits()) - 4; got+p.Slots-1 > most {
			t.Errorf("%s: the last slot is %d, addresses reach to %d", c.name, got+p.Slots-1, most)
		}
		few := conf
		few.Slots = 10
		if few.firstSlot() != got {
			t.Errorf("%s: another number of the lab's slots moves production's", c.name)
		}
	}
}
