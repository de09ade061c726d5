// Package ingress is how people reach servers in sandboxes: ports of the host
// that lead to ports of sandboxes (TCP and UDP), and one HTTP listener that
// finds the sandbox by the name asked for, <port>-<sandbox>.<domain>.
//
// It dials through the runtime, which knows the way, and holds no state that a
// crash could lose: rows say what is published, and tokens are kept as hashes.
// It changes no firewall rule, ends no TLS, and checks nothing of what passes.
// cmd/sandboxd makes it, calls Start after recovery, and hands its methods to
// the API.
package ingress
