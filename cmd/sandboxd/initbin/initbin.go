// Package initbin carries the programs that start a sandbox inside the daemon,
// so that all are always of one version. `make build` builds them first and
// puts them here; git ignores them. Only cmd/sandboxd imports this package.
package initbin

import "embed"

// If the compiler says that no file matches the pattern below, run
// `make build` once.
//
//go:embed sandbox-*
var files embed.FS

// Init returns sandbox-init, PID 1 of every sandbox.
func Init() ([]byte, error) { return files.ReadFile("sandbox-init") }

// Shell returns sandbox-shell, which makes the way for it.
func Shell() ([]byte, error) { return files.ReadFile("sandbox-shell") }
