package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

// daemon is a running sandboxd.
type daemon struct {
	*client.Client
	cmd     *exec.Cmd
	done    chan struct{}
	pool    int
	version string
	socket  string
}

// The sizes of the pool: none for cold starts, a hundred for all else.
const (
	noPool   = 0
	warmPool = 100
)

// config is the daemon's configuration; a pool below 0 leaves the setting out.
func config(volume string, pool int) string {
	c := "volume:\n  size: " + volume + "\n"
	if pool >= 0 {
		c += fmt.Sprintf("pool:\n  size: %d\n", pool)
	}
	return c
}

// acceptsPool asks the daemon whether its configuration knows a pool.
func (b *bench) acceptsPool(ctx context.Context) bool {
	path := filepath.Join(b.dir, "probe.yaml")
	if os.WriteFile(path, []byte(config("1g", warmPool)), 0o600) != nil {
		return false
	}
	return exec.CommandContext(ctx, filepath.Join(b.bin, "sandboxd"), "--check-config", "--config", path).Run() == nil
}

// ours returns a daemon with a pool of this size: the one that runs, if it has
// it, else a new one on the same state directory.
func (b *bench) ours(ctx context.Context, pool int) (*daemon, error) {
	if !b.pools {
		pool = -1
	}
	if b.daemon != nil && b.daemon.pool == pool {
		return b.daemon, nil
	}
	return b.restart(ctx, pool)
}

// restart starts a fresh daemon, without any sandbox.
func (b *bench) restart(ctx context.Context, pool int) (*daemon, error) {
	if !b.pools {
		pool = -1
	}
	if err := b.stopDaemon(ctx); err != nil {
		return nil, err
	}
	path := filepath.Join(b.dir, "config.yaml")
	if err := os.WriteFile(path, []byte(config(b.plan.volume, pool)), 0o600); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(b.dir, "sandboxd.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	leaf, err := os.Open(b.cgroup("daemon"))
	if err != nil {
		return nil, err
	}
	defer leaf.Close()
	run := filepath.Join(b.dir, "run")
	d := &daemon{pool: pool, socket: "unix://" + filepath.Join(run, "sandboxd.sock"), done: make(chan struct{})}
	if d.Client, err = client.New(d.socket); err != nil {
		return nil, err
	}
	// The daemon outlives ctx: stopDaemon ends it in good order.
	d.cmd = exec.CommandContext(context.WithoutCancel(ctx), filepath.Join(b.bin, "sandboxd"),
		"--config", path, "--state-dir", filepath.Join(b.dir, "state"), "--run-dir", run,
		"--cgroup-parent", b.tree+"/boxes", "--cgroup", cgroupMode(), "--log-level", "warn", "--stop-sandboxes")
	d.cmd.Stdout, d.cmd.Stderr, d.cmd.SysProcAttr = log, log, ownGroup(leaf)
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the daemon: %w; 'make build' makes it", err)
	}
	b.daemon = d
	go func() { _ = d.cmd.Wait(); close(d.done) }() // what it said is in its log
	if err := b.answers(ctx, d); err != nil {
		return nil, err
	}
	if err := b.importRoot(ctx, d); err != nil {
		return nil, err
	}
	return d, b.quiet(ctx, 100*time.Millisecond, time.Minute) // until the pool is full
}

// cgroupMode asks for limits wherever the kernel can enforce them.
func cgroupMode() string {
	c, err := os.ReadFile(cgroupMount + "/cgroup.controllers")
	for _, want := range []string{"cpu", "memory", "pids", "io"} {
		if err != nil || !strings.Contains(" "+strings.TrimSpace(string(c))+" ", " "+want+" ") {
			return "best-effort"
		}
	}
	return "enforce"
}

// answers waits until the daemon does.
func (b *bench) answers(ctx context.Context, d *daemon) error {
	for deadline := time.Now().Add(2 * time.Minute); ; {
		v, err := d.Version(ctx)
		if err == nil {
			d.version = v.Version
			return nil
		}
		select {
		case <-d.done:
			return fmt.Errorf("the daemon ended while it started:\n%s", b.daemonSaid())
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the daemon does not answer: %w\n%s", err, b.daemonSaid())
		}
	}
}

func (b *bench) daemonSaid() string {
	log, err := os.ReadFile(filepath.Join(b.dir, "sandboxd.log"))
	if err != nil {
		return err.Error()
	}
	return string(log[max(0, len(log)-3000):])
}

// importRoot makes our image of the peers' root, unless it is there.
func (b *bench) importRoot(ctx context.Context, d *daemon) error {
	if _, err := d.Image(ctx, imageName); err == nil || !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	tar := exec.CommandContext(ctx, "tar", "-C", b.root, "-c", ".")
	r, err := tar.StdoutPipe()
	if err != nil {
		return err
	}
	if err := tar.Start(); err != nil {
		return fmt.Errorf("pack the root: %w", err)
	}
	_, err = d.ImportImage(ctx, imageName, r)
	if err := errors.Join(err, tar.Wait()); err != nil {
		return fmt.Errorf("import the root as image %s: %w", imageName, err)
	}
	return nil
}

// stopDaemon removes every sandbox and ends the daemon.
func (b *bench) stopDaemon(ctx context.Context) error {
	d := b.daemon
	if d == nil {
		return nil
	}
	b.daemon = nil
	errs := []error{d.removeAll(ctx), d.cmd.Process.Signal(syscall.SIGTERM)}
	select {
	case <-d.done:
	case <-time.After(time.Minute):
		errs = append(errs, errors.New("the daemon outlived SIGTERM by a minute and was killed"), d.cmd.Process.Kill())
		<-d.done
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("end the daemon: %w\n%s", err, b.daemonSaid())
	}
	return nil
}

// removeAll ends every sandbox.
func (d *daemon) removeAll(ctx context.Context) error {
	var ids []string
	for sb, err := range d.All(ctx, sandbox.Filter{Limit: sandbox.MaxPage}) {
		if err != nil {
			return fmt.Errorf("list sandboxes to remove: %w", err)
		}
		ids = append(ids, string(sb.ID))
	}
	return each(4, ids, func(id string) error { _, err := d.Remove(ctx, id); return err })
}

// each calls f for every item, some at a time, and returns all errors.
func each[T any](atOnce int, items []T, f func(T) error) error {
	var wg sync.WaitGroup
	errs := make([]error, len(items))
	slots := make(chan struct{}, atOnce)
	for i, item := range items {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			errs[i] = f(item)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
