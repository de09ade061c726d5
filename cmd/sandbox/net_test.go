package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

// policyOf lays flags over a policy.
func policyOf(t *testing.T, base sandbox.NetworkPolicy, stdin string, args ...string) (sandbox.NetworkPolicy, error) {
	t.Helper()
	var nf netFlags
	var got sandbox.NetworkPolicy
	cmd := &cobra.Command{Use: "x", SilenceErrors: true, SilenceUsage: true, RunE: func(*cobra.Command, []string) (err error) {
		got, err = nf.over(base, strings.NewReader(stdin))
		return err
	}}
	nf.add(cmd)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return got, err
}

func TestNetFlags(t *testing.T) {
	for name, c := range map[string]struct {
		args  []string
		stdin string
		want  sandbox.NetworkPolicy
		bad   string // a part of the error
	}{
		"none":              {},
		"mode":              {args: []string{"--net", "open"}, want: sandbox.NetworkPolicy{Mode: "open"}},
		"allow implies":     {args: []string{"--allow", "example.com:443"}, want: sandbox.NetworkPolicy{Mode: "allow", Allow: []string{"example.com:443"}}},
		"open and allow":    {args: []string{"--net", "open", "--allow", "10.1.0.0/16"}, want: sandbox.NetworkPolicy{Mode: "open", Allow: []string{"10.1.0.0/16"}}},
		"ports stay whole":  {args: []string{"--allow", "1.2.3.4:80,443/tcp"}, want: sandbox.NetworkPolicy{Mode: "allow", Allow: []string{"1.2.3.4:80,443/tcp"}}},
		"group implies":     {args: []string{"--net-group", "ring"}, want: sandbox.NetworkPolicy{Mode: "allow", Group: "ring"}},
		"off with allow":    {args: []string{"--net", "off", "--allow", "example.com"}, bad: "needs mode allow"},
		"no such mode":      {args: []string{"--net", "wide"}, bad: "use off, allow or open"},
		"deny alone":        {args: []string{"--net", "open", "--deny", "*.example.com"}, want: sandbox.NetworkPolicy{Mode: "open", Deny: []string{"*.example.com"}}},
		"bad rule":          {args: []string{"--allow", "example.com:0"}, bad: "is not a port"},
		"dns":               {args: []string{"--net", "open", "--dns", "9.9.9.9"}, want: sandbox.NetworkPolicy{Mode: "open", DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")}}},
		"bad dns":           {args: []string{"--net", "open", "--dns", "dns.example"}, bad: "use an address"},
		"both ways":         {args: []string{"--net", "open", "--net-rate", "50mbit"}, want: sandbox.NetworkPolicy{Mode: "open", Limits: sandbox.NetworkLimits{EgressBPS: 5e7, IngressBPS: 5e7}}},
		"one way wins":      {args: []string{"--net", "open", "--net-rate-in", "1gbit", "--net-rate", "50mbit"}, want: sandbox.NetworkPolicy{Mode: "open", Limits: sandbox.NetworkLimits{EgressBPS: 5e7, IngressBPS: 1e9}}},
		"too slow":          {args: []string{"--net", "open", "--net-rate", "1kbit"}, bad: "at least"},
		"bytes are refused": {args: []string{"--net-rate", "50MB"}, bad: "is not a rate"},
		"counts":            {args: []string{"--net", "open", "--net-pps", "1000", "--net-cps", "20", "--net-flows", "64"}, want: sandbox.NetworkPolicy{Mode: "open", Limits: sandbox.NetworkLimits{PacketsPerSecond: 1000, ConnectionsPerSecond: 20, Flows: 64}}},
		"gate":              {args: []string{"--net", "open", "--http"}, want: sandbox.NetworkPolicy{Mode: "open", HTTP: &sandbox.HTTPGate{}}},
		"gate without mode": {args: []string{"--http"}, bad: "needs mode allow or open"},
		"requests": {
			args: []string{"--allow", "example.com:80", "--http-rule", "GET,HEAD example.com/api/*"},
			want: sandbox.NetworkPolicy{Mode: "allow", Allow: []string{"example.com:80"}, HTTP: &sandbox.HTTPGate{Rules: []string{"GET,HEAD example.com/api/*"}}},
		},
		"requests past port 80": {args: []string{"--allow", "example.com", "--http-rule", "GET,HEAD example.com/api/*"}, bad: "write example.com:80 there"},
		"inject": {
			args: []string{"--net", "open", "--inject", "api.example.com:Authorization=token", "--inject", "*.example.org:X-Key=key,plain"},
			want: sandbox.NetworkPolicy{Mode: "open", HTTP: &sandbox.HTTPGate{Inject: []sandbox.Credential{
				{Host: "api.example.com", Header: "Authorization", Secret: "token"}, {Host: "*.example.org", Header: "X-Key", Secret: "key", Plain: true},
			}}},
		},
		"inject a value":   {args: []string{"--net", "open", "--inject", "h.example:Authorization=Bearer abc"}, bad: "not its value"},
		"inject half":      {args: []string{"--net", "open", "--inject", "h.example=token"}, bad: "HOST:HEADER=SECRET"},
		"gate off and on":  {args: []string{"--net", "open", "--http=false", "--http-rule", "example.com"}, bad: "goes with neither"},
		"file":             {args: []string{"--net-policy", "-"}, stdin: "mode: allow\nallow: [example.com]\nlimits:\n  egress_bps: 1000000\n", want: sandbox.NetworkPolicy{Mode: "allow", Allow: []string{"example.com"}, Limits: sandbox.NetworkLimits{EgressBPS: 1e6}}},
		"file as JSON":     {args: []string{"--net-policy", "-"}, stdin: `{"mode":"open","dns":["9.9.9.9"]}`, want: sandbox.NetworkPolicy{Mode: "open", DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")}}},
		"flags over file":  {args: []string{"--net-policy", "-", "--deny", "1.1.1.1"}, stdin: "mode: open\ndeny: [8.8.8.8]\ngroup: ring\n", want: sandbox.NetworkPolicy{Mode: "open", Deny: []string{"1.1.1.1"}, Group: "ring"}},
		"misspelt key":     {args: []string{"--net-policy", "-"}, stdin: "mode: open\ndenny: [8.8.8.8]\n", bad: "denny"},
		"not a policy":     {args: []string{"--net-policy", "-"}, stdin: "- one\n", bad: "--net-policy -"},
		"not YAML":         {args: []string{"--net-policy", "-"}, stdin: "mode: [open\n", bad: "--net-policy -"},
		"bad mode in file": {args: []string{"--net-policy", "-"}, stdin: "mode: wide\n", bad: "use off, allow or open"},
		"no such file":     {args: []string{"--net-policy", "/nonexistent"}, bad: "/nonexistent"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := policyOf(t, sandbox.NetworkPolicy{}, c.stdin, c.args...)
			if c.bad != "" {
				if err == nil || !strings.Contains(err.Error(), c.bad) {
					t.Errorf("error %v, want one with %q", err, c.bad)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got, cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Addr{})); d != "" {
				t.Error(d)
			}
		})
	}
}

// TestNetFlagsOverAPolicy is what 'net set' does with the present one.
func TestNetFlagsOverAPolicy(t *testing.T) {
	base := sandbox.NetworkPolicy{
		Mode: "allow", Allow: []string{"example.com"}, Deny: []string{"1.1.1.1"}, Group: "ring",
		Limits: sandbox.NetworkLimits{EgressBPS: 1e6, Flows: 9}, HTTP: &sandbox.HTTPGate{Rules: []string{"example.com"}},
	}
	for name, c := range map[string]struct {
		args   []string
		change func(*sandbox.NetworkPolicy)
	}{
		"nothing":       {change: func(*sandbox.NetworkPolicy) {}},
		"list replaced": {args: []string{"--allow", "example.org"}, change: func(p *sandbox.NetworkPolicy) { p.Allow = []string{"example.org"} }},
		"list emptied":  {args: []string{"--deny", ""}, change: func(p *sandbox.NetworkPolicy) { p.Deny = nil }},
		"opened":        {args: []string{"--net", "open"}, change: func(p *sandbox.NetworkPolicy) { p.Mode = "open" }},
		"off":           {args: []string{"--net", "off"}, change: func(p *sandbox.NetworkPolicy) { p.Mode, p.Allow, p.Group, p.HTTP = "off", nil, "", nil }},
		"rate lifted":   {args: []string{"--net-rate", "0"}, change: func(p *sandbox.NetworkPolicy) { p.Limits.EgressBPS = 0 }},
		"out of group":  {args: []string{"--net-group", ""}, change: func(p *sandbox.NetworkPolicy) { p.Group = "" }},
		"gate off":      {args: []string{"--http=false"}, change: func(p *sandbox.NetworkPolicy) { p.HTTP = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			want := base.Clone()
			c.change(&want)
			got, err := policyOf(t, base, "", c.args...)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
				t.Error(d)
			}
		})
	}
	if len(base.Deny) != 1 || base.HTTP == nil {
		t.Error("the policy laid over was changed")
	}
}

func TestParseRate(t *testing.T) {
	for text, want := range map[string]uint64{
		"50mbit": 5e7, "50 Mbit": 5e7, "1.5gbit": 15e8, "500kbit": 5e5, "8bit": 8, "1000": 1000, "0": 0, "0.0001kbit": 1, ".5mbit": 5e5,
	} {
		if got, err := parseRate(text); err != nil || got != want {
			t.Errorf("%q: %d %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "mbit", "-1mbit", "1e9", "inf", "nan", "0x10", "50mb", "50mbps", "1.2.3", "9999999gbit", "50mbit/s"} {
		if got, err := parseRate(text); err == nil {
			t.Errorf("%q: %d, want an error", text, got)
		}
	}
	for bits, want := range map[uint64]string{5e7: "50mbit", 15e8: "1.5gbit", 999: "999bit", 0: "0bit", 1234567: "1.234567mbit"} {
		if got := rate(bits); got != want {
			t.Errorf("%d: %q, want %q", bits, got, want)
		}
	}
}

func TestNetCommands(t *testing.T) {
	w := newWorld(t)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte("mode: allow\nallow:\n  - example.com:443\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	id := strings.TrimSpace(w.ok("create", "--name", "dev", "--net-policy", file, "--deny", "1.1.1.1", "--net-rate", "50mbit", "--http"))
	out := w.ok("net", "show", "dev")
	for _, want := range []string{"allow: what the rules name", "example.com:443", "1.1.1.1", "50mbit/s out", "checked by name", id} {
		if !strings.Contains(out, want) {
			t.Errorf("net show lacks %q:\n%s", want, out)
		}
	}
	if out := w.ok("net", "show", "-o", "json", "dev"); !strings.Contains(out, `"egress_bps": 50000000`) {
		t.Errorf("net show -o json: %s", out)
	}
	frozen := strings.TrimSpace(w.ok("snapshot", "create", "dev"))
	as := strings.TrimSpace(w.ok("fork", frozen))
	apart := strings.TrimSpace(w.ok("fork", frozen, "--net", "off"))
	if out := w.ok("net", "show", as); !strings.Contains(out, "example.com:443") {
		t.Errorf("fork without a policy of its own: %s", out)
	}
	if out := w.ok("net", "show", apart); !strings.Contains(out, "off: nothing") {
		t.Errorf("fork with a policy of its own: %s", out)
	}
	if code, _, errs := w.run("", "create", "--allow", "10.0.0.0/33"); code == 0 || !strings.Contains(errs, "invalid_rule") {
		t.Errorf("bad rule: exit %d, %s", code, errs)
	}
	w.ok("net") // the help

	if out := w.ok("net", "set", "dev", "--add", "pypi.org:443", "--add", "example.com:443", "--remove", "1.1.1.1", "--net-rate-in", "0"); out !=
		"- deny  1.1.1.1\n- limits  50mbit/s in\n+ allow  pypi.org:443\n" {
		t.Errorf("net set says:\n%s", out)
	}
	if out := w.ok("net", "set", "dev", "--add", "pypi.org:443"); out != "nothing changed\n" {
		t.Errorf("the same again: %s", out)
	}
	if out := w.ok("net", "show", "dev"); !strings.Contains(out, "pypi.org") || strings.Contains(out, "1.1.1.1") || !strings.Contains(out, "50mbit/s out") || strings.Contains(out, "50mbit/s in") {
		t.Errorf("after net set:\n%s", out)
	}
	if code, _, errs := w.run("", "net", "set", "dev", "--remove", "nowhere.example"); code == 0 || !strings.Contains(errs, "there are: example.com:443, pypi.org:443") {
		t.Errorf("removing what is not there: exit %d, %s", code, errs)
	}
	if code, _, errs := w.run("", "net", "set", "dev"); code == 0 || !strings.Contains(errs, "say what to change") {
		t.Errorf("no change: exit %d, %s", code, errs)
	}
	if out := w.ok("net", "set", "dev", "--net", "off"); !strings.Contains(out, "+ mode  off") || !strings.Contains(out, "- allow  example.com:443") {
		t.Errorf("turning it off says:\n%s", out)
	}
}

func TestNewsLine(t *testing.T) {
	for name, c := range map[string]struct {
		e       sandbox.Event
		want    []string
		refusal bool
	}{
		"denied":  {sandbox.Event{Type: "net.denied", Data: map[string]string{"protocol": "tcp", "dest": "10.0.0.1", "port": "22", "count": "5", "why": "private"}}, []string{"denied", "tcp", "to 10.0.0.1:22", "×5", "why=private"}, true},
		"in":      {sandbox.Event{Type: "net.denied", Data: map[string]string{"protocol": "udp", "dest": "8.8.8.8", "port": "53", "direction": "in"}}, []string{"from 8.8.8.8:53"}, true},
		"name":    {sandbox.Event{Type: "net.name", Data: map[string]string{"protocol": "dns", "dest": "evil.example", "verdict": "denied"}}, []string{"name", "dns", "evil.example", "verdict=denied"}, true},
		"allowed": {sandbox.Event{Type: "net.allowed", Data: map[string]string{"protocol": "icmp", "dest": "1.1.1.1"}}, []string{"allowed", "to 1.1.1.1"}, false},
		"untold":  {sandbox.Event{Type: "net.untold", Data: map[string]string{"net.denied": "70", "net.name": "2"}}, []string{"70 more denied", "2 more name"}, true},
	} {
		got := newsLine(c.e)
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: %q lacks %q", name, got, want)
			}
		}
		if refusal(c.e) != c.refusal {
			t.Errorf("%s: refusal %v", name, !c.refusal)
		}
	}
}

func TestParseQuery(t *testing.T) {
	for text, want := range map[string]sandbox.NetworkQuery{
		"example.com":       {Dest: "example.com", Port: 443, Protocol: "tcp"},
		"Example.COM.:80":   {Dest: "example.com", Port: 80, Protocol: "tcp"},
		"10.0.0.1:53/udp":   {Dest: "10.0.0.1", Port: 53, Protocol: "udp"},
		"1.1.1.1/icmp":      {Dest: "1.1.1.1", Protocol: "icmp"},
		"2001:db8::1":       {Dest: "2001:db8::1", Port: 443, Protocol: "tcp"},
		"[2001:db8::1]:80":  {Dest: "2001:db8::1", Port: 80, Protocol: "tcp"},
		"example.com:1/tcp": {Dest: "example.com", Port: 1, Protocol: "tcp"},
	} {
		if got, err := parseQuery(text); err != nil || got != want {
			t.Errorf("%q: %+v %v, want %+v", text, got, err, want)
		}
	}
	for _, text := range []string{"", ":80", "x:0", "x:99999", "x/sctp", "x:1/icmp", "x/udp", "*.example.com", "1.2.3", "a b"} {
		if got, err := parseQuery(text); err == nil {
			t.Errorf("%q: %+v, want an error", text, got)
		}
	}
}

func TestNetExplain(t *testing.T) {
	w := newWorld(t)
	w.ok("create", "--name", "dev", "--allow", "example.com:443")
	if out := w.ok("net", "explain", "dev", "example.com"); !strings.Contains(out, "allowed  example.com:443/tcp") || !strings.Contains(out, "by       example.com:443") {
		t.Errorf("permitted:\n%s", out)
	}
	code, out, _ := w.run("", "net", "explain", "dev", "example.org:22")
	if code != 1 || !strings.Contains(out, "denied  example.org:22/tcp") || !strings.Contains(out, "to permit it: sandbox net set dev --add example.org") {
		t.Errorf("denied: exit %d\n%s", code, out)
	}
	if code, out, _ := w.run("", "net", "explain", "-o", "json", "dev", "example.org"); code != 1 || !strings.Contains(out, `"allowed": false`) {
		t.Errorf("as JSON: exit %d\n%s", code, out)
	}
	if code, _, errs := w.run("", "net", "explain", "dev", "x:0"); code != 125 || !strings.Contains(errs, "usage") {
		t.Errorf("a bad question: exit %d %s", code, errs)
	}
}
