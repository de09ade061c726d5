// Package e2b speaks the wire protocol of the E2B SDK, so that programs written
// for it run on this daemon by environment variables alone (docs/E2B.md): the
// control plane (sandboxes, snapshots, templates), the data plane that a
// sandbox has on port 49983 there (processes and files), and HTTP into the
// other ports of a sandbox. One handler serves all of them.
//
// It holds no state of its own: what the dialect knows of a sandbox beyond its
// spec stands in one label of it, and tokens are derived from ids. It starts
// no listener and decides no rights; cmd/sandboxd gives it the manager, who
// callers are, and the listener.
package e2b
