package resolver

import (
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"
)

// ResolvConf is where a host says whom it asks for names.
const ResolvConf = "/etc/resolv.conf"

// port is where name servers listen.
const port = 53

// hostConfAge is how often the host's resolv.conf is looked at.
const hostConfAge = 2 * time.Second

// maxServers is how many servers a resolver library reads (MAXNS,
// resolv.conf(5)).
const maxServers = 3

// nameServers returns the servers a resolv.conf's text names, in order, at
// most three. Lines that make no sense are passed over, as resolvers do.
func nameServers(text string) []netip.AddrPort {
	var out []netip.AddrPort
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		addr, err := netip.ParseAddr(fields[1])
		if err != nil {
			continue
		}
		if out = append(out, netip.AddrPortFrom(addr.Unmap(), port)); len(out) == maxServers {
			break
		}
	}
	return out
}

// hostConf follows the resolv.conf of the host. A local stub in it is as good
// as any server: it is the daemon that asks.
type hostConf struct {
	path string

	mu      sync.Mutex
	looked  time.Time
	servers []netip.AddrPort
}

// get returns the servers the file names now, or a moment ago. While it cannot
// be read, the last ones stand.
func (h *hostConf) get() []netip.AddrPort {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.looked.IsZero() && time.Since(h.looked) < hostConfAge {
		return h.servers
	}
	h.looked = time.Now()
	if b, err := os.ReadFile(h.path); err == nil {
		h.servers = nameServers(string(b))
	}
	return h.servers
}
