// Package mcp lets agents use sandboxes as tools of the Model Context
// Protocol: over stdio for a client on this machine, and as streamable HTTP
// on the daemon's own handler.
//
// It decides nothing about sandboxes and checks no rights: each tool is a call
// or two of Daemon, which the daemon's guarded manager and the Go client both
// are. What it adds is bounds: everything it answers ends somewhere, and says
// what was left out and how to get that. cmd/sandbox and api/server call it.
package mcp
