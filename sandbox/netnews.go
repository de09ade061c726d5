package sandbox

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// The types of events about a sandbox's network.
const (
	EventNetDenied  = "net.denied"  // refused by policy
	EventNetAllowed = "net.allowed" // a new flow, or a request, let through
	EventNetName    = "net.name"    // a name it asked for
	EventNetUntold  = "net.untold"  // how much went into no event of its own
)

// NetworkNews is one thing the network tells of a sandbox: a flow granted or
// refused, a name asked for, a request the gate judged.
type NetworkNews struct {
	Sandbox  ID
	Type     string // one of the event types above, but for EventNetUntold
	Protocol string // tcp, udp, icmp, ipv6, a protocol's number; dns and http of names and requests
	Dest     string // address or name meant; of what came in, the sender's
	Port     uint16 // 0 where there is none
	Inbound  bool   // towards the sandbox
	Why      string // the step or rule that decided, where that is known
	Detail   map[string]string
	Addrs    []netip.Addr // of a name that was answered
	Count    uint64       // how many packets, queries or requests; 0 means 1
}

// NetworkQuery asks what would become of a new flow.
type NetworkQuery struct {
	Dest     string // address or name
	Port     uint16
	Protocol string // tcp, udp or icmp
}

// Complete fills in what was left out (tcp, and of that port 443) and brings
// the name into its normal form. Errors are of class ErrInvalid.
func (q *NetworkQuery) Complete() error {
	bad := func(format string, args ...any) error {
		return Errorf(ErrInvalid, "invalid_query", "network query for %.80q: %s", q.Dest, fmt.Sprintf(format, args...))
	}
	const https = 443
	switch q.Protocol {
	case "", ProtocolTCP:
		q.Protocol = ProtocolTCP
		if q.Port == 0 {
			q.Port = https
		}
	case ProtocolUDP:
		if q.Port == 0 {
			return bad("name a port of udp")
		}
	case ProtocolICMP:
		if q.Port != 0 {
			return bad("icmp has no ports")
		}
	default:
		return bad("protocol %.20q: use tcp, udp or icmp", q.Protocol)
	}
	if addr, err := netip.ParseAddr(q.Dest); err == nil {
		q.Dest = addr.WithZone("").String()
		return nil
	}
	name, err := NormalizeDomain(q.Dest)
	if err != nil || strings.HasPrefix(name, "*") || looksLikeAddress(name) {
		return bad("use an address or a name")
	}
	q.Dest = name
	return nil
}

// NetworkVerdict tells what becomes of a flow, and why.
type NetworkVerdict struct {
	Sandbox  ID            `json:"sandbox,omitempty"`
	Dest     string        `json:"dest"`
	Port     uint16        `json:"port,omitempty"`
	Protocol string        `json:"protocol"`
	Allowed  bool          `json:"allowed"`
	Step     string        `json:"step" doc:"The step that decides: off, inside, ipv6, service, host, gate, group, closed, dns, deny, allow, pin, default, private, open or name."`
	Rule     string        `json:"rule,omitempty" doc:"The rule or range that decides, where one does."`
	Why      string        `json:"why" doc:"In words."`
	Mend     string        `json:"mend,omitempty" doc:"Of what is refused: what would permit it."`
	Steps    []NetworkStep `json:"steps" doc:"What was asked before, in the order of the rules; the last one decides."`
}

// NetworkStep is one step of a verdict.
type NetworkStep struct {
	Step   string `json:"step"`
	Answer string `json:"answer"`
}

// NetworkState is what a sandbox's network is now.
type NetworkState struct {
	Sandbox ID            `json:"sandbox"`
	Policy  NetworkPolicy `json:"policy"`
	Address netip.Addr    `json:"address,omitzero"`
	Gateway netip.Addr    `json:"gateway,omitzero" doc:"Where its resolver answers."`
	Pins    []NetworkPin  `json:"pins,omitempty" doc:"Addresses of permitted names, as they were answered to it."`
	Fault   *NetworkFault `json:"fault,omitempty" doc:"What disturbs it now, where somebody asked for that."`
	Usage   Usage         `json:"usage" doc:"Its counters, read now."`
}

// NetworkPin is an address a sandbox may reach for a while because a name it
// may ask for has it.
type NetworkPin struct {
	Address netip.Addr `json:"address"`
	Name    string     `json:"name,omitempty"`
	Expires time.Time  `json:"expires"`
}
