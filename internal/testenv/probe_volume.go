package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// imageBytes is more than the least size mkfs.xfs accepts (300 MiB).
const imageBytes = 512 << 20

// onXFS makes an XFS on a sparse loop image and mounts it at ./m in a mount
// namespace of its own, where sh then runs script. Mount and loop device go
// with the namespace.
func onXFS(options, script string) error {
	if err := Root.Missing(); err != nil {
		return err
	}
	for _, tool := range []string{"mkfs.xfs", "xfs_quota", "unshare", "setpriv"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w: apt-get install xfsprogs util-linux", err)
		}
	}
	dir, err := os.MkdirTemp("", "testenv-volume-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.Chmod(dir, 0o711); err != nil { // probeQuota writes as nobody
		return err
	}
	if err := os.Mkdir(dir+"/m", 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(dir+"/img", nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(dir+"/img", imageBytes); err != nil {
		return err
	}
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-euc",
		"mkfs.xfs -q -m reflink=1 img; mount -o loop,"+options+" img m; trap 'umount m' EXIT; "+script)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return errors.New(strings.TrimSpace(fmt.Sprintf("XFS (%s) on a loop image: %v: %s", options, err, out)))
	}
	return nil
}

func probeXFS() error {
	return onXFS("noatime", "echo x >m/a; cp --reflink=always m/a m/b")
}

// probeQuota writes as an unprivileged user: a process with CAP_SYS_RESOURCE
// is not bound by quotas. The small write proves that the large one fails for
// its size.
func probeQuota() error {
	return onXFS("prjquota", `
mkdir -m 0777 m/p
xfs_quota -x -c 'project -s -p m/p 7' -c 'limit -p bhard=1m 7' m >/dev/null
write() { setpriv --reuid 65534 --regid 65534 --clear-groups dd if=/dev/zero of="$1" bs=64k count="$2" 2>&1; }
write m/p/small 4
if write m/p/large 64 >/dev/null; then echo 'a quota of 1 MiB let 4 MiB through' >&2; exit 1; fi`)
}
