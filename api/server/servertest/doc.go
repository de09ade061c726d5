// Package servertest is a Manager that keeps everything in memory, for the
// tests of the server, the client and the command line. Its commands are a
// handful written in Go (see Run); they start nothing on the host. No product
// code imports it.
package servertest
