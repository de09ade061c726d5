package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/bench/report"
	"github.com/sandboxd/sandboxd/sandbox"
)

// scenario is one thing that is measured.
type scenario struct {
	name string
	run  func(context.Context, *bench) error
}

// scenarios in the order they run. Density comes last: it leaves the kernel
// the most to clean up.
var scenarios = []scenario{
	{"warm", createWarm},
	{"idle", createIdle},
	{"cold", createCold},
	{"fresh", createFresh},
	{"exec", inOne(execTrue)},
	{"burst", burst},
	{"churn", churn},
	{"reset", inOne(reset)},
	{"destroy", destroy},
	{"fork", fork},
	{"forks", forks},
	{"rollback", inOne(rollback)},
	{"snapshot", snapshots},
	{"asks", inOne(asks)},
	{"stream", inOne(stream)},
	{"files", files},
	{"forward", forward},
	{"network", network},
	{"density", density},
}

// inOne is a scenario in a sandbox that is there and has been used.
func inOne(run func(ctx context.Context, b *bench, d *daemon, id string) error) func(context.Context, *bench) error {
	return func(ctx context.Context, b *bench) error {
		d, err := b.ours(ctx, b.plan.pool)
		if err != nil {
			return err
		}
		id, remove, err := d.inUse(ctx)
		if err != nil {
			return err
		}
		return errors.Join(run(ctx, b, d, id), remove())
	}
}

// plan says how much of everything.
type plan struct {
	warm, idle, cold, fresh, exec, destroy, reset int // rounds
	warmUp                                        int // rounds before, not counted
	pool                                          int // shells kept ready, but in cold
	burst, bursts                                 int // sandboxes, rounds
	clients                                       []int
	lead                                          time.Duration // of churn, ours, not counted: uses up the pool
	slice                                         time.Duration // of churn at one contestant
	slices                                        int
	streamBytes, fileBytes                        int64
	transfers, smallFiles                         int
	levels                                        []int // idle sandboxes
	densityRounds                                 int
	idleFor                                       time.Duration
	network, netCrowd                             int // rounds, sandboxes with rules
	netSlice                                      time.Duration
	netRounds                                     int
	pings                                         int // round trips to a 99th percentile
	volume                                        string
	calm                                          time.Duration // without work, before each sample
}

// modeVM is the report's mode of a run in the virtual machine.
const modeVM = "vm"

var full = plan{
	warm: 300, idle: 60, cold: 60, fresh: 60, exec: 300, destroy: 100, reset: 100, warmUp: 5, pool: 100,
	burst: 100, bursts: 5, clients: []int{1, 2, 4, 8}, lead: 5 * time.Second, slice: 10 * time.Second, slices: 3,
	streamBytes: 2 << 30, fileBytes: 1 << 30, transfers: 5, smallFiles: 10000,
	levels: []int{0, 250, 1000}, densityRounds: 50, idleFor: 10 * time.Second, volume: "8g",
	network: 60, netCrowd: 1000, netSlice: 2 * time.Second, netRounds: 10, pings: 10000,
	calm: 3 * time.Millisecond,
}

var quick = plan{
	warm: 10, idle: 5, cold: 10, fresh: 5, exec: 20, destroy: 5, reset: 10, warmUp: 1, pool: 100,
	burst: 100, bursts: 1, clients: []int{1, 2, 4, 8}, lead: 2 * time.Second, slice: time.Second, slices: 1,
	streamBytes: 256 << 20, fileBytes: 128 << 20, transfers: 1, smallFiles: 1000,
	levels: []int{0, 50}, densityRounds: 10, idleFor: 3 * time.Second, volume: "2g",
	network: 15, netCrowd: 200, netSlice: time.Second, netRounds: 3, pings: 2000,
	calm: 3 * time.Millisecond,
}

// emulation has the sizes for a machine that is ten to forty times slower.
var emulation = plan{
	warm: 30, idle: 15, cold: 20, fresh: 15, exec: 30, destroy: 20, reset: 20, warmUp: 2, pool: 30,
	burst: 20, bursts: 3, clients: []int{2}, lead: 10 * time.Second, slice: 10 * time.Second, slices: 2,
	streamBytes: 64 << 20, fileBytes: 32 << 20, transfers: 2, smallFiles: 200,
	levels: []int{0, 50}, densityRounds: 5, idleFor: 5 * time.Second, volume: "2g",
	network: 10, netCrowd: 40, netSlice: 5 * time.Second, netRounds: 3, pings: 500,
	calm: 20 * time.Millisecond,
}

// contestant takes one sample of one scenario.
type contestant struct {
	name string
	once func(ctx context.Context) (float64, error)
}

// setting is a scenario's name and how to read it.
type setting struct {
	name, title, note, unit string
	more                    bool
}

// rounds lets the contestants take turns, in each round in another order: what
// one leaves behind in the kernel, unseen, must not always meet the same other.
// Before each sample it waits as before says. The first rounds warm caches and
// do not count.
func (b *bench) rounds(ctx context.Context, s setting, n, warmUp int, before func(context.Context) error, cs ...contestant) error {
	b.rep.Scene(s.name, s.title, s.note)
	order := rand.New(rand.NewPCG(1, 1)) // the same in every run
	for i := -warmUp; i < n; i++ {
		samples := make([]float64, len(cs))
		for _, turn := range order.Perm(len(cs)) {
			c := cs[turn]
			if err := before(ctx); err != nil {
				return err
			}
			var err error
			if samples[turn], err = c.once(ctx); err != nil {
				return fmt.Errorf("%s, %s, round %d: %w", s.name, c.name, i, err)
			}
			b.owes = b.owes || strings.HasPrefix(c.name, report.Us)
		}
		for j, c := range cs {
			if i >= 0 {
				b.rep.Add(s.name, c.name, s.unit, s.more, samples[j])
			}
		}
	}
	return nil
}

// settled waits until the last sample's aftermath is over: the pool is full
// again, the trash is empty, and nothing of the run works. The collection of
// this program's own garbage is not left for the next sample either.
func (b *bench) settled(ctx context.Context) error {
	if err := b.paid(ctx); err != nil {
		return err
	}
	runtime.GC()
	return b.quiet(ctx, b.plan.calm, 100*b.plan.calm)
}

// atRest leaves the host idle: processors go to sleep, and kernel work that
// waits for them takes longer.
func (b *bench) atRest(ctx context.Context) error {
	if err := b.settled(ctx); err != nil {
		return err
	}
	return pause(ctx, 150*time.Millisecond)
}

func millis(since time.Time) float64 { return float64(time.Since(since)) / float64(time.Millisecond) }

// The sample everyone takes: a new sandbox's first byte.
var hello = []string{"/bin/echo", "hello"}

// spec is the sandbox we measure: the daemon's default limits, no network.
func spec() sandbox.Spec { return sandbox.Spec{Image: imageName} }

// live is one of our sandboxes with a command in it.
type live struct {
	id string
	io sandbox.ProcessIO
}

// firstByte creates a sandbox and runs echo in it, to the first byte.
func (d *daemon) firstByte(ctx context.Context, s sandbox.Spec) (live, error) {
	sb, p, err := d.Run(ctx, api.RunRequest{Sandbox: s, Process: api.ExecRequest{ProcessSpec: sandbox.ProcessSpec{Argv: hello}}}, "")
	if err != nil {
		return live{}, fmt.Errorf("run: %w", err)
	}
	l := live{id: string(sb.ID), io: p}
	out, err := l.io.Next()
	if err != nil {
		return l, fmt.Errorf("output of %q in %s: %w", hello, l.id, err)
	}
	if len(out.Data) == 0 || out.Data[0] != hello[1][0] {
		return l, fmt.Errorf("%q in %s wrote %q", hello, l.id, out.Data)
	}
	return l, nil
}

// drain reads a command's output to its end and returns how much there was.
func drain(p sandbox.ProcessIO) (int64, error) {
	defer p.Close()
	var n int64
	for {
		out, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return n, err
		}
		if out.Dropped > 0 {
			return n, fmt.Errorf("%d bytes of output were dropped", out.Dropped)
		}
		n += int64(len(out.Data))
	}
	if exit, ok := p.Exit(); !ok || exit.Code != 0 {
		return n, fmt.Errorf("the command ended with %+v", exit)
	}
	return n, nil
}

// remove ends a command and its sandbox.
func (d *daemon) remove(ctx context.Context, l live) error {
	_, err := drain(l.io)
	_, rerr := d.Remove(ctx, l.id)
	return errors.Join(err, rerr)
}

// create is us in the scenarios of creation.
func (d *daemon) create(ctx context.Context) (float64, error) { return d.createOf(ctx, spec()) }

func (d *daemon) createOf(ctx context.Context, s sandbox.Spec) (float64, error) {
	start := time.Now()
	l, err := d.firstByte(ctx, s)
	took := millis(start)
	if err != nil {
		return 0, err
	}
	return took, d.remove(ctx, l)
}

// runner is a peer that runs a prepared sandbox to its end.
type runner interface {
	Name() string
	Prepare(id string, argv ...string) error
	PrepareOn(root, id string, argv ...string) error
	Run(ctx context.Context, id string) (*exec.Cmd, error)
}

func (b *bench) peers() []runner { return []runner{b.runc, b.crun, b.bwrap} }

// runs is a peer in the scenarios of creation, in what was prepared as id.
func (b *bench) runs(p runner, id string) func(context.Context) (float64, error) {
	return func(ctx context.Context) (float64, error) {
		cmd, err := p.Run(ctx, id)
		if err != nil {
			return 0, err
		}
		return b.output(cmd, time.Now())
	}
}

// output runs a command that says hello and returns when its first byte came,
// in milliseconds after start.
func (b *bench) output(cmd *exec.Cmd, start time.Time) (first float64, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer r.Close()
	cmd.Stdout = w
	err = cmd.Start()
	w.Close()
	for _, f := range cmd.ExtraFiles {
		f.Close()
	}
	if err != nil {
		return 0, err
	}
	buf := make([]byte, 64)
	n, rerr := r.Read(buf)
	first = millis(start)
	rest, lerr := io.ReadAll(r)
	if err := cmd.Wait(); err != nil {
		return 0, fmt.Errorf("%q: %w; it says: %s", cmd.Args, err, b.peerSaid())
	}
	if got := string(buf[:n]) + string(rest); got != hello[1]+"\n" {
		return 0, fmt.Errorf("%q wrote %q", cmd.Args, got)
	}
	if errors.Is(rerr, io.EOF) {
		rerr = nil
	}
	return first, errors.Join(rerr, lerr)
}

func (b *bench) peerSaid() string {
	log, err := os.ReadFile(b.peerLog.Name())
	if err != nil {
		return err.Error()
	}
	return string(log[max(0, len(log)-800):])
}

// onHost is a program of the root, run on the host itself: the floor.
func (b *bench) onHost(ctx context.Context, argv ...string) *exec.Cmd {
	return exec.CommandContext(ctx, filepath.Join(b.root, argv[0]), argv[1:]...)
}

// field of contestants of the scenarios of creation.
func (b *bench) creators(d *daemon) ([]contestant, error) {
	cs := []contestant{
		{report.Floor, func(ctx context.Context) (float64, error) {
			return b.output(b.onHost(ctx, hello...), time.Now())
		}},
		{report.Us, d.create},
	}
	for _, p := range b.peers() {
		if err := p.Prepare("echo", hello...); err != nil {
			return nil, err
		}
		cs = append(cs, contestant{p.Name(), b.runs(p, "echo")})
	}
	return cs, nil
}

// creation runs one scenario of creation on a daemon with a pool of this size.
func (b *bench) creation(ctx context.Context, s setting, pool, n int, before func(context.Context) error) error {
	d, err := b.ours(ctx, pool)
	if err != nil {
		return err
	}
	cs, err := b.creators(d)
	if err != nil {
		return err
	}
	s.unit = "ms"
	return b.rounds(ctx, s, n, b.plan.warmUp, before, cs...)
}

func createWarm(ctx context.Context, b *bench) error {
	return b.creation(ctx, setting{
		name: "create-warm", title: "new sandbox → first byte of echo, warm",
		note: "sandboxd: one request over the unix socket; peers: run",
	}, b.plan.pool, b.plan.warm, b.settled)
}

func createIdle(ctx context.Context, b *bench) error {
	return b.creation(ctx, setting{
		name: "create-idle", title: "the same on an idle host",
		note: "after 150 ms of rest before every sample",
	}, b.plan.pool, b.plan.idle, b.atRest)
}

func createCold(ctx context.Context, b *bench) error {
	return b.creation(ctx, setting{
		name: "create-cold", title: "new sandbox → first byte of echo, cold",
		note: "sandboxd without a pool",
	}, noPool, b.plan.cold, b.settled)
}

// inUse is a fresh, idle sandbox of ours, and what removes it.
func (d *daemon) inUse(ctx context.Context) (id string, remove func() error, err error) {
	sb, err := d.Create(ctx, spec(), "")
	if err != nil {
		return "", nil, fmt.Errorf("create: %w", err)
	}
	return string(sb.ID), func() error {
		_, err := d.Remove(context.WithoutCancel(ctx), string(sb.ID))
		return err
	}, nil
}

// forever is the process of a peer's idle container.
var forever = []string{"/bin/sleep", strconv.Itoa(1 << 30)}
