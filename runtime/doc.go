// Package runtime is the order of things: it takes a sandbox from nothing to
// gone and puts the house in order after a crash. It alone writes lifecycle
// rows, and it alone introduces the kernel packages to each other.
//
// Order of a creation: intent row and lease, cgroup, upper layer, shell,
// limits, network, root, ready, running row. There is one teardown; failed
// creations, removals, expiries, crashes and recovery after a restart all use
// it, and every step of it is safe to repeat and content to find nothing.
//
// What it does not do: no system calls of its own, no SQL, no HTTP. The API
// server calls it; cmd/sandboxd wires it.
package runtime
