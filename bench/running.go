package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/bench/peer"
	"github.com/sandboxd/sandboxd/bench/report"
	"github.com/sandboxd/sandboxd/sandbox"
)

// cli names our command line where it takes part beside the API.
const cli = report.Us + " cli"

// containers starts an idle container of runc and crun, and returns them with
// what removes them.
func (b *bench) containers(ctx context.Context, id string) ([]*peer.OCI, func() error, error) {
	both := []*peer.OCI{b.runc, b.crun}
	remove := func() error {
		var errs []error
		for _, p := range both {
			errs = append(errs, p.Delete(context.WithoutCancel(ctx), id).Run())
		}
		return errors.Join(errs...)
	}
	for _, p := range both {
		if err := p.Prepare(id, forever...); err != nil {
			return nil, nil, err
		}
		if err := p.Start(ctx, id); err != nil {
			return nil, nil, errors.Join(err, remove())
		}
	}
	return both, remove, nil
}

// ran times a command from its start until it was waited for.
func (b *bench) ran(cmd *exec.Cmd) (float64, error) {
	start := time.Now()
	err := cmd.Run()
	took := millis(start)
	if err != nil {
		return 0, fmt.Errorf("%q: %w; it says: %s", cmd.Args, err, b.peerSaid())
	}
	return took, nil
}

// execTrue runs /bin/true in sandboxes that are there.
func execTrue(ctx context.Context, b *bench, d *daemon, id string) (err error) {
	oci, removePeers, err := b.containers(ctx, "exec")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, removePeers()) }()
	for _, s := range []struct {
		name, title string
		nop         []string
	}{
		{"exec", "exec of /bin/true to its end", []string{"/bin/true"}},
		{"exec-static", "exec of a static program that does nothing (busybox true)", []string{"/bin/busybox", "true"}},
	} {
		if err := execNop(ctx, b, d, id, oci, setting{name: s.name, title: s.title, unit: "ms", note: "host: fork, exec and wait of the same program"}, s.nop); err != nil {
			return err
		}
	}
	return nil
}

// execNop runs a program that does nothing everywhere.
func execNop(ctx context.Context, b *bench, d *daemon, id string, oci []*peer.OCI, what setting, nop []string) error {
	cs := []contestant{
		{report.Floor, func(ctx context.Context) (float64, error) { return b.ran(b.onHost(ctx, nop...)) }},
		{report.Us, func(ctx context.Context) (float64, error) {
			start := time.Now()
			p, err := d.Exec(ctx, id, sandbox.ProcessSpec{Argv: nop})
			if err != nil {
				return 0, err
			}
			_, err = drain(p)
			return millis(start), err
		}},
		{cli, func(ctx context.Context) (float64, error) {
			return b.ran(exec.CommandContext(ctx, filepath.Join(b.bin, "sandbox"), append([]string{"--host", d.socket, "exec", id, "--"}, nop...)...))
		}},
	}
	for _, p := range oci {
		cs = append(cs, contestant{p.Name(), func(ctx context.Context) (float64, error) {
			return b.ran(p.Exec(ctx, "exec", nop...))
		}})
	}
	return b.rounds(ctx, what, b.plan.exec, b.plan.warmUp, b.settled, cs...)
}

// destroy removes a sandbox with a process that sleeps: the time of the
// request.
func destroy(ctx context.Context, b *bench) error {
	d, err := b.ours(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	cs := []contestant{{report.Us, func(ctx context.Context) (float64, error) {
		id, remove, err := d.inUse(ctx)
		if err != nil {
			return 0, err
		}
		b.owes = true
		_, err = d.StartProcess(ctx, id, sandbox.ProcessSpec{Argv: forever})
		if err := errors.Join(err, b.settled(ctx)); err != nil {
			return 0, errors.Join(err, remove())
		}
		start := time.Now()
		_, err = d.Remove(ctx, id)
		return millis(start), err
	}}}
	for _, p := range []*peer.OCI{b.runc, b.crun} {
		if err := p.Prepare("gone", forever...); err != nil {
			return err
		}
		cs = append(cs, contestant{p.Name(), func(ctx context.Context) (float64, error) {
			if err := errors.Join(p.Start(ctx, "gone"), b.settled(ctx)); err != nil {
				return 0, err
			}
			return b.ran(p.Delete(ctx, "gone"))
		}})
	}
	return b.rounds(ctx, setting{
		name: "destroy", title: "removal of a running sandbox", unit: "ms",
		note: "with a process that sleeps; sandboxd: the DELETE request; peers: delete --force",
	}, b.plan.destroy, b.plan.warmUp, b.settled, cs...)
}

// reset gives a sandbox its first files again, and checks that it did.
func reset(ctx context.Context, b *bench, d *daemon, id string) error {
	return b.rounds(ctx, setting{name: "reset", title: "reset of a sandbox with a changed file", unit: "ms"},
		b.plan.reset, b.plan.warmUp, b.settled, contestant{report.Us, func(ctx context.Context) (float64, error) {
			if _, err := d.Files(id).Write(ctx, "", "/root/changed", 0o600, strings.NewReader("changed")); err != nil {
				return 0, err
			}
			start := time.Now()
			_, err := d.Reset(ctx, id)
			took := millis(start)
			if err != nil {
				return 0, err
			}
			_, err = d.Files(id).Stat(ctx, "", "/root/changed")
			switch {
			case err == nil:
				return 0, errors.New("the changed file outlived the reset")
			case !errors.Is(err, sandbox.ErrNotFound):
				return 0, err
			}
			return took, nil
		}})
}
