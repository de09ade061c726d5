package testenv

import (
	"fmt"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// probeNetem puts a netem queue on the loopback link of a network namespace
// of its own.
func probeNetem() error {
	return onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		out, err := exec.Command("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms").CombinedOutput()
		if err != nil {
			return fmt.Errorf("delay a link by netem: %w: %s", err, strings.TrimSpace(string(out)))
		}
		return nil
	})
}
