// Package linux holds the raw system calls that golang.org/x/sys/unix does not
// wrap, or wraps without the care they need here: mount trees as descriptors,
// project quotas, loop devices, thread credentials.
//
// It decides nothing: every function is one kernel operation, with the man
// page or kernel document it follows. The kernel packages and runtime call it.
package linux
