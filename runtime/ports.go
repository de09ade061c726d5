package runtime

import (
	"context"
	"io"
	"net/netip"
	"os"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The interfaces below are what the runtime needs of the kernel packages and
// no more. Tests put failing ones in their place.

// Cgroups is the cgroup tree. Every method is safe to repeat.
type Cgroups interface {
	Path(id sandbox.ID) string
	Create(id sandbox.ID) error
	Settle(ctx context.Context, id sandbox.ID, pid int, uidBase uint32) error
	WorkDir(id sandbox.ID) (*os.File, error)
	SetLimits(id sandbox.ID, l sandbox.Limits) error
	Enforcement(l sandbox.Limits) []sandbox.Enforcement
	Usage(id sandbox.ID) (sandbox.Usage, error)
	Freeze(ctx context.Context, id sandbox.ID) error
	Thaw(ctx context.Context, id sandbox.ID) error
	KillWork(ctx context.Context, id sandbox.ID) error
	Kill(ctx context.Context, id sandbox.ID) error
	Remove(ctx context.Context, id sandbox.ID) error
	List() ([]sandbox.ID, error)
}

// Network is the host's side of every sandbox's network.
type Network interface {
	Address(slot int) (netip.Addr, error)
	Attach(ctx context.Context, a netns.Attachment) error
	Detach(ctx context.Context, id sandbox.ID, slot int) error
	Counters(id sandbox.ID, slot int) (rx, tx, dropped uint64, known bool, err error)
	Recover(ctx context.Context, keep map[sandbox.ID]netns.Attachment) error
	Enforcement(p sandbox.NetworkPolicy) sandbox.Enforcement
}

// Roots holds images and builds root filesystems.
type Roots interface {
	HostImage(ctx context.Context) (sandbox.Image, error)
	ImportTar(ctx context.Context, name string, r io.Reader) (sandbox.Image, error)
	Layers() ([]string, error)
	RemoveLayer(digest string) error
	CreateUpper(id sandbox.ID, slot int, l sandbox.Limits) error
	Mount(ctx context.Context, m rootfs.MountSpec) (*rootfs.Root, error)
	Usage(id sandbox.ID, slot int) (bytes, inodes uint64, known bool, err error)
	Discard(id sandbox.ID, slot int) error
	Uppers() ([]sandbox.ID, error)
	Enforcement(l sandbox.Limits) []sandbox.Enforcement
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
