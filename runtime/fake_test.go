package runtime

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// kernel is a model of the host for tests without root: which objects exist,
// and which step is to fail. A real child process stands in for each PID 1.
type kernel struct {
	t  *testing.T
	mu sync.Mutex

	cgroups, uppers, links, sockets map[sandbox.ID]bool
	pids                            map[sandbox.ID]int
	frozen                          map[sandbox.ID]bool
	notes                           map[sandbox.ID][]byte
	plain                           bool // nobody wrote to an upper
	oom                             map[sandbox.ID]uint64
	cpu                             map[sandbox.ID]uint64 // microseconds, by the cgroups there are
	burnt                           uint64                // by those there were
	fail                            map[string]bool       // step name → fails
	events                          map[string]chan guest.Event
	layers                          map[string]bool
	procs                           map[sandbox.ID][]sandbox.Process
	configured                      map[sandbox.ID]guest.Config
	before                          map[sandbox.ID]int64 // last process of earlier roots
	volumes                         map[string]rootfs.VolumeLimits
	policies                        map[sandbox.ID]sandbox.NetworkPolicy
	mute                            bool // PID 1s answer nothing
	faults                          map[sandbox.ID]*sandbox.NetworkFault
	disturbed                       []sandbox.ID

	launching chan struct{} // no shell starts before it is closed; nil: at once

	dying chan struct{} // nobody dies before it is closed; nil: at once

	bases  map[sandbox.ID]string
	stamps []string // of uppers, in the order of the questions; then any

	answers map[int64]string // to programs inside

	live int // processes that every PID 1 says it has

	// dieAt names the step at which the daemon is killed: before its effect,
	// or after it. From then on nothing it does has any effect, until revive.
	dieAt string
	after bool
	dead  bool
}

var errInjected = errors.New("injected")

func newKernel(t *testing.T) *kernel {
	k := &kernel{
		t: t, cgroups: map[sandbox.ID]bool{}, uppers: map[sandbox.ID]bool{}, bases: map[sandbox.ID]string{}, links: map[sandbox.ID]bool{}, policies: map[sandbox.ID]sandbox.NetworkPolicy{}, sockets: map[sandbox.ID]bool{},
		pids: map[sandbox.ID]int{}, frozen: map[sandbox.ID]bool{}, notes: map[sandbox.ID][]byte{}, oom: map[sandbox.ID]uint64{}, cpu: map[sandbox.ID]uint64{}, fail: map[string]bool{}, events: map[string]chan guest.Event{}, layers: map[string]bool{},
		procs: map[sandbox.ID][]sandbox.Process{}, configured: map[sandbox.ID]guest.Config{},
		before: map[sandbox.ID]int64{}, faults: map[sandbox.ID]*sandbox.NetworkFault{}, volumes: map[string]rootfs.VolumeLimits{},
	}
	t.Cleanup(func() {
		k.mu.Lock() // a shell may have started late
		defer k.mu.Unlock()
		for _, pid := range k.pids {
			_ = unix.Kill(pid, unix.SIGKILL)
			_, _ = unix.Wait4(pid, nil, 0, nil)
		}
	})
	return k
}

// step runs f as the named step, unless that is to fail.
func (k *kernel) step(name string, f func()) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	dies := k.dieAt == name
	if k.dead || dies && !k.after {
		k.die()
	}
	if k.fail[name] {
		return fmt.Errorf("%s: %w", name, errInjected)
	}
	if f != nil {
		f()
	}
	if dies {
		k.die()
	}
	return nil
}

// die is the daemon's end: what calls it goes no further. k.mu is held.
func (k *kernel) die() {
	k.dead = true
	k.mu.Unlock()
	select {}
}

// killAt lets a daemon be killed at a step.
func (k *kernel) killAt(step string, after bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dieAt, k.after = step, after
}

// waitDead waits for the step at which the daemon is killed.
func (k *kernel) waitDead(t *testing.T, step string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(time.Millisecond) {
		k.mu.Lock()
		dead := k.dead
		k.mu.Unlock()
		if dead {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it did not come to %s", step)
		}
	}
}

func (k *kernel) revive() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dieAt, k.dead = "", false
}

func (k *kernel) setFail(name string, on bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fail[name] = on
}

func (k *kernel) setLive(n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.live = n
}

func (k *kernel) setMute(on bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mute = on
}

// eventsOf is where a test sends the events of a sandbox's PID 1.
func (k *kernel) eventsOf(id sandbox.ID) chan guest.Event {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.events[string(id)] == nil {
		k.events[string(id)] = make(chan guest.Event, 8)
	}
	return k.events[string(id)]
}

// answer is the step of a PID 1 that may be mute.
func (k *kernel) answer(ctx context.Context, name string) error {
	k.mu.Lock()
	mute := k.mute
	k.mu.Unlock()
	if mute {
		<-ctx.Done()
		return sandbox.Errorf(sandbox.ErrDeadline, "deadline", "no answer: %w", ctx.Err())
	}
	return k.step(name, nil)
}

type fakeCgroups struct{ *kernel }

func (f fakeCgroups) Path(id sandbox.ID) string { return "/" + string(id) }
func (f fakeCgroups) Create(id sandbox.ID) error {
	return f.step("cgroup.create", func() { f.cgroups[id] = true })
}

// Hasten changes nothing anybody could see.
func (f fakeCgroups) Hasten() {}

func (f fakeCgroups) Settle(context.Context, sandbox.ID, int, uint32) error {
	return f.step("cgroup.settle", nil)
}

func (f fakeCgroups) LiftIO(sandbox.ID) error { return nil }
func (f fakeCgroups) SetLimits(sandbox.ID, sandbox.Limits) error {
	return f.step("cgroup.limits", nil)
}
func (f fakeCgroups) Enforcement(sandbox.Limits) []sandbox.Enforcement { return nil }
func (f fakeCgroups) MemoryLent(sandbox.ID) uint64                     { return 0 }
func (f fakeCgroups) ShareMemory(sandbox.ID, int64) (uint64, bool)     { return 0, false }
func (f fakeCgroups) Usage(id sandbox.ID) (sandbox.Usage, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.cgroups[id] {
		return sandbox.Usage{}, sandbox.Errorf(sandbox.ErrNotFound, "no_cgroup", "no cgroup")
	}
	return sandbox.Usage{CPUSeconds: 1, CPUMicros: f.cpu[id], OOMKills: f.oom[id]}, nil
}

func (f fakeCgroups) Meter(id sandbox.ID) (sandbox.Usage, error) {
	u, err := f.Usage(id)
	return sandbox.Usage{CPUMicros: u.CPUMicros, MemoryBytes: 1 << 20}, err
}

func (f fakeCgroups) Freeze(_ context.Context, id sandbox.ID) error {
	return f.step("cgroup.freeze", func() { f.frozen[id] = true })
}

func (f fakeCgroups) Thaw(_ context.Context, id sandbox.ID) error {
	return f.step("cgroup.thaw", func() { delete(f.frozen, id) })
}

func (f fakeCgroups) Kill(_ context.Context, id sandbox.ID) error {
	f.mu.Lock()
	dying := f.dying
	f.mu.Unlock()
	if dying != nil {
		<-dying
	}
	return f.step("cgroup.kill", func() {
		if pid := f.pids[id]; pid != 0 {
			_ = unix.Kill(pid, unix.SIGKILL)
			delete(f.pids, id)
		}
	})
}

func (f fakeCgroups) Remove(_ context.Context, id sandbox.ID) error {
	return f.step("cgroup.remove", func() {
		f.burnt += f.cpu[id]
		delete(f.cgroups, id)
		delete(f.frozen, id)
		delete(f.notes, id)
		delete(f.cpu, id)
	})
}

func (f fakeCgroups) NoteEnd(id sandbox.ID, how []byte) error {
	return f.step("cgroup.note", func() { f.notes[id] = how })
}

func (f fakeCgroups) EndNote(id sandbox.ID) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.notes[id]
}

func (f fakeCgroups) List() ([]sandbox.ID, error) { return f.keys(f.cgroups), nil }

func (f fakeCgroups) MemoryShort() (string, bool) {
	err := f.step("memory", nil)
	return fmt.Sprint(err), err != nil
}

func (k *kernel) keys(m map[sandbox.ID]bool) (ids []sandbox.ID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id := range m {
		ids = append(ids, id)
	}
	return ids
}

type fakeNetwork struct{ *kernel }

func (f fakeNetwork) Address(slot int) (netip.Addr, error) {
	return netip.AddrFrom4([4]byte{10, 0, byte(slot >> 8), byte(slot)}), nil
}

func (f fakeNetwork) Attach(_ context.Context, a netns.Attachment) error {
	return f.step("net.attach", func() { f.links[a.ID], f.policies[a.ID] = true, a.Policy })
}

func (f fakeNetwork) Detach(_ context.Context, id sandbox.ID, _ int) error {
	return f.step("net.detach", func() { delete(f.links, id) })
}

func (f fakeNetwork) AllBytes() (map[sandbox.ID]sandbox.NetCounters, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[sandbox.ID]sandbox.NetCounters{}
	for id := range f.links {
		out[id] = sandbox.NetCounters{RxBytes: 1, TxBytes: 2}
	}
	return out, nil
}

func (f fakeNetwork) Counters(sandbox.ID, int) (sandbox.NetCounters, bool, error) {
	return sandbox.NetCounters{RxBytes: 1, TxBytes: 2, Dropped: 3, RxPackets: 4, TxPackets: 5}, true, nil
}

func (f fakeNetwork) DialInside(ctx context.Context, _ *os.File, network string, port uint16) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, fmt.Sprintf("127.0.0.1:%d", port))
}

func (f fakeNetwork) SetPolicy(_ context.Context, a netns.Attachment) error {
	return f.step("net.policy", func() { f.policies[a.ID] = a.Policy })
}

func (f fakeNetwork) CheckPolicy(sandbox.NetworkPolicy) error { return f.step("net.check", nil) }

func (f fakeNetwork) Explain(a netns.Attachment, q sandbox.NetworkQuery) (sandbox.NetworkVerdict, error) {
	v := sandbox.NetworkVerdict{Sandbox: a.ID, Dest: q.Dest, Port: q.Port, Protocol: q.Protocol, Step: string(a.Policy.Mode)}
	return v, f.step("net.explain", nil)
}

func (f fakeNetwork) Pins(sandbox.ID) ([]sandbox.NetworkPin, error) {
	return []sandbox.NetworkPin{{Address: netip.MustParseAddr("93.184.216.34"), Name: "example.com"}}, f.step("net.pins", nil)
}

func (f fakeNetwork) Gateway() netip.Addr { return netip.MustParseAddr("10.0.0.1") }

func (f fakeNetwork) Recover(_ context.Context, keep map[sandbox.ID]netns.Attachment) error {
	err := f.step("net.recover", func() {
		for id := range f.links {
			if _, ok := keep[id]; !ok {
				delete(f.links, id)
			}
		}
		for id, a := range keep {
			f.policies[id] = a.Policy
		}
	})
	if part := f.step("net.recover.part", nil); err == nil && part != nil {
		err = netns.PartlyError{Err: part}
	}
	return err
}

func (f fakeNetwork) SetFault(_ context.Context, a netns.Attachment, fault *sandbox.NetworkFault) error {
	return f.step("net.fault", func() { f.faults[a.ID] = fault })
}

func (f fakeNetwork) Disturbed() []sandbox.ID { return f.disturbed }

func (f fakeNetwork) Enforcement(sandbox.NetworkPolicy) sandbox.Enforcement {
	return sandbox.Enforcement{Limit: "network", Enforced: true}
}

type fakeRoots struct{ *kernel }

func (f fakeRoots) HostImage(context.Context) (sandbox.Image, error) {
	return sandbox.Image{Name: "host", Digest: "host:1", Kind: sandbox.ImageHost}, f.step("rootfs.hostimage", nil)
}

func (f fakeRoots) ImportTar(ctx context.Context, name string, r io.Reader) (sandbox.Image, error) {
	b, err := io.ReadAll(r)
	sandbox.HoldLayers(ctx, string(b))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.layers[string(b)] = true
	return sandbox.Image{Name: name, Digest: "sha256:" + string(b), Kind: sandbox.ImageTar, Layers: []string{string(b)}}, err
}

func (f fakeRoots) Layers() ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Keys(f.layers)), nil
}

func (f fakeRoots) RemoveLayer(digest string) error {
	return f.step("rootfs.layer", func() { delete(f.layers, digest) })
}

func (f fakeRoots) CreateUpper(id sandbox.ID, _ int, _ sandbox.Limits) error {
	return f.CreateUpperOn(id, sandbox.Limits{}, rootfs.FirstBase)
}

func (f fakeRoots) CreateUpperOn(id sandbox.ID, _ sandbox.Limits, base string) error {
	return f.step("rootfs.upper", func() {
		if !f.uppers[id] {
			f.bases[id] = base
		}
		f.uppers[id] = true
	})
}

func (f fakeRoots) UpperBase(id sandbox.ID) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bases[id]
}

func (f fakeRoots) Room() error { return nil }

func (f fakeRoots) Space() (rootfs.Space, error) {
	return rootfs.Space{Free: 1 << 40, Total: 1 << 40}, nil
}

func (f fakeRoots) SetLimits(sandbox.ID, int, sandbox.Limits) error { return nil }

func (f fakeRoots) Mount(context.Context, rootfs.MountSpec) (*rootfs.Root, error) {
	if err := f.step("rootfs.mount", nil); err != nil {
		return nil, err
	}
	root, err := os.Open("/")
	return &rootfs.Root{Mount: root}, err
}

func (f fakeRoots) Usage(sandbox.ID, int) (bytes, inodes uint64, known bool, err error) {
	return 4096, 1, true, nil
}

func (f fakeRoots) Clean(sandbox.ID) error { return f.step("rootfs.clean", nil) }

func (f fakeRoots) Discard(id sandbox.ID, _ int) error {
	return f.step("rootfs.discard", func() { delete(f.uppers, id) })
}

func (f fakeRoots) SetAside(id sandbox.ID, slot int) (func(), error) {
	return func() {}, f.Discard(id, slot)
}

func (f fakeRoots) Furnish(sandbox.ID, sandbox.Image, rootfs.Identity, rootfs.Identity) (bool, error) {
	return true, f.step("rootfs.furnish", nil)
}

func (f fakeRoots) Uppers() ([]sandbox.ID, error)                    { return f.keys(f.uppers), nil }
func (f fakeRoots) Enforcement(sandbox.Limits) []sandbox.Enforcement { return nil }

func (f fakeRoots) NewLayer() string                   { return "upper:" + strings.ToLower(rand.Text()) }
func (f fakeRoots) Sync() error                        { return f.step("rootfs.sync", nil) }
func (f fakeRoots) Unchanged(sandbox.ID) (bool, error) { return f.plain, nil }

func (f fakeRoots) CheckUpper(id sandbox.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.uppers[id] {
		return nil
	}
	return sandbox.Errorf(sandbox.ErrNotFound, "files_gone", "no files of sandbox %s", id)
}

func (f fakeRoots) UpperStamp(sandbox.ID) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.stamps) == 0 {
		return rand.Text(), nil
	}
	stamp := f.stamps[0]
	f.stamps = f.stamps[1:]
	return stamp, nil
}

func (f fakeRoots) ExportPath(context.Context, []string, string, io.Writer) (bool, error) {
	return false, f.step("rootfs.exportpath", nil)
}

func (f fakeRoots) Spool() (*os.File, error) { return os.CreateTemp(f.t.TempDir(), "spool") }

func (f fakeRoots) ExportLayer(_ context.Context, stack []string, i int, w io.Writer) (string, error) {
	if w == nil {
		return "", nil
	}
	_, err := io.WriteString(w, stack[i])
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(stack[i]))), err
}

func (f fakeRoots) ImportLayer(ctx context.Context, diffID string, r io.Reader) (rootfs.LayerInfo, error) {
	sandbox.HoldLayers(ctx, diffID)
	b, err := io.ReadAll(r)
	if err == nil && diffID != fmt.Sprintf("sha256:%x", sha256.Sum256(b)) {
		err = sandbox.Errorf(sandbox.ErrInvalid, "image_digest_mismatch", "another layer")
	}
	if err != nil {
		return rootfs.LayerInfo{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.layers[diffID] = true
	return rootfs.LayerInfo{Digest: diffID}, nil
}

func (f fakeRoots) FreezeUpper(id sandbox.ID, layer string) error {
	return f.step("rootfs.freeze", func() { delete(f.uppers, id); f.layers[layer] = true; f.bases[sandbox.ID(layer)] = f.bases[id] })
}

func (f fakeRoots) ThawUpper(id sandbox.ID, layer string) error {
	return f.step("rootfs.thaw", func() {
		if f.layers[layer] {
			f.uppers[id], f.bases[id] = true, f.bases[sandbox.ID(layer)]
			delete(f.layers, layer)
		}
	})
}

func (f fakeRoots) CopyUpper(_ context.Context, _ sandbox.ID, layer string) ([]string, error) {
	return nil, f.step("rootfs.copy", func() { f.layers[layer] = true })
}

func (f fakeRoots) HasLayer(layer string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.layers[layer]
}

func (f fakeRoots) LayerUsage(context.Context, string) (bytes, files int64, err error) {
	return 4096, 1, nil
}

func (f fakeRoots) Flatten(context.Context, []string) (string, error) {
	layer := f.NewLayer()
	return layer, f.step("rootfs.flatten", func() { f.layers[layer] = true })
}

func (f fakeRoots) Diff(context.Context, []string, []string, sandbox.ID, func(sandbox.FileChange) error) error {
	return f.step("rootfs.diff", nil)
}

type fakeShells struct{ *kernel }

func (f fakeShells) Start(_ context.Context, spec launch.ShellSpec) (*launch.Shell, error) {
	if err := f.step("shell.start", nil); err != nil {
		return nil, err
	}
	if f.launching != nil {
		<-f.launching
	}
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	pid := cmd.Process.Pid
	_ = cmd.Process.Release()
	f.mu.Lock()
	f.sockets[spec.ID], f.pids[spec.ID] = true, pid
	f.mu.Unlock()
	return f.Open(spec.ID, pid, 0)
}

func (f fakeShells) Open(id sandbox.ID, pid int, _ uint64) (*launch.Shell, error) {
	if err := f.step("shell.open", nil); err != nil {
		return nil, err
	}
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrNotFound, "shell_gone", "gone: %w", err)
	}
	ns, err := os.Open(os.DevNull) // what fakeNetwork does not look at
	if err != nil {
		return nil, err
	}
	return &launch.Shell{ID: id, PID: pid, StartTime: 1, NetNS: ns, PIDFD: os.NewFile(uintptr(fd), "pidfd")}, nil
}

func (f fakeShells) Remove(id sandbox.ID) error {
	return f.step("shell.remove", func() { delete(f.sockets, id) })
}
func (f fakeShells) List() ([]sandbox.ID, error)     { return f.keys(f.sockets), nil }
func (f fakeShells) SocketPath(id sandbox.ID) string { return string(id) }
func (f fakeShells) MaxOpenFiles() uint64            { return 4096 }

// fakePID1 answers what lifecycle tests ask of a PID 1.
type fakePID1 struct {
	sandbox.Files
	k    *kernel
	name string
}

func (p fakePID1) id() sandbox.ID { return sandbox.ID(p.name) }

func (p fakePID1) Ping(ctx context.Context) (guest.Info, error) {
	if err := p.k.answer(ctx, "guest.ping"); err != nil {
		return guest.Info{}, err
	}
	if err := p.k.step("guest.version", nil); err != nil {
		return guest.Info{}, sandbox.Errorf(sandbox.ErrUnsupported, "protocol_version", "another version: %w", err)
	}
	p.k.mu.Lock()
	live := p.k.live
	p.k.mu.Unlock()
	return guest.Info{Configured: p.k.step("guest.configured", nil) == nil, Live: live}, nil
}

func (p fakePID1) Prepare(context.Context, guest.PrepareConfig) error {
	return p.k.step("guest.prepare", nil)
}

func (p fakePID1) CloseIdle() {}

func (p fakePID1) Reset(context.Context, string, io.Reader) error { return nil }

func (p fakePID1) Configure(_ context.Context, c guest.Config) error {
	if err := p.k.step("guest.place", nil); err != nil {
		return sandbox.Errorf(sandbox.ErrConflict, "mount_point", "something is in the way: %w", err)
	}
	return p.k.step("guest.configure", func() {
		p.k.configured[p.id()] = c
		if c.Timings != nil {
			c.Timings.Before = p.k.before[p.id()]
		}
	})
}

func (p fakePID1) Start(context.Context, sandbox.ProcessSpec) (sandbox.Process, error) {
	return sandbox.Process{ID: "p1", PID: 2, Argv: []string{"x"}}, nil
}

func (p fakePID1) Exec(_ context.Context, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	if err := p.k.step("guest.exec", nil); err != nil {
		return nil, err
	}
	return fakeIO{proc: sandbox.Process{ID: "p1", PID: 2, Argv: spec.Argv, Main: spec.Main}}, nil
}

func (p fakePID1) Attach(context.Context, sandbox.ProcessID, int64) (sandbox.ProcessIO, error) {
	return nil, errors.ErrUnsupported
}

func (p fakePID1) Processes(ctx context.Context) ([]sandbox.Process, error) {
	if err := p.k.answer(ctx, "guest.processes"); err != nil {
		return nil, err
	}
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return slices.Clone(p.k.procs[p.id()]), nil
}

func (p fakePID1) Answer(_ context.Context, id int64, line string) error {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	if p.k.answers == nil {
		p.k.answers = map[int64]string{}
	}
	p.k.answers[id] = line
	return nil
}

func (p fakePID1) CloseKeys(ctx context.Context) ([]byte, error) {
	if err := p.k.answer(ctx, "guest.keys"); err != nil {
		return nil, err
	}
	return []byte("keys of " + p.name), nil
}
func (p fakePID1) Signal(context.Context, sandbox.ProcessID, string) error { return nil }
func (p fakePID1) Process(ctx context.Context, id sandbox.ProcessID) (sandbox.Process, error) {
	procs, err := p.Processes(ctx)
	if i := slices.IndexFunc(procs, func(p sandbox.Process) bool { return p.ID == id }); i >= 0 {
		return procs[i], err
	}
	return sandbox.Process{}, errors.Join(err, sandbox.ErrNotFound)
}

func (p fakePID1) Events(ctx context.Context, _ int64) (ProcessEvents, error) {
	ctx, cancel := context.WithCancel(ctx)
	p.k.mu.Lock()
	before := p.k.before[p.id()]
	p.k.mu.Unlock()
	return &fakeEvents{ctx, cancel, p.k.eventsOf(p.id()), guest.Info{Before: before}}, nil
}

// fakeIO is a connection to a process that says nothing.
type fakeIO struct {
	sandbox.ProcessIO
	proc sandbox.Process
}

func (f fakeIO) Process() sandbox.Process      { return f.proc }
func (f fakeIO) Close() error                  { return nil }
func (f fakeIO) Next() (sandbox.Output, error) { return sandbox.Output{}, io.EOF }
func (f fakeIO) Exit() (sandbox.ExitStatus, bool) {
	return sandbox.ExitStatus{}, true
}

type fakeEvents struct {
	ctx    context.Context //nolint:containedctx // the stream's own life, as a connection's
	cancel context.CancelFunc
	ch     chan guest.Event
	info   guest.Info
}

func (e *fakeEvents) Next() (guest.Event, error) {
	select {
	case ev := <-e.ch:
		return ev, nil
	case <-e.ctx.Done():
		return guest.Event{}, io.EOF
	}
}
func (e *fakeEvents) Info() guest.Info { return e.info }
func (e *fakeEvents) Close() error     { e.cancel(); return nil }

// house is a manager over the model with a real database.
type house struct {
	*Manager
	k      *kernel
	db     *state.DB
	gone   sync.Once
	closed sync.Once
}

// open starts a manager as a daemon does: over what an earlier one left. It
// has no pool.
func open(t *testing.T, k *kernel, dir string) *house {
	t.Helper()
	return openPool(t, k, dir, 8, PoolConfig{})
}

func openPool(t *testing.T, k *kernel, dir string, slots int, pool PoolConfig) *house {
	t.Helper()
	return openWith(t, k, dir, func(c *Config) { c.Slots, c.Pool = slots, pool })
}

// openWith is open with another configuration.
func openWith(t *testing.T, k *kernel, dir string, change func(*Config)) *house {
	t.Helper()
	h, err := tryOpen(t, k, dir, change)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// tryOpen is openWith that may fail to recover.
func tryOpen(t *testing.T, k *kernel, dir string, change func(*Config)) (*house, error) {
	t.Helper()
	db, err := state.Open(t.Context(), filepath.Join(dir, "sandboxd.db"))
	if err != nil {
		t.Fatal(err)
	}
	c := Config{
		DefaultImage: "host", Slots: 8, UIDBase: 1 << 29, BootID: "boot-1", KeepEnded: 100, KeepEvents: 1000,
		Dial: func(s string) PID1 { return fakePID1{k: k, name: s} }, Log: slog.New(slog.DiscardHandler),
	}
	change(&c)
	m := New(c, db, fakeCgroups{k}, fakeNetwork{k}, fakeRoots{k}, fakeShells{k})
	h := &house{Manager: m, k: k, db: db}
	t.Cleanup(h.crash)
	return h, m.Recover(t.Context())
}

// crash ends the manager as kill -9 would: no teardown, no last write.
func (h *house) crash() {
	h.gone.Do(func() {
		patience := 5 * time.Second
		h.k.mu.Lock()
		if h.k.dead { // what goes on cannot come to an end
			patience = 20 * time.Millisecond
		}
		h.k.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = h.Close(ctx)
		h.closeDB()
	})
}

// closeDB ends every writing, once.
func (h *house) closeDB() { h.closed.Do(func() { _ = h.db.Close() }) }

// agree checks that database and model tell the same story, once what goes on
// in the background has had its time.
func (h *house) agree(t *testing.T) {
	t.Helper()
	var wrong []string
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); <-time.After(2 * time.Millisecond) {
		if wrong = h.differences(t); len(wrong) == 0 {
			return
		}
	}
	t.Error(strings.Join(wrong, "; "))
}

func (h *house) differences(t *testing.T) (wrong []string) {
	t.Helper()
	rows, err := h.db.Living(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	tell := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	full, upper := map[sandbox.ID]bool{}, map[sandbox.ID]bool{}
	h.pool.mu.Lock()
	for _, s := range h.pool.ready {
		full[s.b.id], upper[s.b.id] = true, true
	}
	h.pool.mu.Unlock()
	for _, r := range rows {
		upper[r.ID] = true
		if r.Status == sandbox.StatusRunning || r.Status == sandbox.StatusPaused {
			full[r.ID] = true
		} else if r.Status != sandbox.StatusStopped {
			tell("%s is left %s", r.ID, r.Status)
		}
	}
	h.k.mu.Lock()
	defer h.k.mu.Unlock()
	for what, c := range map[string]struct{ have, want map[sandbox.ID]bool }{
		"cgroups": {h.k.cgroups, full}, "links": {h.k.links, full}, "sockets": {h.k.sockets, full}, "uppers": {h.k.uppers, upper},
	} {
		for id := range c.have {
			if !c.want[id] {
				tell("%s: %s is left over", what, id)
			}
		}
		for id := range c.want {
			if !c.have[id] {
				tell("%s: %s is missing", what, id)
			}
		}
	}
	for id := range h.k.pids {
		if !full[id] {
			tell("PID 1 of %s is left over", id)
		}
	}
	return wrong
}

// reboot ends all that runs; the upper of bare and a layer, renamed from the
// upper last, had not reached the disk.
func (k *kernel) reboot(bare sandbox.ID, layer string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, pid := range k.pids {
		_ = unix.Kill(pid, unix.SIGKILL)
		_, _ = unix.Wait4(pid, nil, 0, nil)
		delete(k.pids, id)
	}
	clear(k.cgroups)
	clear(k.links)
	clear(k.sockets)
	clear(k.frozen)
	delete(k.uppers, bare)
	delete(k.layers, layer)
}
