// Package harness starts built daemons for black-box tests: one installation
// per test, in directories, a cgroup and a network namespace of its own, and
// the checks every such test ends with. It holds no assertions about one
// feature. The packages integration, integration/escape and integration/faults
// use it.
package harness
