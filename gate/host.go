package gate

import (
	"errors"
	"net/netip"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// target is where a request wants to go.
type target struct {
	host string     // normalised name, or the address in its one form
	addr netip.Addr // valid where host is an address
	port uint16
}

// String returns host:port, the form of a rule that permits it.
func (t target) String() string {
	if t.host == "" {
		return ""
	}
	return t.host + ":" + strconv.Itoa(int(t.port))
}

// authority returns what stands in a Host header: the port only where it is
// not the scheme's own.
func (t target) authority(own uint16) string {
	if t.port == own {
		return t.host
	}
	return t.String()
}

// The complaints about hosts.
var (
	errNoHost   = errors.New("it names no host")
	errUserinfo = errors.New("a user before the host has no place there")
	errIPv6     = errors.New("sandboxes have no IPv6")
	errPort     = errors.New("its port is not a number from 1 to 65535")
	errHost     = errors.New("its host is neither a name in ASCII nor a plain IPv4 address")
)

// parseAuthority reads host[:port] of a request.
func parseAuthority(s string, defaultPort uint16) (target, error) {
	t := target{port: defaultPort}
	switch {
	case s == "":
		return t, errNoHost
	case strings.Contains(s, "@"):
		return t, errUserinfo
	case strings.HasPrefix(s, "["):
		return t, errIPv6
	}
	host, port, hasPort := strings.Cut(s, ":")
	if hasPort && port != "" {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 || port[0] == '+' {
			return t, errPort
		}
		t.port = uint16(n)
	}
	var err error
	t.host, t.addr, err = parseHost(host)
	return t, err
}

// parseHost brings a host into the one form it is judged and sent in: lower
// case, without a last dot. What libraries may take for an address and others
// for a name (127.1, 0x7f.0.0.1, 2130706433) is neither.
func parseHost(s string) (string, netip.Addr, error) {
	if s == "" || s == "." {
		return "", netip.Addr{}, errNoHost
	}
	if a, err := netip.ParseAddr(s); err == nil {
		if !a.Is4() {
			return "", netip.Addr{}, errIPv6
		}
		return a.String(), a, nil
	}
	if strings.Contains(s, "*") {
		return "", netip.Addr{}, errHost
	}
	name, err := sandbox.NormalizeDomain(s)
	if err != nil || strings.HasSuffix(name, ".") || numeric(name[strings.LastIndexByte(name, '.')+1:]) {
		return "", netip.Addr{}, errHost
	}
	return name, netip.Addr{}, nil
}

// numeric tells of a last label that makes inet_aton(3) read an address: a
// decimal, octal or hexadecimal number.
func numeric(label string) bool {
	if strings.Trim(label, "0123456789") == "" {
		return true
	}
	hex, ok := strings.CutPrefix(label, "0x")
	return ok && strings.Trim(hex, "0123456789abcdef") == ""
}
