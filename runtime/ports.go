package runtime

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The interfaces below are what the runtime needs of the kernel packages and
// no more. Tests put failing ones in their place.

// Cgroups is the cgroup tree. Every method is safe to repeat.
type Cgroups interface {
	Path(id sandbox.ID) string
	Create(id sandbox.ID) error
	Hasten()
	Settle(ctx context.Context, id sandbox.ID, pid int, uidBase uint32) error
	SetLimits(id sandbox.ID, l sandbox.Limits) error
	LiftIO(id sandbox.ID) error
	Enforcement(l sandbox.Limits) []sandbox.Enforcement
	Usage(id sandbox.ID) (sandbox.Usage, error)
	Meter(id sandbox.ID) (sandbox.Usage, error)
	Freeze(ctx context.Context, id sandbox.ID) error
	Thaw(ctx context.Context, id sandbox.ID) error
	Kill(ctx context.Context, id sandbox.ID) error
	NoteEnd(id sandbox.ID, how []byte) error
	EndNote(id sandbox.ID) []byte
	Remove(ctx context.Context, id sandbox.ID) error
	List() ([]sandbox.ID, error)
	MemoryShort() (why string, short bool)
	MemoryLent(id sandbox.ID) uint64
	ShareMemory(id sandbox.ID, most int64) (lent uint64, over bool)
}

// Network is the host's side of every sandbox's network.
type Network interface {
	Address(slot int) (netip.Addr, error)
	Attach(ctx context.Context, a netns.Attachment) error
	Detach(ctx context.Context, id sandbox.ID, slot int) error
	SetPolicy(ctx context.Context, a netns.Attachment) error
	CheckPolicy(p sandbox.NetworkPolicy) error
	Gateway() netip.Addr
	Explain(a netns.Attachment, q sandbox.NetworkQuery) (sandbox.NetworkVerdict, error)
	Pins(id sandbox.ID) ([]sandbox.NetworkPin, error)
	Counters(id sandbox.ID, slot int) (c sandbox.NetCounters, known bool, err error)
	AllBytes() (map[sandbox.ID]sandbox.NetCounters, error)
	DialInside(ctx context.Context, ns *os.File, network string, port uint16) (net.Conn, error)
	Recover(ctx context.Context, keep map[sandbox.ID]netns.Attachment) error
	Enforcement(p sandbox.NetworkPolicy) sandbox.Enforcement
	SetFault(ctx context.Context, a netns.Attachment, f *sandbox.NetworkFault) error
	Disturbed() []sandbox.ID
}

// Roots holds images and builds root filesystems.
type Roots interface {
	HostImage(ctx context.Context) (sandbox.Image, error)
	ImportTar(ctx context.Context, name string, r io.Reader) (sandbox.Image, error)
	Layers() ([]string, error)
	RemoveLayer(digest string) error
	CreateUpper(id sandbox.ID, slot int, l sandbox.Limits) error
	CreateUpperOn(id sandbox.ID, l sandbox.Limits, base string) error
	UpperBase(id sandbox.ID) string
	Room() error
	Space() (rootfs.Space, error)
	SetLimits(id sandbox.ID, slot int, l sandbox.Limits) error
	Mount(ctx context.Context, m rootfs.MountSpec) (*rootfs.Root, error)
	Usage(id sandbox.ID, slot int) (bytes, inodes uint64, known bool, err error)
	Clean(id sandbox.ID) error
	Furnish(id sandbox.ID, image sandbox.Image, had, want rootfs.Identity) (bool, error)
	Discard(id sandbox.ID, slot int) error
	SetAside(id sandbox.ID, slot int) (release func(), err error)
	Uppers() ([]sandbox.ID, error)
	FreezeUpper(id sandbox.ID, layer string) error
	ThawUpper(id sandbox.ID, layer string) error
	CopyUpper(ctx context.Context, id sandbox.ID, layer string) (on []string, err error)
	Unchanged(id sandbox.ID) (bool, error)
	CheckUpper(id sandbox.ID) error
	UpperStamp(id sandbox.ID) (string, error)
	HasLayer(layer string) bool
	NewLayer() string
	LayerUsage(ctx context.Context, layer string) (bytes, files int64, err error)
	Flatten(ctx context.Context, layers []string) (string, error)
	Diff(ctx context.Context, from, to []string, upper sandbox.ID, emit func(sandbox.FileChange) error) error
	ExportPath(ctx context.Context, stack []string, name string, w io.Writer) (found bool, err error)
	ExportLayer(ctx context.Context, stack []string, i int, w io.Writer) (diffID string, err error)
	ImportLayer(ctx context.Context, diffID string, r io.Reader) (rootfs.LayerInfo, error)
	Spool() (*os.File, error)
	Sync() error
	Enforcement(l sandbox.Limits) []sandbox.Enforcement
	VolumeRoots
}

// VolumeRoots keeps volumes, and mounts them and directories of the host.
type VolumeRoots interface {
	CreateVolume(name string, l rootfs.VolumeLimits) error
	LimitVolume(name string, l rootfs.VolumeLimits) error
	LimitsOfVolume(name string) (rootfs.VolumeLimits, error)
	VolumeUsage(name string) (bytes, inodes uint64, known bool, err error)
	VolumeEnforcement(l rootfs.VolumeLimits) []sandbox.Enforcement
	MountVolume(name string, userns *os.File, readOnly bool) (*os.File, error)
	DiscardVolume(name string) error
	NamedVolumes() ([]string, error)
	CheckBind(b rootfs.BindSpec) error
	MountBind(b rootfs.BindSpec) (*os.File, error)
}

// Shells makes and removes shells.
type Shells interface {
	Start(ctx context.Context, spec launch.ShellSpec) (*launch.Shell, error)
	Open(id sandbox.ID, pid int, startTime uint64) (*launch.Shell, error)
	Remove(id sandbox.ID) error
	List() ([]sandbox.ID, error)
	SocketPath(id sandbox.ID) string
	MaxOpenFiles() uint64
}

// PID1 is the process inside a sandbox that does the work there.
type PID1 interface {
	sandbox.Files
	Ping(ctx context.Context) (guest.Info, error)
	Prepare(ctx context.Context, c guest.PrepareConfig) error
	Configure(ctx context.Context, c guest.Config) error
	CloseIdle()
	Reset(ctx context.Context, path string, r io.Reader) error
	Start(ctx context.Context, spec sandbox.ProcessSpec) (sandbox.Process, error)
	Exec(ctx context.Context, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error)
	Attach(ctx context.Context, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error)
	Processes(ctx context.Context) ([]sandbox.Process, error)
	Process(ctx context.Context, id sandbox.ProcessID) (sandbox.Process, error)
	Signal(ctx context.Context, id sandbox.ProcessID, name string) error
	Events(ctx context.Context, after int64) (ProcessEvents, error)
	Answer(ctx context.Context, id int64, line string) error
	CloseKeys(ctx context.Context) ([]byte, error)
}

// programAsked is the type of the guest event that tells of a question from
// inside.
const programAsked = "asked"

// processExited is the type of the guest event that tells of an end.
const processExited = "exited"

// eventsLost is the type of the guest event that tells that earlier ones are gone.
const eventsLost = "lost"

// ProcessEvents is a stream of what happens to a sandbox's processes.
type ProcessEvents interface {
	Info() guest.Info // PID 1's, when the stream began
	Next() (guest.Event, error)
	Close() error
}

// Dial returns the PID 1 that listens on a socket; the real one where
// Config.Dial is nil. It does not connect yet.
type Dial func(socket string) PID1

// dialGuest is the real Dial.
func dialGuest(socket string) PID1 { return realPID1{guest.New(socket)} }

// realPID1 widens the guest package's results to the interfaces above.
type realPID1 struct {
	*guest.Guest
}

func (r realPID1) Exec(ctx context.Context, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	io, err := r.Guest.Exec(ctx, spec)
	if err != nil {
		return nil, err
	}
	return io, nil
}

func (r realPID1) Attach(ctx context.Context, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error) {
	io, err := r.Guest.Attach(ctx, id, offset)
	if err != nil {
		return nil, err
	}
	return io, nil
}

func (r realPID1) Events(ctx context.Context, after int64) (ProcessEvents, error) {
	s, err := r.Guest.Events(ctx, after)
	if err != nil {
		return nil, err
	}
	return s, nil
}
