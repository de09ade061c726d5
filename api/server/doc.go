// Package server is the native HTTP API of the daemon: JSON over HTTP with an
// OpenAPI 3.1 document generated from the Go types, events by server-sent
// events, process streams by WebSocket and files as plain bodies.
//
// It keeps no state of its own and decides nothing about sandboxes: every
// request becomes one call of Manager. It never holds more than a frame of a
// stream in memory, so a reader that does not read blocks only itself.
// cmd/sandboxd calls it.
package server
