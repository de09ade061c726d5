// Package initbin carries sandbox-init, PID 1 of every sandbox, inside the
// daemon, so that the two are always of one version. `make build` builds that
// program first and puts it here; git ignores it. Only cmd/sandboxd imports
// this package.
package initbin

import _ "embed"

// Binary is the sandbox-init program. If the compiler says that no file
// matches the pattern below, run `make build` once.
//
//go:embed sandbox-init
var Binary []byte
