package ingress

import (
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// target is what a host name asks for.
type target struct {
	port int
	ref  string // an id or a name, whole
}

// parseHost reads the Host of a request: <port>-<id or name>.<domain>, in any
// case, with a port and a last dot as clients may add. domain is in lower case
// without a dot in front. False where it names no sandbox's port.
func parseHost(host, domain string) (target, bool) {
	if domain == "" || len(host) > 300 {
		return target{}, false
	}
	host = strings.ToLower(host)
	if name, port, ok := strings.Cut(host, ":"); ok {
		if port != "" {
			if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
				return target{}, false
			}
		}
		host = name
	}
	host = strings.TrimSuffix(host, ".")
	label, ok := strings.CutSuffix(host, "."+domain)
	// One label, so that one wildcard in DNS and one certificate serve all.
	if !ok || len(label) > 63 || strings.Contains(label, ".") {
		return target{}, false
	}
	number, ref, ok := strings.Cut(label, "-")
	port, good := portOf(number)
	if !ok || !good {
		return target{}, false
	}
	if _, err := sandbox.ParseID(ref); err != nil && sandbox.ValidateName(ref) != nil {
		return target{}, false
	}
	return target{port: port, ref: ref}, true
}

// portOf reads a port as it is written, without leading zeros.
func portOf(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return int(n), err == nil && n > 0 && s[0] != '0'
}
