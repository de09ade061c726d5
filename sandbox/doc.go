// Package sandbox is the vocabulary of the project: ids, specs, statuses and
// the moves permitted between them, end reasons, error classes and the plain
// records the other packages exchange.
//
// It imports nothing of ours and touches neither kernel nor disk, so that
// every package may import it. JSON tags are the wire names of API v1.
package sandbox
