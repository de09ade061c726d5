// Package escape holds probes of the walls around a sandbox: each tries to
// reach the host, PID 1 or a neighbour, and each has a positive control in
// which the same probe succeeds. docs/SECURITY.md names the wall it holds.
package escape
