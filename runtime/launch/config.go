package launch

import (
	"github.com/opencontainers/cgroups"
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// idRange is how many ids a sandbox has.
const idRange = 65536

// maskedPaths and readonlyPaths are those of Docker's default profile
// (moby, daemon/pkg/oci/defaults.go). Most belong to an unmapped owner and
// are closed anyway; the masks hold where a kernel is careless.
var (
	maskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi",
		"/sys/firmware", "/sys/devices/virtual/powercap",
	}
	// With a low pid_max, which root of a pid namespace may set from Linux 6.14
	// on, PID 1 could make no thread. What anybody writes to a file of
	// /proc/pressure has the host's kernel work for as long as it is open.
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/pressure", "/proc/sysrq-trigger", "/proc/sys/kernel/pid_max"}
)

// oomScoreAdj of every process in a sandbox, see proc(5). When the machine as a
// whole runs out of memory, sandboxes go before its own services; without this
// they would inherit the low score that keeps the daemon alive.
const oomScoreAdj = 500

// shellConfig is the plan of one shell: pure, no system calls.
//
// /proc/sys stays writable to PID 1, which must write user.max_user_namespaces
// before it gives up rights; for everybody else the kernel's own ownership
// rules hold: what is not of this user namespace belongs to an unmapped id.
//
// There is no seccomp here: libcontainer would compile a filter on every
// start. PID 1's exec thread installs the compiled one. Nor are there mounts on
// /dev: PID 1 makes them itself, at a fraction of the price.
func shellConfig(sk skeleton, spec ShellSpec) *configs.Config {
	gids := []configs.IDMap{{ContainerID: 0, HostID: int64(spec.UIDBase), Size: idRange}}
	uids := append(gids[:1:1], configs.IDMap{ContainerID: sandbox.InitID, HostID: int64(spec.InitID), Size: 1})
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	mounts := []*configs.Mount{
		{Source: "proc", Destination: "/proc", Device: "proc", Flags: quiet},
		{Source: "sysfs", Destination: "/sys", Device: "sysfs", Flags: quiet | unix.MS_RDONLY},
		{Source: sk.dev(spec.ID), Destination: "/dev", Device: "bind", Flags: unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NOEXEC},
	}
	return &configs.Config{
		Rootfs:     sk.root(),
		Readonlyfs: true,
		Hostname:   string(spec.ID),
		Namespaces: configs.Namespaces{
			{Type: configs.NEWUSER},
			{Type: configs.NEWNS},
			{Type: configs.NEWPID},
			{Type: configs.NEWNET},
			{Type: configs.NEWIPC},
			{Type: configs.NEWUTS},
			{Type: configs.NEWCGROUP},
		},
		UIDMappings:   uids,
		GIDMappings:   gids,
		Mounts:        mounts,
		MaskPaths:     maskedPaths,
		ReadonlyPaths: readonlyPaths,
		Capabilities:  allCapabilities(),
		NoNewKeyring:  false,
		OomScoreAdj:   new(oomScoreAdj),
		Cgroups: &cgroups.Cgroup{
			Path:      spec.CgroupPath,
			Resources: &cgroups.Resources{Devices: deviceRules()},
		},
	}
}

// deviceRules allows the nodes of /dev and pseudo terminals, nothing else.
// Nobody inside may make a node (no MKNOD outside the first user namespace);
// the rules are the second wall.
func deviceRules() []*devices.Rule {
	rules := []*devices.Rule{{Type: devices.WildcardDevice, Major: devices.Wildcard, Minor: devices.Wildcard, Permissions: "rwm", Allow: false}}
	allow := func(major, minor int64) {
		rules = append(rules, &devices.Rule{Type: devices.CharDevice, Major: major, Minor: minor, Permissions: "rw", Allow: true})
	}
	for _, d := range deviceNodes {
		allow(int64(d.major), int64(d.minor))
	}
	allow(5, 2)                  // ptmx
	allow(136, devices.Wildcard) // pts
	return rules
}

// allCapabilities is what PID 1 holds inside its own user namespace. The
// thread that starts workloads gives up all but the profile's.
func allCapabilities() *configs.Capabilities {
	all := make([]string, 0, len(capabilityNames))
	all = append(all, capabilityNames...)
	// Ambient, because exec takes the others from whoever is not user 0.
	return &configs.Capabilities{Bounding: all, Effective: all, Permitted: all, Inheritable: all, Ambient: all}
}

var capabilityNames = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_NET_ADMIN", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_SYS_ADMIN", "CAP_SYS_RESOURCE",
}
