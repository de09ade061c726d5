package server

import (
	"context"
	"io"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Manager is what the server needs of the daemon. A ref is an id, a name or
// a unique beginning of an id. Errors wrap one class of package sandbox; an
// error that wraps none is shown to the caller as a request id only.
type Manager interface {
	Sandboxes
	Snapshots
	NetworkViews
	Processes
	Images
	Builds
	Volumes
	Secrets
	Templates
	Webhooks
	Ports
	Events
	Faults
	Reports
	Costs
	Budgets
	// Files returns the file work of a running sandbox.
	Files(ctx context.Context, ref string) (sandbox.Files, error)
	// Doctor examines the host.
	Doctor(ctx context.Context) []sandbox.Check
	// Pool tells how the pool of ready shells does.
	Pool(ctx context.Context) (sandbox.PoolStats, error)
}

// Sandboxes is the lifecycle part of Manager.
type Sandboxes interface {
	// Create returns when the sandbox runs.
	Create(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error)
	// Sandbox also finds sandboxes that have ended.
	Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error)
	List(ctx context.Context, f sandbox.Filter) (sandbox.Page, error)
	Pause(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Resume(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Stop(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Start(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	// Reset gives a sandbox its first files again, in place.
	Reset(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	// Remove ends a sandbox; of an ended one it returns the record.
	Remove(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	// SetNetwork returns when the policy is in force.
	SetNetwork(ctx context.Context, ref string, p sandbox.NetworkPolicy, actor string) (sandbox.Sandbox, error)
	// SetDeadline moves the end of a living sandbox's lifetime.
	SetDeadline(ctx context.Context, ref string, req sandbox.DeadlineRequest) (sandbox.Sandbox, error)
	Usage(ctx context.Context, ref string) (sandbox.Usage, error)
}

// Snapshots is the part of Manager that freezes files and goes back to them.
type Snapshots interface {
	Snapshot(ctx context.Context, ref string, req sandbox.SnapshotRequest) (sandbox.Snapshot, error)
	SnapshotOf(ctx context.Context, ref string) (sandbox.Snapshot, error)
	// Snapshots lists those of one sandbox or, without a ref, all.
	Snapshots(ctx context.Context, ref string, kinds ...sandbox.SnapshotKind) ([]sandbox.Snapshot, error)
	RemoveSnapshot(ctx context.Context, ref, actor string) (sandbox.Snapshot, error)
	// ExportSnapshot streams what ImportSnapshot takes.
	ExportSnapshot(ctx context.Context, ref string) (io.ReadCloser, error)
	ImportSnapshot(ctx context.Context, name, actor string, r io.Reader) (sandbox.Snapshot, error)
	// Fork takes a snapshot or a living sandbox.
	Fork(ctx context.Context, ref string, req sandbox.ForkRequest) ([]sandbox.Fork, error)
	Rollback(ctx context.Context, ref, snapshot, actor string) (sandbox.Sandbox, error)
	Undo(ctx context.Context, ref string, steps int, actor string) (sandbox.Sandbox, error)
	// ResetPaths resets some paths while processes go on.
	ResetPaths(ctx context.Context, ref string, paths []string, actor string) (sandbox.Sandbox, error)
	History(ctx context.Context, ref string) (sandbox.History, error)
	AddSchedule(ctx context.Context, ref string, s sandbox.Schedule) (sandbox.Schedule, error)
	// Schedules lists those of one sandbox or, without a ref, all.
	Schedules(ctx context.Context, ref string) ([]sandbox.Schedule, error)
	RemoveSchedule(ctx context.Context, id string) error
	// Diff calls emit in the order of the paths, and ends with its error.
	Diff(ctx context.Context, from, to string, emit func(sandbox.FileChange) error) error
}

// Processes is the part of Manager that runs commands. The connections that
// Exec and Attach return outlive ctx; closing one wakes whoever waits in it.
type Processes interface {
	StartProcess(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.Process, error)
	Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error)
	// Run is Create and Exec in one. After an error there is no sandbox; one
	// that the idempotency key made before stays, and is a conflict.
	Run(ctx context.Context, req sandbox.CreateRequest, spec sandbox.ProcessSpec) (sandbox.Sandbox, sandbox.ProcessIO, error)
	// Attach reads from an output offset on; a negative one means the
	// oldest byte kept.
	Attach(ctx context.Context, ref string, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error)
	Processes(ctx context.Context, ref string) ([]sandbox.Process, error)
	Process(ctx context.Context, ref string, id sandbox.ProcessID) (sandbox.Process, error)
	SignalProcess(ctx context.Context, ref string, id sandbox.ProcessID, signal string) error
	// KeptOutput returns the end of a process's output as kept when its
	// sandbox stopped or ended; without an id, that of the last process.
	KeptOutput(ctx context.Context, ref string, id sandbox.ProcessID) ([]byte, error)
}

// Images is the part of Manager that keeps images.
type Images interface {
	Images(ctx context.Context) ([]sandbox.Image, error)
	Image(ctx context.Context, name string) (sandbox.Image, error)
	// ImportImage reads an archive: of a root file system, of an OCI image
	// layout, or of docker save, plain or compressed.
	ImportImage(ctx context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error)
	// PullImage and PushImage report how far they have come, one call at a
	// time; report may be nil.
	PullImage(ctx context.Context, req sandbox.PullRequest, report func(sandbox.ImageProgress)) (sandbox.Image, error)
	PushImage(ctx context.Context, req sandbox.PushRequest, report func(sandbox.ImageProgress)) (sandbox.Pushed, error)
	// ExportImage returns an archive; reading it to its end, or closing it,
	// ends the work.
	ExportImage(ctx context.Context, req sandbox.ExportRequest) (io.ReadCloser, error)
	TagImage(ctx context.Context, name, to, actor string) (sandbox.Image, error)
	PruneImages(ctx context.Context, req sandbox.PruneRequest, actor string) (sandbox.Pruned, error)
	RemoveImage(ctx context.Context, name string) error
}

// Volumes is the part of Manager that keeps volumes.
type Volumes interface {
	CreateVolume(ctx context.Context, req sandbox.VolumeRequest) (sandbox.Volume, error)
	Volume(ctx context.Context, name string) (sandbox.Volume, error)
	Volumes(ctx context.Context) ([]sandbox.Volume, error)
	ChangeVolume(ctx context.Context, name string, ch sandbox.VolumeChange) (sandbox.Volume, error)
	// RemoveVolume refuses one that a living sandbox mounts.
	RemoveVolume(ctx context.Context, name, actor string) error
}

// Faults is the part of Manager that disturbs networks for tests.
type Faults interface {
	SetFault(ctx context.Context, ref string, f sandbox.NetworkFault, actor string) (sandbox.NetworkFault, error)
	// ClearFault does nothing where there is no fault.
	ClearFault(ctx context.Context, ref, actor string) error
	// Fault returns the zero fault where there is none.
	Fault(ctx context.Context, ref string) (sandbox.NetworkFault, error)
}

// Events is the part of Manager that tells what happened.
type Events interface {
	// Events returns those after a sequence number, oldest first, of one
	// sandbox or, without a ref, of all.
	Events(ctx context.Context, after int64, ref string, limit int) ([]sandbox.Event, error)
	// Subscribe returns a channel that gets a value after new events, and
	// the function that ends the subscription.
	Subscribe() (<-chan struct{}, func())
}
