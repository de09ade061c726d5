package peer

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// TestBundleIsComparable reads a bundle as a runtime would: it must ask for
// every namespace and the filter that the comparison promises.
func TestBundleIsComparable(t *testing.T) {
	r := &OCI{name: "runc", dir: t.TempDir(), root: "/some/root", cgroup: "/bench/peers"}
	if err := r.Prepare("a1", "/bin/echo", "hello"); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(r.dir, "a1", "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var s specs.Spec
	if err := json.Unmarshal(b, &s); err != nil {
		t.Fatal(err)
	}
	for _, want := range []specs.LinuxNamespaceType{"pid", "mount", "network", "ipc", "uts", "cgroup"} {
		if !slices.ContainsFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == want && n.Path == "" }) {
			t.Errorf("no new %s namespace", want)
		}
	}
	if s.Linux.Seccomp == nil || s.Linux.Seccomp.DefaultAction != specs.ActErrno || len(s.Linux.Seccomp.Syscalls) == 0 {
		t.Errorf("system call filter: %+v", s.Linux.Seccomp)
	}
	if !s.Process.NoNewPrivileges || s.Linux.CgroupsPath != "/bench/peers/runc-a1" || s.Root.Path != "/some/root" {
		t.Errorf("no_new_privs %v, cgroup %s, root %s", s.Process.NoNewPrivileges, s.Linux.CgroupsPath, s.Root.Path)
	}
}

// TestBundleHasLimits looks for them, and for none where none were set.
func TestBundleHasLimits(t *testing.T) {
	r := &OCI{name: "crun", dir: t.TempDir()}
	if res := r.resources(); res.CPU != nil || res.Memory != nil || res.Pids != nil || len(res.Devices) != 1 {
		t.Errorf("without limits: %+v", res)
	}
	r.Limit(Limits{CPUs: 2, MemoryBytes: 1 << 20, PIDs: 9})
	res := r.resources()
	if *res.CPU.Quota != 2*int64(*res.CPU.Period) || *res.Memory.Limit != 1<<20 || *res.Memory.Swap != 1<<20 || *res.Pids.Limit != 9 {
		t.Errorf("with limits: %+v", res)
	}
}

func TestCommandsDoNotShareArguments(t *testing.T) {
	r := &OCI{name: "crun", args: append(make([]string, 0, 8), "/usr/bin/crun", "--root", "/x"), dir: "/d"}
	a, b := r.Exec(t.Context(), "one", "true"), r.Delete(t.Context(), "two")
	if want := []string{"/usr/bin/crun", "--root", "/x", "exec", "--no-new-privs", "one", "true"}; !slices.Equal(a.Args, want) {
		t.Errorf("exec: %q, want %q", a.Args, want)
	}
	if want := []string{"/usr/bin/crun", "--root", "/x", "delete", "--force", "two"}; !slices.Equal(b.Args, want) {
		t.Errorf("delete: %q, want %q", b.Args, want)
	}
}
