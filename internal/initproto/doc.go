// Package initproto is the wire protocol between the daemon and PID 1 of a
// sandbox: framing, its bounds, and the arguments and replies of each
// operation.
//
// It opens no socket and knows no file descriptor; internal/initd (PID 1) and
// runtime/guest (the daemon) do. Both sides decode the other's bytes with
// ReadFrame: PID 1 because the daemon may be of another version, the daemon
// because a workload may have taken over PID 1.
package initproto
