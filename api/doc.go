// Package api holds what the server and its clients must agree on: the
// bodies and stream messages of API v1, its header names, and the one table
// between error classes and HTTP statuses.
//
// It serves nothing and calls nobody; api/server and api/client do. Records
// that already have their wire names in package sandbox are not repeated here.
package api
