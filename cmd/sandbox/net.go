package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) netCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "net", Short: "See and change what sandboxes may reach",
		Long: `See and change what sandboxes may reach, and what they tried to.

A rule is DEST[:PORTS][/PROTO]: an address, a prefix or a name, which ports of it,
and tcp, udp or icmp. *.example.com is every name below example.com.`,
		Example: `  sandbox net show dev
  sandbox net set dev --add pypi.org:443
  sandbox net explain dev 10.0.0.1:22
  sandbox net log dev -f --denied`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(c.netShowCmd(), c.netSetCmd(), c.netExplainCmd(), c.netLogCmd(), c.netFaultCmd())
	return cmd
}

func (c *cli) netShowCmd() *cobra.Command {
	return &cobra.Command{
		Use: "show SANDBOX", Short: "Show what a sandbox may reach, and what it sent",
		Long: `Show a sandbox's network policy, its limits and what it sent and received. Pins are
addresses it may reach now because a name it may ask for was answered with them.`,
		Example: `  sandbox net show dev
  sandbox net show -o yaml dev`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.Network(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.show(s, func(w printer) error { return networkTable(w, s) })
		},
	}
}

func networkTable(w printer, s sandbox.NetworkState) error {
	return columns(w, "WHAT\tHOW", func(row func(string, ...any)) {
		each := func(name string, lines ...string) {
			for i, text := range lines {
				if i > 0 {
					name = ""
				}
				row("%s\t%s", name, text)
			}
		}
		each("sandbox", string(s.Sandbox))
		for _, p := range policyWords(s.Policy) {
			each(p.what, p.lines...)
		}
		if s.Address.IsValid() && s.Policy.Connected() {
			each("address", fmt.Sprintf("%s, gateway and resolver %s", s.Address, s.Gateway))
		}
		for i, pin := range s.Pins {
			name := ""
			if i == 0 {
				name = "pins"
			}
			text := pin.Address.String()
			if pin.Name != "" {
				text = pin.Name + " " + text
			}
			each(name, fmt.Sprintf("%s, %s more", text, max(0, time.Until(pin.Expires)).Round(time.Second)))
		}
		if s.Fault != nil {
			each("fault", faultWords(*s.Fault))
		}
		each("traffic", traffic(s.Usage))
	})
}

func traffic(u sandbox.Usage) string {
	if slices.Contains(u.Unknown, "net") {
		return "this machine could not count it"
	}
	way := func(bytes, packets uint64) string {
		return fmt.Sprintf("%s in %s", units.BytesSize(float64(bytes)), counted(packets, "packet"))
	}
	return fmt.Sprintf("received %s, sent %s, refused %s", way(u.NetRxBytes, u.NetRxPackets), way(u.NetTxBytes, u.NetTxPackets), counted(u.NetDropped, "packet"))
}

func counted(n uint64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.FormatUint(n, 10) + " " + what + "s"
}

// policyPart is one row, or a few, of a policy in words.
type policyPart struct {
	what  string
	lines []string
}

// policyWords says what a policy says, for people.
func policyWords(p sandbox.NetworkPolicy) []policyPart {
	var out []policyPart
	say := func(what string, lines ...string) {
		if len(lines) > 0 {
			out = append(out, policyPart{what, lines})
		}
	}
	switch p.Mode {
	case sandbox.NetworkAllow:
		say("mode", "allow: what the rules name, and nothing else")
	case sandbox.NetworkOpen:
		say("mode", "open: the public internet; no private ranges but what the rules name and the operator admits")
	default:
		say("mode", "off: nothing in or out")
	}
	say("allow", p.Allow...)
	say("deny", p.Deny...)
	var dns []string
	for _, a := range p.DNS {
		dns = append(dns, a.String())
	}
	say("dns", dns...)
	if p.Group != "" {
		say("group", p.Group)
	}
	say("limits", limitWords(p.Limits)...)
	if p.HTTP != nil {
		say("gate", gateWords(*p.HTTP)...)
	}
	return out
}

func limitWords(l sandbox.NetworkLimits) []string {
	var out []string
	if l.EgressBPS > 0 {
		out = append(out, rate(l.EgressBPS)+"/s out")
	}
	if l.IngressBPS > 0 {
		out = append(out, rate(l.IngressBPS)+"/s in")
	}
	if l.PacketsPerSecond > 0 {
		out = append(out, counted(l.PacketsPerSecond, "packet")+"/s")
	}
	if l.ConnectionsPerSecond > 0 {
		out = append(out, counted(l.ConnectionsPerSecond, "new flow")+"/s")
	}
	if l.Flows > 0 {
		out = append(out, counted(uint64(l.Flows), "flow")+" at one time")
	}
	return out
}

func gateWords(g sandbox.HTTPGate) []string {
	out := []string{"web traffic (tcp 80 and 443) is checked by name"}
	for _, r := range g.Rules {
		out = append(out, "permits "+r)
	}
	for _, i := range g.Inject {
		text := fmt.Sprintf("adds %s for %s, from secret %s", i.Header, i.Host, i.Secret)
		if i.Plain {
			text += ", sent on in plain HTTP"
		}
		out = append(out, text)
	}
	return out
}

// policyLines is a policy as lines that can be compared.
func policyLines(p sandbox.NetworkPolicy) []string {
	var out []string
	for _, part := range policyWords(p) {
		for _, l := range part.lines {
			out = append(out, part.what+"  "+l)
		}
	}
	return out
}

// policyChange is what 'net set' did.
type policyChange struct {
	Sandbox sandbox.ID            `json:"sandbox"`
	Before  sandbox.NetworkPolicy `json:"before"`
	After   sandbox.NetworkPolicy `json:"after"`
}

func (c *cli) netSetCmd() *cobra.Command {
	var nf netFlags
	var added, addedDeny, removed []string
	cmd := &cobra.Command{
		Use: "set SANDBOX [flags]", Short: "Change what a sandbox may reach",
		Long: `Change a living sandbox's network policy. It is in force when the command returns:
new flows are judged by it, and flows it forbids are cut. What no flag names stays;
a list that a flag names is replaced. --add, --add-deny and --remove change single
rules. An empty value empties a list: --deny ''. A rate of 0 is no limit.
--net off also drops the allow list, the group and the gate: give them again with
--net allow.

Prints what changed.`,
		Example: `  sandbox net set dev --net allow --allow pypi.org:443 --allow files.pythonhosted.org:443
  sandbox net set dev --add github.com:22/tcp --remove pypi.org:443
  sandbox net set dev --net-rate 10mbit
  sandbox net set dev --net off
  sandbox net set dev --net-policy policy.yaml`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			edited := len(added)+len(addedDeny)+len(removed) > 0
			if !edited && !nf.given() {
				return usage("say what to change; 'sandbox net show %s' tells what is", args[0])
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			sb, err := cl.Sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			p := sb.Spec.Network.Clone()
			if edited {
				if p, err = editRules(p, added, addedDeny, removed); err != nil {
					return err
				}
			}
			if p, err = nf.over(p, c.in); err != nil {
				return err
			}
			after, err := cl.SetNetwork(cmd.Context(), string(sb.ID), p)
			if err != nil {
				return err
			}
			ch := policyChange{sb.ID, sb.Spec.Network, after.Spec.Network}
			return c.show(ch, func(w printer) error { return changeTable(w, ch) })
		},
	}
	nf.add(cmd)
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.StringArrayVar(&added, "add", nil, "add a rule to the allow list; repeatable")
	fl.StringArrayVar(&addedDeny, "add-deny", nil, "add a rule to the deny list; repeatable")
	fl.StringArrayVar(&removed, "remove", nil, "take a rule off both lists; repeatable")
	return cmd
}

func changeTable(w printer, ch policyChange) error {
	before, after := policyLines(ch.Before), policyLines(ch.After)
	same := true
	print := func(sign, colour string, lines, others []string) error {
		for _, l := range lines {
			if slices.Contains(others, l) {
				continue
			}
			same = false
			if err := w.printf("%s\n", w.paint(colour, sign+" "+l)); err != nil {
				return err
			}
		}
		return nil
	}
	if err := print("-", red, before, after); err != nil {
		return err
	}
	if err := print("+", green, after, before); err != nil {
		return err
	}
	if same {
		return line(w, "nothing changed")
	}
	return nil
}

// editRules adds and removes single rules. Two texts of one rule are the same.
func editRules(p sandbox.NetworkPolicy, added, addedDeny, removed []string) (sandbox.NetworkPolicy, error) {
	find := func(list []string, r sandbox.NetworkRule) int {
		return slices.IndexFunc(list, func(text string) bool {
			have, err := sandbox.ParseNetworkRule(text)
			return err == nil && have.String() == r.String()
		})
	}
	for _, text := range removed {
		r, err := sandbox.ParseNetworkRule(text)
		if err != nil {
			return p, err
		}
		a, d := find(p.Allow, r), find(p.Deny, r)
		if a < 0 && d < 0 {
			return p, usage("--remove %s: no such rule; there are: %s", text, orNone(slices.Concat(p.Allow, p.Deny)))
		}
		if a >= 0 {
			p.Allow = slices.Delete(p.Allow, a, a+1)
		}
		if d >= 0 {
			p.Deny = slices.Delete(p.Deny, d, d+1)
		}
	}
	for _, l := range []struct {
		to    *[]string
		texts []string
	}{{&p.Allow, added}, {&p.Deny, addedDeny}} {
		for _, text := range l.texts {
			r, err := sandbox.ParseNetworkRule(text)
			if err != nil {
				return p, err
			}
			if find(*l.to, r) < 0 {
				*l.to = append(*l.to, text)
			}
		}
	}
	return p, nil
}

func orNone(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}

func (c *cli) netExplainCmd() *cobra.Command {
	return &cobra.Command{
		Use: "explain SANDBOX DEST[:PORT][/PROTO]", Short: "Tell whether a sandbox may reach something, and why",
		Long: `Tell whether a new flow of a sandbox to an address or a name would be let out: which
rule decides, what was asked before it, and what to add to permit it. It is tcp, and
port 443, if not given. Nothing is sent.

Exit codes: 0 if it is permitted, 1 if not.`,
		Example: `  sandbox net explain dev pypi.org:443
  sandbox net explain dev 10.0.0.1:53/udp
  sandbox net explain dev 1.1.1.1/icmp`,
		Args: cobra.ExactArgs(2), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := parseQuery(args[1])
			if err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			v, err := cl.ExplainNetwork(cmd.Context(), args[0], q)
			if err != nil {
				return err
			}
			if err := c.show(v, func(w printer) error { return verdict(w, v) }); err != nil {
				return err
			}
			if !v.Allowed {
				return exitError(1)
			}
			return nil
		},
	}
}

// parseQuery reads DEST[:PORT][/PROTO].
func parseQuery(text string) (sandbox.NetworkQuery, error) {
	q := sandbox.NetworkQuery{Dest: text}
	if head, proto, ok := strings.Cut(text, "/"); ok {
		q.Dest, q.Protocol = head, proto
	}
	if host, port, err := net.SplitHostPort(q.Dest); err == nil {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return q, usage("%q: port %q is none", text, port)
		}
		q.Dest, q.Port = host, uint16(n)
	}
	if err := q.Complete(); err != nil {
		return q, usage("%w; write it as example.com:443, 10.0.0.1:53/udp or 1.1.1.1/icmp", err)
	}
	return q, nil
}

func verdict(w printer, v sandbox.NetworkVerdict) error {
	dest := v.Dest
	if v.Port != 0 {
		dest = net.JoinHostPort(dest, strconv.Itoa(int(v.Port)))
	}
	word, colour := "denied", red
	if v.Allowed {
		word, colour = "allowed", green
	}
	err := w.printf("%s  %s/%s: %s\n", w.paint(colour, word), dest, v.Protocol, v.Why)
	if v.Rule != "" {
		err = errors.Join(err, line(w, "by       "+v.Rule))
	}
	for i, s := range v.Steps {
		err = errors.Join(err, w.printf("%4d  %-8s %s\n", i+1, s.Step, s.Answer))
	}
	if v.Mend != "" {
		err = errors.Join(err, line(w, "to permit it: "+v.Mend))
	}
	return err
}

func (c *cli) netLogCmd() *cobra.Command {
	var follow, onlyDenied bool
	var since string
	cmd := &cobra.Command{
		Use: "log [flags] SANDBOX", Short: "Print what a sandbox reached and what was refused",
		Long: `Print what a sandbox reached, what was refused and which names it asked for: of the
last hour unless --since is given; with -f go on with what comes.

Repetitions within ten seconds are one line with their number. A sandbox that tries
very much is told only in part; 'untold' lines then say how much is missing. The
counters of 'sandbox net show' are exact.`,
		Example: `  sandbox net log dev
  sandbox net log dev -f --denied
  sandbox net log dev --since 24h -o json`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			q := client.EventQuery{Sandbox: args[0]}
			if since == "" && !follow {
				since = "1h"
			}
			if q.Since, err = parseSince(since, time.Now()); err != nil {
				return err
			}
			return c.netLog(cmd.Context(), cl, q, follow, onlyDenied)
		},
	}
	fl := cmd.Flags()
	fl.BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	fl.BoolVar(&onlyDenied, "denied", false, "only what was refused")
	fl.StringVar(&since, "since", "", "begin then: a duration ago, as 10m, or a time, as 2026-01-31T12:00:00Z")
	return cmd
}

func (c *cli) netLog(ctx context.Context, cl *client.Client, q client.EventQuery, follow, onlyDenied bool) error {
	tell := func(e sandbox.Event) error {
		if !strings.HasPrefix(e.Type, "net.") || onlyDenied && !refusal(e) {
			return nil
		}
		return c.showLine(e, "%s", newsLine(e))
	}
	if follow {
		return cl.Follow(ctx, q, tell)
	}
	q.Limit = sandbox.MaxPage
	for {
		events, next, err := cl.Events(ctx, q)
		if err != nil || len(events) == 0 {
			return err
		}
		for _, e := range events {
			if err := tell(e); err != nil {
				return err
			}
		}
		q.After, q.Since = next, time.Time{}
	}
}

// refusal reports whether an event tells of something refused.
func refusal(e sandbox.Event) bool {
	return e.Type == sandbox.EventNetDenied || e.Data["verdict"] == "denied" || e.Data[sandbox.EventNetDenied] != ""
}

// newsLine is one event of the network, for people.
func newsLine(e sandbox.Event) string {
	d := e.Data
	head := e.Time.Local().Format("2006-01-02 15:04:05.000") + "  "
	what := strings.TrimPrefix(e.Type, "net.")
	if e.Type == sandbox.EventNetUntold {
		text := head + fmt.Sprintf("%-8s", what)
		for _, kind := range []string{sandbox.EventNetDenied, sandbox.EventNetAllowed, sandbox.EventNetName} {
			if n := d[kind]; n != "" {
				text += "  " + n + " more " + strings.TrimPrefix(kind, "net.")
			}
		}
		return text
	}
	dest := d["dest"]
	if d["port"] != "" {
		dest = net.JoinHostPort(dest, d["port"])
	}
	arrow := "to"
	if d["direction"] == "in" {
		arrow = "from"
	}
	text := head + fmt.Sprintf("%-8s  %-5s  %s %s", what, dash(d["protocol"]), arrow, dash(clip(dest, 80)))
	if e.Type == sandbox.EventNetName {
		text = head + fmt.Sprintf("%-8s  %-5s  %s", what, dash(d["protocol"]), dash(clip(dest, 80)))
	}
	if d["count"] != "" {
		text += "  ×" + d["count"]
	}
	keys := make([]string, 0, len(d))
	for k := range d {
		switch k {
		case "dest", "port", "protocol", "direction", "count":
		default:
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	for _, k := range keys {
		text += "  " + k + "=" + clip(d[k], 80)
	}
	return text
}
