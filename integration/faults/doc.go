// Package faults holds probes of what breaks: a killed daemon, a full disk, a
// damaged database, a stream cut short, a tenant that floods. docs/SECURITY.md
// and docs/DESIGN.md name the promise each one holds.
package faults
