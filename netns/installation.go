package netns

import (
	"slices"

	"github.com/google/nftables"
)

// Foreign is the installation whose sandboxes have links here, where that is
// another than ours. Only one table fits into a network namespace.
func (h *Host) Foreign() string { return h.foreign }

// Hold keeps what Recover finds of sandboxes that nobody named to it. Call it
// before.
func (h *Host) Hold() { h.held.Store(true) }

// belong plans the table for an installation, and returns the one that has
// links in it, if that is another.
func (t *table) belong(installation string, alive func(link string) bool) (foreign string, err error) {
	t.mu.Lock()
	sets, _, err := t.existing()
	t.mu.Unlock()
	if err != nil {
		return "", err
	}
	have := func(set string) (elems []nftables.SetElement) {
		if err == nil && slices.ContainsFunc(sets, func(s *nftables.Set) bool { return s.Name == set }) {
			elems, err = t.list(set)
		}
		return elems
	}
	owner := have(setOwner)
	// A link goes with the sandbox's namespace, whoever ended that.
	busy := slices.ContainsFunc(have(setSources), func(e nftables.SetElement) bool {
		name, _ := splitSource(e.Key)
		return alive(name)
	})
	if busy && len(owner) > 0 && owner[0].Comment != installation {
		foreign, installation = owner[0].Comment, owner[0].Comment
	}
	if installation != "" {
		i := slices.IndexFunc(t.plan.sets, func(s setPlan) bool { return s.name == setOwner })
		t.plan.sets[i].elements = []nftables.SetElement{{Key: make([]byte, 4), Comment: installation}}
	}
	return foreign, err
}

// beside keeps of the table what belongs to links that are wanted: nobody
// speaks for the others, which stay as they are.
func beside(want map[string]bool, have map[string]held, strangers map[string]bool) {
	for link := range have {
		if !want[link] {
			delete(have, link)
		}
	}
	for link := range strangers {
		if want[link] {
			delete(strangers, link)
		}
	}
}
