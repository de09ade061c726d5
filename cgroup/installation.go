package cgroup

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// installationMark is where the parent cgroup says whose sandboxes it holds.
const installationMark = "trusted.sandboxd.installation"

// Installation returns whose sandboxes the parent cgroup holds, as SetInstallation
// wrote it; none where nobody did.
func (t *Tree) Installation() string {
	id := make([]byte, 256)
	n, err := unix.Getxattr(t.dir, installationMark, id)
	if err != nil {
		return ""
	}
	return string(id[:n])
}

// SetInstallation writes down whose sandboxes the parent cgroup holds.
func (t *Tree) SetInstallation(id string) error {
	if err := unix.Setxattr(t.dir, installationMark, []byte(id), 0); err != nil {
		return fmt.Errorf("marking the parent cgroup %s: %w", t.parent, err)
	}
	return nil
}
