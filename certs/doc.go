// Package certs keeps the certificate the daemon shows to clients: it makes
// one, with an authority of its own, and follows the files when they change.
// It trusts nobody and checks no client. Its caller is the daemon.
package certs
