// Package client is the Go SDK of the daemon's HTTP API. Its methods mirror
// the routes; errors come back as *sandbox.Error with the class, the code
// and the detail they had in the daemon. A process stream is a
// sandbox.ProcessIO that outlives a broken connection and a restart of the
// daemon; file work is a sandbox.Files.
//
// It knows nothing of the command line; cmd/sandbox and other programs call it.
package client
