// Package sbx is the program that sandboxes created with cost_entries find as
// /dev/sandbox/sbx, at the end of their PATH: by it what runs inside enters what it costs and earns. It
// writes one line to PID 1's socket and reads one line back, tries again under
// the same key while the daemon is away, and knows nothing else of it.
// cmd/sandbox-init runs it where it is called by that name.
package sbx
