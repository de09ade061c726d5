// Package lab runs projects: it keeps their agents alive, ends experiments
// whose time is over, evaluates, promotes agents into the production
// world and rolls a promotion back whose agents turn out unwell.
//
// A world is a database with agents and a manager of sandboxes. There are two:
// the lab's own and production's, which is opened when it is first needed.
// They share no row, no volume, no cgroup and no sandbox; this package is the
// only one that speaks with both, and a promotion the only act that does.
//
// Whatever is decided is a row first, in one transaction, and acts follow from
// rows: each is safe to repeat, so a daemon that was killed anywhere goes on
// from what it finds. docs/LAB.md has the argument, step by step.
//
// The package does not count usage or rate it (its Books do), builds no
// sandbox and sends nothing: webhooks live on the events it writes. cmd/sandboxd wires it.
package lab
