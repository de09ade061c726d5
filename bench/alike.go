package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// namespaces are those every contestant must have of its own.
var namespaces = []string{"pid", "mnt", "net", "ipc", "uts", "cgroup"}

// confess prints, from inside, what a sandbox is made of: the system call
// filter's mode (2 is a filter, see proc_pid_status(5)), no_new_privs, and the
// namespaces.
const confess = `while read -r k v; do case $k in Seccomp:|NoNewPrivs:) echo "$k$v";; esac; done < /proc/self/status
for n in pid mnt net ipc uts cgroup; do readlink /proc/self/ns/$n; done`

// alike runs every contestant once and makes sure that it isolates what the
// comparison says. A figure without that would be worth nothing.
func (b *bench) alike(ctx context.Context) (err error) {
	d, err := b.ours(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	host, err := hostNamespaces()
	if err != nil {
		return err
	}
	id, remove, err := d.inUse(ctx)
	if err != nil {
		return err
	}
	said, err := d.says(ctx, id, confess)
	if err := errors.Join(err, b.limited(filepath.Join(b.tree, "boxes", id, "work")), remove()); err != nil {
		return err
	}
	if err := isolates(said, host); err != nil {
		return fmt.Errorf("sandboxd: %w", err)
	}
	oci, removePeers, err := b.containers(ctx, "alike-exec")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, removePeers()) }()
	for _, p := range oci {
		if err := b.confesses(p.Name()+" exec", p.Exec(ctx, "alike-exec", "/bin/sh", "-c", confess), host); err != nil {
			return err
		}
		if err := b.limited(p.Cgroup("alike-exec")); err != nil {
			return fmt.Errorf("%s: %w", p.Name(), err)
		}
	}
	for _, p := range b.peers() {
		if err := p.Prepare("alike", "/bin/sh", "-c", confess); err != nil {
			return err
		}
		cmd, err := p.Run(ctx, "alike")
		if err != nil {
			return err
		}
		if err := b.confesses(p.Name(), cmd, host); err != nil {
			return err
		}
	}
	return nil
}

// confesses runs a peer's command that says what it is made of.
func (b *bench) confesses(who string, cmd *exec.Cmd, host map[string]bool) error {
	said, err := cmd.Output()
	for _, f := range cmd.ExtraFiles {
		f.Close()
	}
	if err != nil {
		return fmt.Errorf("%s: %w; it says: %s", who, err, b.peerSaid())
	}
	if err := isolates(string(said), host); err != nil {
		return fmt.Errorf("%s: %w", who, err)
	}
	return nil
}

// limited makes sure that a cgroup has the limits everyone has, where the host
// can enforce them.
func (b *bench) limited(cgroup string) error {
	if cgroupMode() != enforce {
		return nil
	}
	for file, want := range map[string]string{
		"cpu.max":         fmt.Sprintf("%d00000 100000", limits.CPUs),
		"memory.max":      strconv.FormatInt(limits.MemoryBytes, 10),
		"memory.swap.max": "0",
		"pids.max":        strconv.FormatInt(limits.PIDs, 10),
	} {
		got, err := os.ReadFile(filepath.Join(cgroupMount, cgroup, file))
		if errors.Is(err, os.ErrNotExist) && file == "memory.swap.max" {
			continue // a kernel without swap
		}
		if err != nil {
			return fmt.Errorf("is there a limit: %w", err)
		}
		if strings.TrimSpace(string(got)) != want {
			return fmt.Errorf("cgroup %s: %s is %q, want %q", cgroup, file, got, want)
		}
	}
	return nil
}

func hostNamespaces() (map[string]bool, error) {
	host := map[string]bool{}
	for _, n := range namespaces {
		link, err := os.Readlink("/proc/self/ns/" + n)
		if err != nil {
			return nil, fmt.Errorf("this program's namespaces: %w", err)
		}
		host[link] = true
	}
	return host, nil
}

// isolates judges what a sandbox said of itself.
func isolates(said string, host map[string]bool) error {
	own := map[string]bool{}
	for line := range strings.FieldsSeq(said) {
		kind, _, _ := strings.Cut(line, ":[")
		own[kind] = !host[line]
	}
	for _, fact := range []string{"Seccomp:2", "NoNewPrivs:1"} {
		if _, ok := own[fact]; !ok {
			return fmt.Errorf("no %s in %q", fact, said)
		}
	}
	for _, n := range namespaces {
		if !own[n] {
			return fmt.Errorf("no %s namespace of its own: %q", n, said)
		}
	}
	return nil
}

// says runs a shell script in a sandbox and returns what it writes.
func (d *daemon) says(ctx context.Context, id, script string) (string, error) {
	p, err := d.StartProcess(ctx, id, sandbox.ProcessSpec{Argv: []string{"/bin/sh", "-c", script}})
	if err != nil {
		return "", err
	}
	r, err := d.Output(ctx, id, p.ID, 0, true)
	if err != nil {
		return "", err
	}
	defer r.Close()
	said, err := io.ReadAll(r)
	return string(said), err
}
