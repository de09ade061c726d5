package peer

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	profile "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// OCI is one runtime with the command line of runc.
type OCI struct {
	name   string
	args   []string // program and global options
	dir    string   // bundles and the runtime's own state
	root   string
	cgroup string
	log    *os.File

	noDevices bool // see NoDevices
	limits    *Limits
}

// Limits are what a container may use.
type Limits struct {
	CPUs        int64
	MemoryBytes int64 // without any swap
	PIDs        int64
}

// NewOCI returns the runtime called name, "runc" or "crun". It keeps its
// files below dir, what it notes of running containers below run, runs its containers on root and in cgroups below the
// cgroup2 path cgroup, and writes what the runtime says to log.
func NewOCI(name, dir, run, root, cgroup string, log *os.File) (*OCI, error) {
	program, err := exec.LookPath(name)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w; install the Debian package %s", name, err, name)
	}
	r := &OCI{name: name, dir: filepath.Join(dir, name), root: root, cgroup: cgroup, log: log}
	r.args = []string{program, "--root", filepath.Join(run, name)}
	if name == "crun" {
		r.args = append(r.args, "--cgroup-manager=cgroupfs")
		all := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
		r.noDevices = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &all) != nil
	}
	return r, os.MkdirAll(r.dir, 0o700)
}

// NoDevices tells whether its containers go without a device program: crun
// raises its limit of locked memory before it loads one, and ends where the
// machine does not let it. It then has less to do than the others.
func (r *OCI) NoDevices() bool { return r.noDevices }

// Limit sets what containers prepared from now on may use. The host must be
// able to enforce it.
func (r *OCI) Limit(l Limits) { r.limits = &l }

// Cgroup returns the cgroup2 path of container id.
func (r *OCI) Cgroup(id string) string { return filepath.Join(r.cgroup, r.name+"-"+id) }

// Name returns the name of the runtime.
func (r *OCI) Name() string { return r.name }

// Prepare writes the bundle of container id, whose process will be argv.
func (r *OCI) Prepare(id string, argv ...string) error { return r.PrepareOn(r.root, id, argv...) }

// PrepareOn is Prepare on a root of the container's own.
func (r *OCI) PrepareOn(root, id string, argv ...string) error {
	spec, err := r.spec(root, id, argv)
	if err != nil {
		return err
	}
	b, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("bundle of %s container %s: %w", r.name, id, err)
	}
	dir := filepath.Join(r.dir, id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("bundle of %s container %s: %w", r.name, id, err)
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
}

func (r *OCI) command(ctx context.Context, args ...string) *exec.Cmd {
	argv := append(r.args[1:len(r.args):len(r.args)], args...)
	cmd := exec.CommandContext(ctx, r.args[0], argv...)
	cmd.Stderr = r.log
	return cmd
}

// Run returns the command that runs a prepared container to its end.
func (r *OCI) Run(ctx context.Context, id string) (*exec.Cmd, error) {
	return r.command(ctx, "run", "--bundle", filepath.Join(r.dir, id), id), nil
}

// Start starts a prepared container in the background.
func (r *OCI) Start(ctx context.Context, id string) error {
	cmd := r.command(ctx, "run", "--detach", "--bundle", filepath.Join(r.dir, id), id)
	cmd.Stdout = r.log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("start %s container %s: %w; it says: %s", r.name, id, err, tail(r.log))
	}
	return nil
}

// Exec returns the command that runs argv in a started container.
func (r *OCI) Exec(ctx context.Context, id string, argv ...string) *exec.Cmd {
	args := []string{"exec"}
	if r.name == "crun" { // runc takes it from the bundle
		args = append(args, "--no-new-privs")
	}
	return r.command(ctx, append(append(args, id), argv...)...)
}

// Delete returns the command that kills and removes a container.
func (r *OCI) Delete(ctx context.Context, id string) *exec.Cmd {
	return r.command(ctx, "delete", "--force", id)
}

// Clean deletes whatever containers the runtime still knows.
func (r *OCI) Clean(ctx context.Context) {
	known, err := os.ReadDir(filepath.Join(r.dir, "state"))
	if err != nil {
		return // never used
	}
	for _, e := range known {
		_ = r.Delete(ctx, e.Name()).Run() // gone already is what we want
	}
}

// capabilities are those of a container in common use.
var capabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
}

// spec is a container as people commonly run them: the usual mounts, masks
// and capabilities, and the default system call filter.
func (r *OCI) spec(root, id string, argv []string) (*specs.Spec, error) {
	s := &specs.Spec{
		Version:  "1.0.2", // the runtimes of Debian 12
		Hostname: "bench",
		Root:     &specs.Root{Path: root, Readonly: true},
		Process: &specs.Process{
			Args: argv, Cwd: "/", Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
			{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: r.Cgroup(id),
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.NetworkNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.CgroupNamespace},
			},
			MaskedPaths: []string{
				"/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats",
				"/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap",
			},
			ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
	s.Linux.Resources = r.resources()
	filter, err := profile.GetDefaultProfile(s)
	if err != nil {
		return nil, fmt.Errorf("default system call filter: %w", err)
	}
	s.Linux.Seccomp = filter
	return s, nil
}

func (r *OCI) resources() *specs.LinuxResources {
	var res specs.LinuxResources
	if !r.noDevices {
		res.Devices = []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	}
	if l := r.limits; l != nil {
		period := uint64(100_000) // µs, the kernel's own choice
		quota := l.CPUs * int64(period)
		res.CPU = &specs.LinuxCPU{Period: &period, Quota: &quota}
		res.Memory = &specs.LinuxMemory{Limit: &l.MemoryBytes, Swap: &l.MemoryBytes} // swap counts both
		res.Pids = &specs.LinuxPids{Limit: &l.PIDs}
	}
	return &res
}

// tail returns the end of a log, for errors.
func tail(log *os.File) string {
	b, err := os.ReadFile(log.Name())
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-800):])
}
