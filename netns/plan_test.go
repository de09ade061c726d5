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

func TestPrivateRanges(t *testing.T) {
	got := privateRanges(prefix("44.1.0.0/16"), prefix("10.213.0.0/16"), prefix("9.9.9.77/24"))
	for i, p := range got {
		for _, q := range got[i+1:] {
			if p.Overlaps(q) {
				t.Errorf("%s and %s overlap", p, q)
			}
		}
	}
	in := func(addr string) bool {
		return slices.ContainsFunc(got, func(p netip.Prefix) bool { return p.Contains(netipAddr(addr)) })
	}
	for _, a := range []string{
		"0.0.0.1", "10.1.2.3", "44.1.0.9", "9.9.9.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "169.254.169.254", "172.16.0.1", "172.31.255.255",
		"192.0.0.8", "192.168.1.1", "198.18.0.1", "198.19.255.255", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
	} {
		if !in(a) {
			t.Errorf("%s is open", a)
		}
	}
	for _, a := range []string{"1.1.1.1", "8.8.8.8", "9.9.10.1", "44.2.0.1", "93.184.216.34", "100.63.255.255", "100.128.0.0", "172.15.0.1", "172.32.0.1", "192.0.1.1", "198.17.0.1", "198.20.0.0", "223.255.255.255"} {
		if in(a) {
			t.Errorf("%s is closed", a)
		}
	}
}

func TestPrivateElements(t *testing.T) {
	type mark struct {
		key string
		end bool
	}
	var got []mark
	for _, e := range privateElements([]netip.Prefix{prefix("10.0.0.0/8"), prefix("224.0.0.0/4"), prefix("240.0.0.0/4")}) {
		a, _ := netip.AddrFromSlice(e.Key)
		got = append(got, mark{a.String(), e.IntervalEnd})
	}
	want := []mark{
		{"0.0.0.0", true},
		{"10.0.0.0", false},
		{"11.0.0.0", true},
		{"224.0.0.0", false},
		{"240.0.0.0", true},
		{"240.0.0.0", false}, // to the end: nothing can mark it
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(mark{})); d != "" {
		t.Error(d)
	}
}

func TestEveryNameInThePlanExists(t *testing.T) {
	p := planTable(DefaultPool, nil)
	text := p.Text()
	for word := range strings.FieldsSeq(text) {
		name, isSet := strings.CutPrefix(word, "@")
		if isSet && !slices.ContainsFunc(p.sets, func(s setPlan) bool { return s.name == name }) {
			t.Errorf("no set %s", name)
		}
	}
	for _, c := range p.chains {
		last := c.rules[len(c.rules)-1].text
		if c.hook == nil && !strings.Contains(last, "drop") && !strings.Contains(last, "goto") {
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
	for line := range strings.Lines(planTable(DefaultPool, nil).Text()) {
		want.WriteString("//\t" + line)
	}
	if !strings.Contains(string(doc), want.String()) {
		t.Errorf("doc.go does not hold the rules as planned; they are:\n%s", want.String())
	}
}

func TestPlanRecovery(t *testing.T) {
	a := linkPlan{name: "vsbaaaaaaaaaaaa", addr: netipAddr("10.213.0.2"), open: true}
	b := linkPlan{name: "vsbbbbbbbbbbbbb", addr: netipAddr("10.213.0.3")}
	holding := func(links ...linkPlan) map[string][][]byte {
		have := map[string][][]byte{}
		for _, l := range links {
			for set, key := range l.elements() {
				have[set] = append(have[set], key)
			}
		}
		return have
	}
	count := func(m map[string][][]byte) (n int) {
		for _, keys := range m {
			n += len(keys)
		}
		return n
	}
	opened := b
	opened.open = true
	moved := a
	moved.addr = netipAddr("10.213.0.9")
	flows := holding(a)
	flows[setFlows] = [][]byte{linkKey(a.name), linkKey(b.name)}
	for _, c := range []struct {
		name        string
		want        []linkPlan
		have        map[string][][]byte
		add, remove int
	}{
		{"nothing at all", nil, nil, 0, 0},
		{"all missing", []linkPlan{a, b}, nil, 9, 0},
		{"all right", []linkPlan{a, b}, holding(a, b), 0, 0},
		{"one unknown", []linkPlan{b}, holding(a, b), 0, 5},
		{"closed meanwhile", []linkPlan{a, b}, holding(a, opened), 0, 1},
		{"another address", []linkPlan{moved}, holding(a), 1, 1},
		{"connections of the unknown", []linkPlan{a}, flows, 0, 1},
	} {
		got := planRecovery(c.want, c.have)
		if count(got.add) != c.add || count(got.remove) != c.remove {
			t.Errorf("%s: adds %d and removes %d, want %d and %d", c.name, count(got.add), count(got.remove), c.add, c.remove)
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
