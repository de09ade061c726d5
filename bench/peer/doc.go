// Package peer runs the sandboxes that ours are compared with: containers of
// runc and crun, and bubblewrap. It gives all of them the same root and
// comparable isolation: pid, mount, network, ipc, uts and cgroup namespaces,
// no_new_privs and a system call filter.
//
// Where they cannot be alike the peers have less to do: no user namespace of
// their own, no writable layer, no network link, no limits. It measures
// nothing; command bench, its only caller, does.
package peer
