package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/bench/peer"
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

// noPool is the size of the pool for cold starts.
const noPool = 0

// limits are those of every sandbox, and of the peers' containers where the
// host can enforce them.
var limits = peer.Limits{CPUs: 1, MemoryBytes: 512 << 20, PIDs: 512}

// config is the daemon's configuration.
func config(volume string, pool int) string {
	return fmt.Sprintf("volume:\n  size: %s\npool:\n  size: %d\ndefault_limits:\n  cpus: %d\n  memory: %d\n  pids: %d\n",
		volume, pool, limits.CPUs, limits.MemoryBytes, limits.PIDs)
}

// ours returns a daemon with a pool of this size: the one that runs, if it has
// it, else a new one on the same state directory.
func (b *bench) ours(ctx context.Context, pool int) (*daemon, error) {
	if b.daemon != nil && b.daemon.pool == pool {
		return b.daemon, nil
	}
	return b.restart(ctx, pool)
}

// restart starts a fresh daemon, without any sandbox.
func (b *bench) restart(ctx context.Context, pool int) (*daemon, error) {
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
	run := filepath.Join(b.run(), "sandboxd")
	d := &daemon{pool: pool, socket: "unix://" + filepath.Join(run, "sandboxd.sock"), done: make(chan struct{})}
	if d.Client, err = client.New(d.socket); err != nil {
		return nil, err
	}
	// The daemon outlives ctx: stopDaemon ends it in good order.
	d.cmd = exec.CommandContext(context.WithoutCancel(ctx), filepath.Join(b.bin, "sandboxd"),
		"--config", path, "--state-dir", b.stateDir, "--run-dir", run,
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
	b.owes = true
	return d, errors.Join(b.paid(ctx), b.quiet(ctx, 100*time.Millisecond, time.Minute))
}

// paid waits until the daemon has made up for what our samples used and left:
// shells of the pool, files in the trash. It asks only after such a sample, so
// that no other contestant, nor we, find the daemon fresh from a request.
func (b *bench) paid(ctx context.Context) error {
	if !b.owes || b.daemon == nil {
		return nil
	}
	err := b.tidy(ctx, func(p sandbox.PoolStats) bool { return p.Ready >= p.Target })
	b.owes = err != nil
	return err
}

// trash returns what the daemon has still to delete.
func (b *bench) trash() (left []os.DirEntry, err error) {
	ways, err := b.volume("trash")
	for _, way := range ways {
		if left, err = os.ReadDir(way); err == nil {
			return left, nil
		}
	}
	return nil, err
}

// volume is the ways to a directory of the daemon's volume. Any of its threads
// shows its mounts, but for the odd one that is parked in a sandbox's, or ends.
func (b *bench) volume(name string) ([]string, error) {
	name = filepath.Join("volume", name)
	ways, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(b.daemon.cmd.Process.Pid), "task/*/root", b.stateDir, name))
	if err == nil && len(ways) == 0 {
		err = os.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("look into the daemon's %s: %w", name, err)
	}
	return ways, nil
}

// tidy waits until the pool is as asked for and the trash is empty.
func (b *bench) tidy(ctx context.Context, done func(sandbox.PoolStats) bool) error {
	for deadline := time.Now().Add(5 * time.Minute); ; {
		pool, err := b.daemon.Pool(ctx)
		if err != nil {
			return fmt.Errorf("ask for the pool: %w", err)
		}
		left, err := b.trash()
		if err != nil {
			return err
		}
		if done(pool) && len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("after 5 minutes the pool has %d of %d shells ready and the trash %d directories\n%s", pool.Ready, pool.Target, len(left), b.daemonSaid())
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
}

// enforce is the mode in which the daemon refuses to do without limits.
const enforce = "enforce"

// cgroupMode asks for limits wherever the kernel can enforce them.
func cgroupMode() string {
	c, err := os.ReadFile(cgroupMount + "/cgroup.controllers")
	for _, want := range []string{"cpu", "memory", "pids", "io"} {
		if err != nil || !strings.Contains(" "+strings.TrimSpace(string(c))+" ", " "+want+" ") {
			return "best-effort"
		}
	}
	return enforce
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
	return d.importDir(ctx, imageName, b.root)
}

// importDir makes an image of a directory.
func (d *daemon) importDir(ctx context.Context, image, dir string) error {
	tar := exec.CommandContext(ctx, "tar", "-C", dir, "-c", ".")
	r, err := tar.StdoutPipe()
	if err != nil {
		return err
	}
	if err := tar.Start(); err != nil {
		return fmt.Errorf("pack the root: %w", err)
	}
	_, err = d.ImportImage(ctx, image, r)
	if err := errors.Join(err, tar.Wait()); err != nil {
		return fmt.Errorf("import %s as image %s: %w", dir, image, err)
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
