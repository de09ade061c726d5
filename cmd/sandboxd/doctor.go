package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/mattn/go-sqlite3"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

// doctor checks what the daemon needs of its host and says how to mend it.
type doctor struct {
	cfg   config
	parts parts
}

func newDoctor(c config, p parts) *doctor { return &doctor{c, p} }

// Checks runs every check; it changes nothing.
func (d *doctor) Checks(_ context.Context) []sandbox.Check {
	return []sandbox.Check{
		checkKernel(), d.checkCgroup(), checkUserNamespaces(), checkFilesystem("overlay", "overlay root filesystems", "modprobe overlay"),
		d.checkQuota(), checkNFTables(), checkLandlock(), checkForwarding(), checkFirewall(), checkQueues(), d.checkNames(), d.checkDisk(), d.checkVolume(), checkSQLite(), checkLibcontainer(), checkSelf(), d.checkQuarantine(),
	}
}

func ok(name, detail string) sandbox.Check {
	return sandbox.Check{Name: name, Status: sandbox.CheckOK, Detail: detail}
}

func warn(name, detail, mend string) sandbox.Check {
	return sandbox.Check{Name: name, Status: sandbox.CheckWarn, Detail: detail, Mend: mend}
}

func fail(name, detail, mend string) sandbox.Check {
	return sandbox.Check{Name: name, Status: sandbox.CheckFail, Detail: detail, Mend: mend}
}

// kernelVersion returns the running kernel's major and minor number.
func kernelVersion() (release string, major, minor int) {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown", 0, 0
	}
	release = unix.ByteSliceToString(u.Release[:])
	parts := strings.FieldsFunc(release, func(r rune) bool { return r < '0' || r > '9' })
	if len(parts) >= 2 {
		major, _ = strconv.Atoi(parts[0])
		minor, _ = strconv.Atoi(parts[1])
	}
	return release, major, minor
}

func checkKernel() sandbox.Check {
	release, major, minor := kernelVersion()
	if major > 6 || major == 6 && minor >= 1 {
		return ok("kernel", "Linux "+release)
	}
	return fail("kernel", "Linux "+release+": overlay on idmapped mounts with an upper layer needs 6.1", "install a kernel 6.1 or newer (Debian 12 has 6.1) and reboot")
}

func (d *doctor) checkCgroup() sandbox.Check {
	have := d.parts.tree.Controllers()
	var missing []string
	for _, want := range []string{"cpu", "cpuset", "memory", "pids", "io"} {
		if !slices.Contains(have, want) {
			missing = append(missing, want)
		}
	}
	if len(missing) == 0 {
		return ok("cgroup", "version 2 with "+strings.Join(have, " "))
	}
	return warn("cgroup", "the version 2 tree lacks "+strings.Join(missing, ", ")+": those limits are NOT enforced",
		"boot with systemd.unified_cgroup_hierarchy=1 (and without cgroup_no_v1=), so that no version 1 tree holds the controllers")
}

func checkUserNamespaces() sandbox.Check {
	b, err := os.ReadFile("/proc/sys/user/max_user_namespaces")
	if err != nil {
		return fail("user namespaces", "the kernel has none", "boot a kernel with CONFIG_USER_NS")
	}
	if n := strings.TrimSpace(string(b)); n == "0" {
		return fail("user namespaces", "user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces=65536")
	}
	return ok("user namespaces", "up to "+strings.TrimSpace(string(b)))
}

func checkFilesystem(name, what, mend string) sandbox.Check {
	b, err := os.ReadFile("/proc/filesystems")
	if err == nil && slices.Contains(strings.Fields(string(b)), name) {
		return ok(name, what)
	}
	return fail(name, "the kernel knows no "+name, mend)
}

func (d *doctor) checkQuota() sandbox.Check {
	l := sandbox.Limits{DiskBytes: 1 << 30, DiskInodes: 1000}
	for _, e := range d.parts.roots.Enforcement(l) {
		if !e.Enforced {
			return warn("disk quota", "disk limits are NOT enforced: "+e.Why, "use a kernel with XFS or ext4 project quotas (Debian's has both) and install xfsprogs")
		}
	}
	return ok("disk quota", "project quotas hold bytes and inodes")
}

func checkNFTables() sandbox.Check {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return fail("nftables", "no netfilter netlink: "+err.Error(), "modprobe nf_tables")
	}
	_ = unix.Close(fd)
	return ok("nftables", "table inet sandboxd is in place")
}

func checkLandlock() sandbox.Check {
	// landlock_create_ruleset(NULL, 0, LANDLOCK_CREATE_RULESET_VERSION)
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, 1)
	if errno != 0 {
		return fail("landlock", "not available: "+errno.Error(), "boot with lsm=landlock,… (CONFIG_SECURITY_LANDLOCK)")
	}
	if abi < 2 {
		return fail("landlock", fmt.Sprintf("ABI %d, 2 is needed", abi), "install a kernel 6.1 or newer")
	}
	return ok("landlock", fmt.Sprintf("ABI %d", abi))
}

func checkForwarding() sandbox.Check {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	if err != nil {
		return warn("forwarding", err.Error(), "sandboxes with --net open will reach nothing")
	}
	return ok("forwarding", "net.ipv4.ip_forward="+strings.TrimSpace(string(b))+"; sandboxd switches forwarding on only where a sandbox needs it")
}

func (d *doctor) checkDisk() sandbox.Check {
	var st unix.Statfs_t
	if err := unix.Statfs(d.cfg.StateDir, &st); err != nil {
		return fail("disk space", err.Error(), "check state_dir "+d.cfg.StateDir)
	}
	free := st.Bavail * uint64(st.Bsize)
	detail := fmt.Sprintf("%d MiB free in %s", free>>20, d.cfg.StateDir)
	if free < 1<<30 {
		return warn("disk space", detail, "make room: a full disk stops every sandbox")
	}
	return ok("disk space", detail)
}

// checkVolume finds a volume that is nearly full: its loop image takes the same
// of the disk whatever it holds.
func (d *doctor) checkVolume() sandbox.Check {
	now, err := d.parts.roots.Space()
	if err != nil {
		return fail("volume space", err.Error(), "check the volume in "+d.cfg.StateDir)
	}
	detail := fmt.Sprintf("%d of %d MiB free on the volume", now.Free>>20, now.Total>>20)
	mend := "make room: sandbox ls -a, sandbox snapshot ls, sandbox volume ls, sandbox image prune"
	switch now.Level(rootfs.SpaceLow) { // a little before owners are held
	case rootfs.SpaceFull:
		return fail("volume space", detail+": owners with a disk quota can have no more", mend)
	case rootfs.SpaceLow:
		return warn("volume space", detail+": owners with more than their share can have no more", mend)
	}
	return ok("volume space", detail)
}

// checkQuarantine tells of a world that makes, starts and removes nothing.
func (d *doctor) checkQuarantine() sandbox.Check {
	why := d.parts.whose.why
	if far := d.parts.news.far.Load(); why == "" && far != nil && far.Quarantined() != "" {
		why = "production world: " + far.Quarantined()
	}
	if why == "" {
		return ok("quarantine", "none: databases and volumes belong together")
	}
	return fail("quarantine", why+"; nothing is made, started or removed", "put the right database back, or stop the daemon (running sandboxes go on) and run 'sandboxd recover'")
}

func checkSQLite() sandbox.Check {
	v, n, _ := sqlite3.Version()
	if n < 3051003 {
		return fail("sqlite", v+" has the WAL reset bug", "build with github.com/mattn/go-sqlite3 1.14.52 or newer")
	}
	return ok("sqlite", v)
}

func checkLibcontainer() sandbox.Check {
	info, found := debug.ReadBuildInfo()
	if found {
		for _, dep := range info.Deps {
			if dep.Path == "github.com/opencontainers/runc" {
				return ok("libcontainer", dep.Version)
			}
		}
	}
	return warn("libcontainer", "the build does not tell its version", "build with module information")
}

// checkSelf tells what the daemon itself holds. None of it should grow with
// sandboxes that are gone.
func checkSelf() sandbox.Check {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return warn("daemon", err.Error(), "")
	}
	rss := "unknown memory"
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		if f := strings.Fields(string(b)); len(f) > 1 {
			pages, _ := strconv.Atoi(f[1])
			rss = fmt.Sprintf("%d MiB resident", pages*os.Getpagesize()>>20)
		}
	}
	return ok("daemon", fmt.Sprintf("%d goroutines, %d descriptors, %s", runtime.NumGoroutine(), len(fds), rss))
}
