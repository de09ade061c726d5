// Package access knows who may do what: callers and their roles, API keys,
// owners with their quotas, and the chained record of who changed what. It
// decides nothing about single sandboxes: package guard does that, with the
// callers of this package.
package access
