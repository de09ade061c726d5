package peer

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/sandboxd/sandboxd/internal/seccomp"
)

// Bubblewrap runs bwrap.
type Bubblewrap struct {
	program string
	root    string
	filter  string // path of the compiled system call filter
	log     *os.File
	ready   map[string]prepared
}

type prepared struct {
	root string
	argv []string
}

// NewBubblewrap returns bubblewrap on root. Its filter is the one our own
// sandboxes run under, compiled once into a file in dir: bwrap takes no other
// form.
func NewBubblewrap(dir, root string, log *os.File) (*Bubblewrap, error) {
	program, err := exec.LookPath("bwrap")
	if err != nil {
		return nil, fmt.Errorf("find bwrap: %w; install the Debian package bubblewrap", err)
	}
	program, err = filepath.Abs(program)
	if err != nil {
		return nil, err
	}
	filter, err := seccomp.Compile()
	if err != nil {
		return nil, err
	}
	b := &Bubblewrap{program: program, root: root, filter: filepath.Join(dir, "seccomp.bpf"), log: log, ready: map[string]prepared{}}
	return b, os.WriteFile(b.filter, filter, 0o600)
}

// Name returns "bwrap".
func (b *Bubblewrap) Name() string { return "bwrap" }

// Prepare remembers what id will run: bwrap keeps nothing on disk.
func (b *Bubblewrap) Prepare(id string, argv ...string) error {
	return b.PrepareOn(b.root, id, argv...)
}

// PrepareOn is Prepare on a root of the sandbox's own.
func (b *Bubblewrap) PrepareOn(root, id string, argv ...string) error {
	b.ready[id] = prepared{root, argv}
	return nil
}

// Run returns the command that runs a prepared sandbox to its end. The caller
// closes its extra file afterwards: each run reads the filter from a
// descriptor of its own.
func (b *Bubblewrap) Run(ctx context.Context, id string) (*exec.Cmd, error) {
	filter, err := os.Open(b.filter)
	if err != nil {
		return nil, fmt.Errorf("system call filter for bwrap: %w", err)
	}
	args := append([]string{
		"--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup", // the mount namespace always
		"--hostname", "bench", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
		"--ro-bind", b.ready[id].root, "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
		"--seccomp", "3", "--",
	}, b.ready[id].argv...)
	cmd := exec.CommandContext(ctx, b.program, args...)
	cmd.Stderr = b.log
	cmd.ExtraFiles = []*os.File{filter}
	return cmd, nil
}
