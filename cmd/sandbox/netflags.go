package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

// netFlags are the flags that say what a sandbox may reach. They are laid over
// a policy: none at creation, the file's with --net-policy, the present one
// with 'net set'.
type netFlags struct {
	cmd               *cobra.Command
	mode, group, file string
	allow, deny, dns  []string
	rate, in, out     rateFlag
	pps, cps          uint64
	flows             uint32
	gate              bool
	requests, inject  []string
}

// netFlagNames is every flag that add makes.
var netFlagNames = []string{
	"net", "allow", "deny", "dns", "net-rate", "net-rate-in", "net-rate-out", "net-pps", "net-cps", "net-flows",
	"net-group", "http", "http-rule", "inject", "net-policy",
}

func (f *netFlags) add(cmd *cobra.Command) {
	f.cmd = cmd
	fl := cmd.Flags()
	fl.StringVar(&f.mode, "net", "", "network: off (default), allow (only what --allow names) or open (the public internet)")
	fl.StringArrayVar(&f.allow, "allow", nil, "permit DEST[:PORTS][/PROTO], as example.com:443 or 203.0.113.0/24:80,8000-8100/tcp; implies --net allow; repeatable")
	fl.StringArrayVar(&f.deny, "deny", nil, "forbid DEST[:PORTS][/PROTO], whatever else permits it; repeatable")
	fl.StringArrayVar(&f.dns, "dns", nil, "resolver the daemon asks for this sandbox; repeatable")
	fl.Var(&f.rate, "net-rate", "bits a second each way, as 50mbit")
	fl.Var(&f.in, "net-rate-in", "bits a second into the sandbox, as 50mbit")
	fl.Var(&f.out, "net-rate-out", "bits a second out of the sandbox, as 500kbit")
	fl.Uint64Var(&f.pps, "net-pps", 0, "packets it may send a second")
	fl.Uint64Var(&f.cps, "net-cps", 0, "new connections (flows) a second")
	fl.Uint32Var(&f.flows, "net-flows", 0, "flows at one time")
	fl.StringVar(&f.group, "net-group", "", "sandboxes of one group reach each other, by name; implies --net allow")
	fl.BoolVar(&f.gate, "http", false, "send web traffic through the daemon's gate, which checks names")
	fl.StringArrayVar(&f.requests, "http-rule", nil, "plain HTTP requests the gate permits, as 'GET,HEAD example.com/api/*'; implies --http; repeatable")
	fl.StringArrayVar(&f.inject, "inject", nil, "let the gate add a header, HOST:HEADER=SECRET[,plain], with the value of a secret of the daemon; implies --http; repeatable")
	fl.StringVar(&f.file, "net-policy", "", "file with the policy as YAML or JSON, - for standard input; the other flags are laid over it")
	for name, words := range map[string][]string{"net": {"off", "allow", "open"}} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)) // the flag was just added
	}
}

// given reports whether any of the flags is on the command line.
func (f *netFlags) given() bool { return slices.ContainsFunc(netFlagNames, f.has) }

func (f *netFlags) has(name string) bool { return f.cmd.Flags().Changed(name) }

// over lays the flags over a policy. What it returns is valid.
func (f *netFlags) over(p sandbox.NetworkPolicy, stdin io.Reader) (sandbox.NetworkPolicy, error) {
	p = p.Clone()
	if f.file != "" {
		var err error
		if p, err = readPolicy(f.file, stdin); err != nil {
			return p, err
		}
	}
	if f.has("allow") {
		p.Allow = listed(f.allow)
	}
	if f.has("deny") {
		p.Deny = listed(f.deny)
	}
	if f.has("dns") {
		p.DNS = nil
		for _, d := range listed(f.dns) {
			a, err := netip.ParseAddr(d)
			if err != nil {
				return p, usage("--dns %q: use an address, as 9.9.9.9", d)
			}
			p.DNS = append(p.DNS, a)
		}
	}
	if f.has("net-group") {
		p.Group = f.group
	}
	f.limits(&p.Limits)
	if err := f.http(&p); err != nil {
		return p, err
	}
	switch {
	case f.mode != "":
		p.Mode = sandbox.NetworkMode(f.mode)
		f.dropUnused(&p)
	case !p.Connected() && (len(p.Allow) > 0 || f.has("net-group") && p.Group != ""):
		p.Mode = sandbox.NetworkAllow
	}
	return p, p.Validate()
}

// dropUnused takes out of a policy that is off now what it had before and what
// only a link has use for. What the command line itself says is left to be
// refused.
func (f *netFlags) dropUnused(p *sandbox.NetworkPolicy) {
	if p.Connected() {
		return
	}
	if !f.has("allow") {
		p.Allow = nil
	}
	if !f.has("net-group") {
		p.Group = ""
	}
	if !f.has("http") && !f.has("http-rule") && !f.has("inject") {
		p.HTTP = nil
	}
}

// limits lays the limits given over l.
func (f *netFlags) limits(l *sandbox.NetworkLimits) {
	for _, r := range []struct {
		name string
		rate rateFlag
		to   []*uint64
	}{
		{"net-rate", f.rate, []*uint64{&l.IngressBPS, &l.EgressBPS}},
		{"net-rate-in", f.in, []*uint64{&l.IngressBPS}},
		{"net-rate-out", f.out, []*uint64{&l.EgressBPS}},
	} {
		if f.has(r.name) {
			for _, to := range r.to {
				*to = uint64(r.rate)
			}
		}
	}
	if f.has("net-pps") {
		l.PacketsPerSecond = f.pps
	}
	if f.has("net-cps") {
		l.ConnectionsPerSecond = f.cps
	}
	if f.has("net-flows") {
		l.Flows = f.flows
	}
}

// http lays what was given of the gate over p.
func (f *netFlags) http(p *sandbox.NetworkPolicy) error {
	if f.has("http") && !f.gate {
		if f.has("http-rule") || f.has("inject") {
			return usage("--http=false goes with neither --http-rule nor --inject")
		}
		p.HTTP = nil
		return nil
	}
	if p.HTTP == nil && (f.gate || f.has("http-rule") || f.has("inject")) {
		p.HTTP = &sandbox.HTTPGate{}
	}
	if f.has("http-rule") {
		p.HTTP.Rules = listed(f.requests)
	}
	if f.has("inject") {
		p.HTTP.Inject = nil
		for _, text := range listed(f.inject) {
			c, err := parseCredential(text)
			if err != nil {
				return err
			}
			p.HTTP.Inject = append(p.HTTP.Inject, c)
		}
	}
	return nil
}

// listed is a repeatable flag's values; one empty value stands for no entry,
// which is how 'net set' empties a list.
func listed(values []string) []string {
	if len(values) == 1 && values[0] == "" {
		return nil
	}
	return values
}

// parseCredential reads HOST:HEADER=SECRET[,plain].
func parseCredential(text string) (sandbox.Credential, error) {
	var c sandbox.Credential
	rest, plain := strings.CutSuffix(text, ",plain")
	host, rest, ok := strings.Cut(rest, ":")
	header, secret, named := strings.Cut(rest, "=")
	if !ok || !named || host == "" || header == "" || secret == "" {
		return c, usage("--inject %q: use HOST:HEADER=SECRET, as api.example.com:Authorization=api-token, with ,plain where the host speaks no TLS", text)
	}
	if strings.ContainsAny(secret, " ,") {
		return c, usage("--inject %s:%s=…: give the name of a secret ('sandbox secret set'), not its value", host, header)
	}
	return sandbox.Credential{Host: host, Header: header, Secret: secret, Plain: plain}, nil
}

// maxPolicyFile is far above the largest policy that is valid.
const maxPolicyFile = 1 << 20

// readPolicy reads a policy file. A key it does not know is an error: a policy
// that says less than its author meant is worse than none.
func readPolicy(name string, stdin io.Reader) (sandbox.NetworkPolicy, error) {
	var p sandbox.NetworkPolicy
	in := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return p, usage("--net-policy: %w", err)
		}
		defer func() { _ = f.Close() }() // read only
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxPolicyFile+1))
	if err != nil {
		return p, fmt.Errorf("reading the policy %s: %w", name, err)
	}
	if len(b) > maxPolicyFile {
		return p, usage("--net-policy %s: at most %d bytes", name, maxPolicyFile)
	}
	js, err := yaml.YAMLToJSON(b) // JSON is YAML
	if err != nil {
		return p, usage("--net-policy %s: %s", name, yaml.FormatError(err, false, false))
	}
	d := json.NewDecoder(bytes.NewReader(js))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return p, usage("--net-policy %s: %w; it has mode, allow, deny, dns, group, limits and http", name, err)
	}
	if d.Decode(new(any)) != io.EOF {
		return p, usage("--net-policy %s: one policy, and nothing after it", name)
	}
	return p, nil
}

// rateFlag is a number of bits a second, given as 500kbit, 50mbit or 1gbit
// (powers of 1000).
type rateFlag uint64

var rateUnits = []struct {
	word string
	bits float64
}{{"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}, {"bit", 1}}

// maxRate is beyond every link there is, and far from where numbers end.
const maxRate = 1e15

func (r *rateFlag) String() string {
	if *r == 0 {
		return ""
	}
	return rate(uint64(*r))
}

func (r *rateFlag) Set(v string) error {
	n, err := parseRate(v)
	if err != nil {
		return err
	}
	*r = rateFlag(n)
	return nil
}

// Type names the value in --help.
func (r *rateFlag) Type() string { return "rate" }

var errRate = errors.New("use a number of bits a second and a unit, as 500kbit, 50mbit or 1gbit; 0 for no limit")

func parseRate(v string) (uint64, error) {
	s := strings.ToLower(strings.TrimSpace(v))
	factor := 1.0
	for _, u := range rateUnits {
		if head, ok := strings.CutSuffix(s, u.word); ok {
			s, factor = strings.TrimSpace(head), u.bits
			break
		}
	}
	if strings.Trim(s, "0123456789.") != "" { // ParseFloat knows inf, hexadecimals and more
		return 0, fmt.Errorf("%q is not a rate: %w", v, errRate)
	}
	n, err := strconv.ParseFloat(s, 64)
	if n *= factor; err != nil || n > maxRate {
		return 0, fmt.Errorf("%q is not a rate: %w", v, errRate)
	}
	return uint64(math.Ceil(n)), nil // never none for a little
}

// rate prints bits a second as people write them.
func rate(bits uint64) string {
	for _, u := range rateUnits {
		if n := float64(bits) / u.bits; n >= 1 {
			return strconv.FormatFloat(n, 'f', -1, 64) + u.word
		}
	}
	return "0bit"
}
