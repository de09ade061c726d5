// Package initd is what PID 1 of a sandbox does: it reaps, runs commands and
// keeps a bounded piece of each one's output, does file work inside, and
// takes new roots. cmd/sandbox-init is its only caller; runtime/guest speaks
// with it through internal/initproto.
//
// PID 1 has two halves. Its ordinary threads keep the rights of the sandbox's
// user namespace, which mounting needs. Every command is forked from one
// thread that has given them up for good (worker.go), and every file is
// opened by a thread that has become the user who asked (files.go).
//
// It deliberately knows nothing of the host: no limits, no network, no
// lifecycle. It trusts the daemon and nothing inside the sandbox: names in
// the user's root are resolved on descriptors, never by PID 1's own rights
// where a user's are meant.
package initd
