// Package guest is the daemon's side of the protocol PID 1 of a sandbox
// speaks: configuration and root switches, processes and their streams, files.
//
// It holds no connection while idle, but for event streams, and remembers
// nothing: PID 1 does. Everything read from PID 1 is taken for hostile, for a
// workload may have got hold of it: frames, lists and texts are bounded, and
// what does not parse is an error of this one operation. Its only caller is
// package runtime.
package guest
