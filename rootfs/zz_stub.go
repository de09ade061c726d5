package rootfs

import (
	"context"

	"github.com/sandboxd/sandboxd/sandbox"
)

// DELETE THIS FILE with the landing of diff.go, which defines the method.

// Diff comes soon.
func (s *Store) Diff(context.Context, []string, []string, sandbox.ID, func(sandbox.FileChange) error) error {
	return nil
}
