package launch

import (
	"fmt"
	"sync"

	"github.com/opencontainers/cgroups"
	_ "github.com/opencontainers/cgroups/devices" // libcontainer refuses to start a container without device rules
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// shellDevices attaches the device program to shells' cgroups. Every shell has the
// same rules, so the program is loaded, and checked by the kernel, for the
// first one only; the others get that very program.
var shellDevices deviceFilter

type deviceFilter struct {
	load func(dir string, r *cgroups.Resources) error // cgroups' own

	mu      sync.Mutex
	program int // descriptor; guarded by mu; 0: none is loaded yet
}

// libcontainer finds what sets a cgroup's rules in this variable of cgroups.
func init() {
	shellDevices.load = cgroups.DevicesSetV2
	cgroups.DevicesSetV2 = shellDevices.set
}

// set bounds the devices of a new cgroup. The rules must be those of
// deviceRules: who changes them per shell must load a program per shell.
func (d *deviceFilter) set(dir string, r *cgroups.Resources) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open cgroup %s: %w", dir, err)
	}
	defer unix.Close(fd)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.program != 0 {
		if err := linux.AttachDeviceProgram(fd, d.program); err == nil {
			return nil
		}
	}
	if err := d.load(dir, r); err != nil {
		return err
	}
	if d.program == 0 {
		// Where the kernel does not tell which it is, each shell loads its own.
		if program, err := linux.DeviceProgram(fd); err == nil {
			d.program = program
		}
	}
	return nil
}
