package sandbox

import (
	"net/netip"
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
	Count    uint64 // how many packets, queries or requests; 0 means 1
}

// NetworkQuery asks what would become of a new flow.
type NetworkQuery struct {
	Dest     string // address or name
	Port     uint16 // 0 for any
	Protocol string // tcp, udp or icmp; empty for tcp
}

// NetworkVerdict tells what becomes of a flow, and why.
type NetworkVerdict struct {
	Sandbox  ID            `json:"sandbox,omitempty"`
	Dest     string        `json:"dest"`
	Port     uint16        `json:"port,omitempty"`
	Protocol string        `json:"protocol"`
	Allowed  bool          `json:"allowed"`
	Step     string        `json:"step" doc:"The step that decides: off, local, deny, group, private, dns, allow, pin, open, default, name or gate."`
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
	Usage   Usage         `json:"usage" doc:"Its counters, read now."`
}

// NetworkPin is an address a sandbox may reach for a while because a name it
// may ask for has it.
type NetworkPin struct {
	Address netip.Addr `json:"address"`
	Name    string     `json:"name,omitempty"`
	Expires time.Time  `json:"expires"`
}
