// Package launch builds and removes shells: a PID 1 in namespaces and a cgroup
// of its own, on a skeleton root, waiting to be given a real one. It is the
// only user of libcontainer, which is careful and slow; nothing on a request's
// hot path calls it once the pool exists.
//
// It deliberately knows nothing of images, limits or networks: the runtime
// adds those to a shell through the other packages. cmd/sandboxd and the
// runtime call it.
package launch
