package sandbox

import (
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Port is a port of a sandbox that the host listens for. It stays while the
// sandbox lives, stopped or not, and goes with it.
type Port struct {
	ID        string     `json:"id"`
	Sandbox   ID         `json:"sandbox"`
	Protocol  string     `json:"protocol" enum:"tcp,udp"`
	Address   netip.Addr `json:"address" doc:"Of the host; where it is listened."`
	HostPort  uint16     `json:"host_port"`
	Port      uint16     `json:"port" doc:"Of the sandbox."`
	Public    bool       `json:"public,omitempty" doc:"Reached by its host name without a token, too."`
	CreatedAt time.Time  `json:"created_at"`
	Error     string     `json:"error,omitempty" doc:"Why it is not listened for now; it is tried again."`
}

// PortRequest asks for a port to be published.
type PortRequest struct {
	Protocol string     `json:"protocol,omitempty" enum:"tcp,udp" doc:"tcp if left out."`
	Address  netip.Addr `json:"address,omitzero" doc:"Address of the host to listen on; the daemon's publish_address if left out."`
	HostPort uint16     `json:"host_port,omitempty" doc:"0: one that is free."`
	Port     uint16     `json:"port" minimum:"1" doc:"Of the sandbox."`
	Public   bool       `json:"public,omitempty" doc:"Let requests by its host name in without a token; tcp only."`
}

// HostName is a name that host names lead by, and the owner to whose sandboxes.
type HostName struct {
	Name   string    `json:"name"`
	Owner  string    `json:"owner" doc:"Who holds it."`
	UsedAt time.Time `json:"used_at" doc:"When its last sandbox was created or ended."`
}

// NewPortID returns a fresh random id: "po" and 12 lowercase base32
// characters.
func NewPortID() string { return "po" + randomName() }

// ParsePort reads [[ADDRESS:]HOSTPORT:]PORT[/tcp|/udp]; an IPv6 address
// stands in brackets. Errors are of class ErrInvalid, code invalid_port.
func ParsePort(text string) (PortRequest, error) {
	r := PortRequest{Protocol: ProtocolTCP}
	bad := func(why string) (PortRequest, error) {
		return PortRequest{}, Errorf(ErrInvalid, "invalid_port", "port %.80q: %s; write it as 8080:80, 127.0.0.1:8080:80 or 5353:53/udp", text, why)
	}
	rest := text
	if head, proto, ok := cutLast(rest, "/"); ok {
		if proto == "" {
			return bad("nothing stands after the /")
		}
		rest, r.Protocol = head, proto
	}
	host, port, both := cutLast(rest, ":")
	if !both {
		host, port = "", rest
	}
	var ok bool
	if r.Port, ok = portNumber(port); !ok || r.Port == 0 {
		return bad("the last number is no port of the sandbox")
	}
	if both {
		address, hostPort, has := cutLast(host, ":")
		if !has {
			address, hostPort = "", host
		}
		if r.HostPort, ok = portNumber(hostPort); !ok {
			return bad("the number before it is no port of the host")
		}
		if has {
			a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(address, "["), "]"))
			if err != nil {
				return bad("what stands first is no address")
			}
			r.Address = a
		}
	}
	return r, r.Validate()
}

func portNumber(s string) (uint16, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil && s[0] != '+'
}

// Validate checks what can be judged without a host.
func (r PortRequest) Validate() error {
	bad := func(format string, args ...any) error { return Errorf(ErrInvalid, "invalid_port", format, args...) }
	switch {
	case r.Port == 0:
		return bad("port: use 1 to 65535")
	case r.Protocol != "" && r.Protocol != ProtocolTCP && r.Protocol != ProtocolUDP:
		return bad("protocol %.20q: use tcp or udp", r.Protocol)
	case r.Protocol == ProtocolUDP && r.Public:
		return bad("public: host names are for HTTP, which needs tcp")
	case r.Address.IsMulticast() || r.Address.Zone() != "":
		return bad("address %s: use a unicast address of the host, without a zone", r.Address)
	}
	return nil
}

// Where returns where the port is listened for, as 127.0.0.1:8080.
func (p Port) Where() netip.AddrPort { return netip.AddrPortFrom(p.Address, p.HostPort) }
