package netns

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

func prefix(s string) netip.Prefix  { return netip.MustParsePrefix(s) }
func netipAddr(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestPoolAddress(t *testing.T) {
	for _, c := range []struct {
		pool string
		slot int
		want string
	}{
		{"10.213.0.0/16", 0, "10.213.0.2"},
		{"10.213.0.0/16", 254, "10.213.1.0"},
		{"10.213.0.0/16", 65532, "10.213.255.254"},
		{"10.213.0.0/16", 65533, ""},
		{"10.213.0.0/16", -1, ""},
		{"192.168.9.8/29", 4, "192.168.9.14"},
		{"192.168.9.8/29", 5, ""},
	} {
		got, err := poolAddress(prefix(c.pool), c.slot)
		if c.want == "" {
			if !errors.Is(sandbox.ClassOf(err), sandbox.ErrExhausted) {
				t.Errorf("slot %d of %s: %v, %v; want exhausted", c.slot, c.pool, got, err)
			}
			continue
		}
		if err != nil || got.String() != c.want {
			t.Errorf("slot %d of %s: %v, %v; want %s", c.slot, c.pool, got, err, c.want)
		}
	}
}

func TestCheckConfig(t *testing.T) {
	for _, c := range []struct {
		pool, deny, admit string
		ok                bool
	}{
		{"10.213.0.0/16", "8.8.8.0/24", "10.20.0.0/16", true},
		{"10.0.0.0/8", "8.8.8.0/24", "192.168.0.0/16", true},
		{"10.0.0.0/30", "8.8.8.0/24", "192.168.0.0/16", false},
		{"10.0.0.0/7", "8.8.8.0/24", "192.168.0.0/16", false},
		{"fd00::/64", "8.8.8.0/24", "192.168.0.0/16", false},
		{"10.213.0.0/16", "2001:db8::/32", "192.168.0.0/16", false},
		{"10.213.0.0/16", "8.8.8.0/24", "fd00::/8", false},
	} {
		err := checkConfig(Config{Pool: prefix(c.pool), Deny: []netip.Prefix{prefix(c.deny)}, Admit: []netip.Prefix{prefix(c.admit)}})
		if (err == nil) != c.ok || err != nil && !errors.Is(sandbox.ClassOf(err), sandbox.ErrInvalid) {
			t.Errorf("pool %s, deny %s, admit %s: %v, want ok %v", c.pool, c.deny, c.admit, err, c.ok)
		}
	}
}

func TestLinkNames(t *testing.T) {
	id := sandbox.NewID()
	name := linkName(id)
	if len(name) != 15 || !strings.HasPrefix(name, linkPrefix) {
		t.Errorf("link %q: want 15 bytes beginning with %s", name, linkPrefix)
	}
	if got, ok := linkID(name); !ok || got != id {
		t.Errorf("link %q names %q, %v", name, got, ok)
	}
	for _, other := range []string{"eth0", "vsb", "veth12345678901", "sb" + name[3:], name + "x"} {
		if _, ok := linkID(other); ok {
			t.Errorf("%q taken for a sandbox's link", other)
		}
	}
}

func TestRanges(t *testing.T) {
	plan := planTable(prefix("44.1.0.0/16"), []netip.Prefix{prefix("9.9.9.77/24"), prefix("10.9.0.0/16")}, []netip.Prefix{prefix("10.0.0.0/8"), prefix("44.1.0.0/24")})
	for _, ranges := range [][]addrRange{plan.private, plan.closed} {
		for i, p := range ranges[1:] {
			if p.first <= ranges[i].last+1 {
				t.Errorf("%s and %s overlap or touch", ranges[i], p)
			}
		}
	}
	for _, a := range []string{
		"0.0.0.1", "10.1.2.3", "44.1.0.9", "9.9.9.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "169.254.169.254", "172.16.0.1", "172.31.255.255",
		"192.0.0.8", "192.168.1.1", "198.18.0.1", "198.19.255.255", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
	} {
		if !anyContains(plan.private, netipAddr(a)) {
			t.Errorf("%s counts as public", a)
		}
		// Admitted, but neither what the operator denies nor the pool.
		if admitted := a == "10.1.2.3"; anyContains(plan.closed, netipAddr(a)) == admitted {
			t.Errorf("%s: closed %v", a, !admitted)
		}
	}
	if !anyContains(plan.closed, netipAddr("10.9.1.1")) {
		t.Error("what the operator denies is admitted")
	}
	for _, a := range []string{"1.1.1.1", "8.8.8.8", "9.9.10.1", "44.2.0.1", "93.184.216.34", "100.63.255.255", "100.128.0.0", "172.15.0.1", "172.32.0.1", "192.0.1.1", "198.17.0.1", "198.20.0.0", "223.255.255.255"} {
		if anyContains(plan.private, netipAddr(a)) || anyContains(plan.closed, netipAddr(a)) {
			t.Errorf("%s is closed", a)
		}
	}
}

func TestRangeElements(t *testing.T) {
	type mark struct {
		key string
		end bool
	}
	var got []mark
	for _, e := range rangeElements(merge(rangesOf([]netip.Prefix{prefix("10.0.0.0/8"), prefix("224.0.0.0/4"), prefix("240.0.0.0/4")}))) {
		a, _ := netip.AddrFromSlice(e.Key)
		got = append(got, mark{a.String(), e.IntervalEnd})
	}
	want := []mark{
		{"0.0.0.0", true},
		{"10.0.0.0", false},
		{"11.0.0.0", true},
		{"224.0.0.0", false}, // to the end: nothing can mark it
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(mark{})); d != "" {
		t.Error(d)
	}
}

func TestEveryNameInThePlanExists(t *testing.T) {
	p := planTable(DefaultPool, nil, nil)
	text := strings.ReplaceAll(p.Text(), "map @", "@")
	for word := range strings.FieldsSeq(text) {
		name, isSet := strings.CutPrefix(word, "@")
		if isSet && !slices.ContainsFunc(p.sets, func(s setPlan) bool { return s.name == name }) {
			t.Errorf("no set %s", name)
		}
	}
	for _, c := range p.chains {
		last := c.rules[len(c.rules)-1].text
		if c.hook == nil && !c.back && !strings.Contains(last, "drop") && !strings.Contains(last, "goto") && last != "accept" {
			t.Errorf("chain %s ends with %q: packets would fall through", c.name, last)
		}
	}
}

// TestDocumentation: the package documentation holds the plan, word for word.
func TestDocumentation(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for line := range strings.Lines(planTable(DefaultPool, nil, nil).Text()) {
		want.WriteString("//\t" + line)
	}
	if !strings.Contains(string(doc), want.String()) {
		t.Errorf("doc.go does not hold the rules as planned; they are:\n%s", want.String())
	}
}

func planned(t *testing.T, id, addr string, p sandbox.NetworkPolicy) linkPlan {
	t.Helper()
	l := linkPlan{id: sandbox.ID(id), name: "v" + id, addr: netipAddr(addr)}
	if err := l.planPolicy(p, "salt"); err != nil {
		t.Fatal(err)
	}
	if p.Group != "" {
		l.group = 7
	}
	return l
}

func TestPlanRecovery(t *testing.T) {
	a := planned(t, "sbaaaaaaaaaaaa", "10.213.0.2", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen})
	b := planned(t, "sbbbbbbbbbbbbb", "10.213.0.3", sandbox.NetworkPolicy{})
	opened := planned(t, string(b.id), "10.213.0.3", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen})
	moved := planned(t, string(a.id), "10.213.0.9", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen})
	with := func(allow string) linkPlan {
		p := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Group: "team", Allow: []string{allow, "*.example.com"}, Deny: []string{"9.9.9.9"}}
		p.Limits.Flows = 100
		return planned(t, "sbcccccccccccc", "10.213.0.4", p)
	}
	listed, other := with("8.8.8.8"), with("8.8.4.4")
	holding := func(links ...linkPlan) map[string]held {
		have := map[string]held{}
		for _, l := range links {
			have[l.name] = l.held()
		}
		return have
	}
	flows := holding(a)
	flows[a.name] = held{elements: append(flows[a.name].elements, element{set: setFlows, key: a.name}), generation: a.generation}
	flows[b.name] = held{elements: []element{{set: setFlows, key: b.name}}}
	torn := holding(listed)
	torn[listed.name] = held{elements: torn[listed.name].elements, generation: listed.generation}
	emptied := holding(listed)
	emptied[listed.name] = held{elements: emptied[listed.name].elements, chains: listed.held().chains}
	earlier := holding(listed) // of a version with sets of the link's own
	earlier[listed.name] = held{
		elements: listed.heldBesideLists().elements, generation: listed.generation,
		chains: append(listed.held().chains, listed.own("allow")), sets: []string{listed.own("allowed"), listed.own("pins")},
	}
	for _, c := range []struct {
		name        string
		want        []linkPlan
		have        map[string]held
		add, remove int
		made, gone  int // chains and sets of a link's own
	}{
		{"nothing at all", nil, nil, 0, 0, 0, 0},
		{"all missing", []linkPlan{a, b}, nil, 12, 0, 0, 0},
		{"all right", []linkPlan{a, b, listed}, holding(a, b, listed), 0, 0, 0, 0},
		{"one unknown", []linkPlan{b}, holding(a, b), 0, 8, 0, 0},
		{"closed meanwhile", []linkPlan{a, b}, holding(a, opened), 0, 4, 0, 0},
		{"another address", []linkPlan{moved}, holding(a), 1, 1, 0, 0},
		{"connections of the unknown", []linkPlan{a}, flows, 0, 1, 0, 0},
		{"lists missing", []linkPlan{listed}, nil, 19, 0, 1, 0},
		{"lists of the unknown", nil, holding(listed), 0, 19, 0, 1},
		{"another list", []linkPlan{other}, holding(listed), 11, 11, 1, 1},
		{"its chain gone", []linkPlan{listed}, torn, 0, 0, 1, 0},
		{"a chain emptied", []linkPlan{listed}, emptied, 1, 1, 1, 1},
		{"of an earlier version", []linkPlan{listed}, earlier, 8, 0, 0, 3},
	} {
		var got change
		for _, one := range planRecovery(c.want, c.have, linkPlan.held) {
			got.add, got.remove = append(got.add, one.add...), append(got.remove, one.remove...)
			got.makeChains = append(got.makeChains, one.makeChains...)
			got.dropChains, got.dropSets = append(got.dropChains, one.dropChains...), append(got.dropSets, one.dropSets...)
		}
		made, gone := len(got.makeChains), len(got.dropChains)+len(got.dropSets)
		if len(got.add) != c.add || len(got.remove) != c.remove || made != c.made || gone != c.gone {
			t.Errorf("%s: adds %d, removes %d, makes %d, drops %d; want %d, %d, %d, %d", c.name, len(got.add), len(got.remove), made, gone, c.add, c.remove, c.made, c.gone)
		}
	}
}

// TestChangeOfLists: old and new elements never meet in a set.
func TestChangeOfLists(t *testing.T) {
	with := func(allow ...string) linkPlan {
		return planned(t, "sbcccccccccccc", "10.213.0.4", sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: allow})
	}
	one, other := with("8.8.8.8", "0.0.0.0/1:80"), with("8.8.8.8", "0.0.0.0/1:80", "9.9.9.9")
	var c change
	c.diff(one.held(), other.held(), &other)
	if n := len(one.lists()); n == 0 || len(c.remove) != n+2 {
		t.Errorf("%d elements go, want the %d of the lists and two of the mark", len(c.remove), n)
	}
	var same change
	if same.diff(one.held(), one.held(), &one); !same.empty() {
		t.Errorf("from a policy to itself: %+v", same)
	}
}

// TestLists holds the elements of lists against the blocks they mean, by
// looking up as the kernel does: the last key that is not greater.
func TestLists(t *testing.T) {
	rules := []string{
		"8.8.8.8", "8.8.8.9:53/udp", "9.0.0.0/8:80,443,8000-8100/tcp", "9.1.0.0/16:1-65535/udp", "9.1.2.3/icmp", "255.255.255.255:65535", "255.255.255.254",
		"0.0.0.0/32:1", "10.0.0.0/24/tcp", "10.0.1.0/24/udp", "10.0.2.0/24:65535/tcp", "11.0.0.0/24/icmp",
	}
	l := planned(t, "sbcccccccccccc", "10.213.0.4", sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: rules})
	beside := planned(t, "sbcccccccccccd", "10.213.0.132", sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"0.0.0.0/0"}})
	all := slices.Concat(l.lists(), beside.lists())
	lookup := func(set, key string) (string, bool) {
		var last *element
		for i, e := range all {
			if e.set == set && e.key <= key && (last == nil || e.key > last.key || e.key == last.key && last.end) {
				last = &all[i]
			}
		}
		if last == nil || last.end {
			return "", false
		}
		return last.value, true
	}
	ports := []uint16{0, 1, 2, 53, 79, 80, 81, 443, 7999, 8000, 8050, 8100, 8101, 65534, 65535}
	hits := 0
	for _, addr := range []string{
		"0.0.0.0", "0.0.0.1", "8.8.8.7", "8.8.8.8", "8.8.8.9", "8.8.8.10", "9.0.0.0", "9.1.2.2", "9.1.2.3", "9.255.255.255", "10.0.0.0", "10.0.0.255", "10.0.1.0", "10.0.2.9",
		"10.0.3.0", "11.0.0.1", "12.0.0.0", "255.255.255.253", "255.255.255.254", "255.255.255.255",
	} {
		for _, proto := range []byte{0, 1, 6, 17, 47, 255} {
			for _, port := range ports {
				a := netipAddr(addr).As4()
				place, ok := lookup(placesOn(l.shelf()), l.prefix()+markBytes(listAllow)+string(a[:]))
				if ok {
					_, ok = lookup(portsOn(l.shelf()), l.prefix()+place+string(serviceKey(proto, port)))
				}
				_, want := ruleFor(l.allow, flow{netipAddr(addr), proto, port})
				if ok != want {
					t.Errorf("%s, protocol %d, port %d: in the list %v, by the rules %v", addr, proto, port, ok, want)
				}
				if ok {
					hits++
				}
			}
		}
	}
	if hits < 100 {
		t.Errorf("only %d flows were allowed", hits)
	}
	for i := 0; i < len(all); i += 2 {
		if all[i].end || !all[i+1].end || all[i].key >= all[i+1].key {
			t.Errorf("no interval: %+v", all[i:i+2])
		}
	}
}

// TestCutClasses: no two of them overlap, and each name's tails mean its ports.
func TestCutClasses(t *testing.T) {
	l := planned(t, "sbcccccccccccc", "10.213.0.4", sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{
		"a.example:1-30000", "b.example:1000-2000,8000-9000/tcp", "c.example:1500-8500,60000-65535/tcp",
	}})
	meant := func(name string, proto byte, port uint16) bool {
		n := 0
		for _, tail := range l.pins.tails(l.allow, name) {
			c := l.pins.classes[tail.port-1]
			if tail.proto != pinClass {
				t.Fatalf("%s: not a range: %+v", name, tail)
			}
			if c.proto == proto && c.ports.First <= port && port <= c.ports.Last {
				n++
			}
		}
		if n > 1 {
			t.Errorf("%s, protocol %d, port %d: in %d ranges", name, proto, port, n)
		}
		return n > 0
	}
	for _, r := range l.allow {
		for _, port := range []uint16{1, 999, 1000, 1499, 1500, 2000, 2001, 7999, 8000, 8500, 8501, 9000, 9001, 30000, 30001, 59999, 60000, 65535} {
			for _, proto := range []string{"tcp", "udp"} {
				if got, want := meant(r.Domain, protocolNumber(proto), port), r.MatchesPort(proto, port); got != want {
					t.Errorf("%s, %s port %d: %v, want %v", r, proto, port, got, want)
				}
			}
		}
	}
}

func FuzzAttribute(f *testing.F) {
	f.Add([]byte{8, 0, 1, 0, 1, 2, 3, 4})
	f.Fuzz(func(_ *testing.T, b []byte) {
		attribute(b, 1)
		attribute(b, 3, 1, 7)
	})
}
