package archtest

import (
	"go/token"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// In internal/initd names of a user's are resolved in paths.go alone, by
// openat2(2) beneath the root and through no magic link. Elsewhere a call that
// takes a path would resolve it with PID 1's own rights, and its descriptors.
var pathCalls = map[string][]string{
	"os": {
		"Chdir", "Chmod", "Chown", "Chtimes", "CopyFS", "Create", "CreateTemp", "DirFS", "Lchown", "Link", "Lstat", "Mkdir", "MkdirAll",
		"MkdirTemp", "Open", "OpenFile", "OpenInRoot", "OpenRoot", "ReadDir", "ReadFile", "Readlink", "Remove", "RemoveAll", "Rename", "Stat",
		"Symlink", "Truncate", "WriteFile",
	},
	"golang.org/x/sys/unix": {
		"AT_FDCWD", "Access", "Chdir", "Chmod", "Chown", "Chroot", "Creat", "Faccessat", "Faccessat2", "Getxattr", "InotifyAddWatch", "Lchown",
		"Lgetxattr", "Link", "Listxattr", "Llistxattr", "Lremovexattr", "Lsetxattr", "Lstat", "Mkdir", "Mkfifo", "Mknod", "Open", "Openat",
		"Openat2", "Readlink", "Removexattr", "Rename", "Rmdir", "Setxattr", "Stat", "Statfs", "Statx", "Symlink", "Truncate", "Unlink", "Utime",
		"Utimes", "UtimesNano",
	},
	"syscall": {
		"Access", "Chdir", "Chmod", "Chown", "Chroot", "Creat", "Lchown", "Link", "Lstat", "Mkdir", "Open", "Openat", "Readlink", "Rename", "Rmdir",
		"Stat", "Statfs", "Symlink", "Truncate", "Unlink",
	},
	module + "internal/linux": {"OpenBeneath"},
	"path/filepath":           {"EvalSymlinks", "Glob", "Walk", "WalkDir"},
}

// ownPaths are the files that name places of the kernel's, which PID 1 mounts
// itself and no user can replace (/proc, /dev), or that work while no process
// of a user's is.
var ownPaths = map[string][]string{
	"paths.go":      nil, // anything
	"bootid.go":     {"Open", "AT_FDCWD"},
	"cgroup.go":     {"Open", "ReadFile"}, // /proc
	"configure.go":  {"WriteFile", "AT_FDCWD"},
	"leftnet.go":    {"Open", "Openat"},
	"leftovers.go":  {"Lstat", "Llistxattr", "Open", "ReadDir", "ReadFile", "Unlink", "AT_FDCWD"},
	"rootswitch.go": {"AT_FDCWD", "Chdir", "Chroot"},
	"shared.go":     {"Stat"},
	"stdio.go":      {"Open", "Openat2", "AT_FDCWD"},   // /dev/null and /dev/pts/ptmx
	"sysctls.go":    {"Open", "ReadFile", "WriteFile"}, // names of its own below /proc/sys
}

// strayPath tells whether a file of internal/initd may not use a name.
func strayPath(file, imp, name string) bool {
	if !slices.Contains(pathCalls[imp], name) {
		return false
	}
	own, ok := ownPaths[file]
	return !ok || own != nil && !slices.Contains(own, name)
}

func TestPathsOfUsersInOneFile(t *testing.T) {
	found := map[string]bool{}
	for _, p := range load(t) {
		if p.short() != "internal/initd" {
			continue
		}
		selectors(t, p, func(pos token.Position, imp, name string) {
			file := filepath.Base(pos.Filename)
			if slices.Contains(pathCalls[imp], name) {
				found[file+" "+name], found[file] = true, true
			}
			if strayPath(file, imp, name) {
				t.Errorf("%s: %s.%s takes a path: resolve it with open or resolveIn of paths.go, which stay beneath the root", pos, path.Base(imp), name)
			}
		})
	}
	for file, names := range ownPaths { // or the search itself is broken, and no leave lies about
		if !found[file] {
			t.Errorf("found no call that takes a path in %s", file)
		}
		for _, name := range names {
			if !found[file+" "+name] {
				t.Errorf("%s may use %s and does not: strike that out", file, name)
			}
		}
	}
}

// TestStrayPath is the control: the rule does refuse.
func TestStrayPath(t *testing.T) {
	for _, c := range []struct {
		file, imp, name string
		stray           bool
	}{
		{"exec.go", "golang.org/x/sys/unix", "Stat", true},
		{"files.go", "os", "RemoveAll", true},
		{"users.go", "syscall", "Open", true},
		{"watch.go", module + "internal/linux", "OpenBeneath", true},
		{"shared.go", "golang.org/x/sys/unix", "Open", true},
		{"shared.go", "golang.org/x/sys/unix", "Stat", false},
		{"paths.go", "golang.org/x/sys/unix", "Open", false},
		{"files.go", "golang.org/x/sys/unix", "Fstat", false},
	} {
		if got := strayPath(c.file, c.imp, c.name); got != c.stray {
			t.Errorf("%s: %s.%s: stray %v", c.file, strings.TrimPrefix(c.imp, module), c.name, got)
		}
	}
}
