package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// probeSystemd asks whether systemd runs this machine, and dpkg its packages.
func probeSystemd() error {
	b, err := os.ReadFile("/proc/1/comm")
	if err != nil {
		return err
	}
	if name := strings.TrimSpace(string(b)); name != "systemd" {
		return fmt.Errorf("process 1 is %s, not systemd", name)
	}
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return errors.New("process 1 is systemd, but not of this mount namespace")
	}
	_, err = exec.LookPath("dpkg")
	return err
}
