// Package seccomp compiles the system call filter of every workload, once, in
// the daemon; PID 1 installs the result on the thread that forks workloads.
//
// It starts from the default profile containers commonly run with and takes
// away: other architectures, tracing, io_uring, namespaces and mounts of any
// kind, socket families and protocols a workload has no use for, pushing
// input into terminals, and signals to PID 1. It makes no decision per
// sandbox. Callers: cmd/sandboxd, through runtime.
package seccomp
