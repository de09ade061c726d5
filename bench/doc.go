// Command bench measures sandboxd beside runc, crun and bubblewrap on one
// machine: the same root, comparable isolation, in turns, so that whatever
// else the machine does hits everyone alike. The host's own fork, exec and
// file work is the floor under all of them.
//
// It starts a sandboxd of its own in a scratch directory, works in network
// and mount namespaces of its own and in one cgroup, and removes all of them.
// It talks to the daemon as any client does. Numbers, tables and the chart are
// package report's, the peers' commands package peer's. `make bench` runs it;
// docs/PERFORMANCE.md says how to read what it writes.
package main
