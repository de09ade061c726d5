package e2b

import (
	"context"
	"net"
	"net/http"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Manager is what the dialect needs of the daemon, with the errors of the
// native API. A ref is an id; the context carries who asks.
type Manager interface {
	Create(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error)
	Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error)
	List(ctx context.Context, f sandbox.Filter) (sandbox.Page, error)
	Pause(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Resume(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Stop(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Start(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Remove(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	SetNetwork(ctx context.Context, ref string, p sandbox.NetworkPolicy, actor string) (sandbox.Sandbox, error)
	SetDeadline(ctx context.Context, ref string, req sandbox.DeadlineRequest) (sandbox.Sandbox, error)
	Usage(ctx context.Context, ref string) (sandbox.Usage, error)

	Snapshot(ctx context.Context, ref string, req sandbox.SnapshotRequest) (sandbox.Snapshot, error)
	SnapshotOf(ctx context.Context, ref string) (sandbox.Snapshot, error)
	Snapshots(ctx context.Context, ref string, kinds ...sandbox.SnapshotKind) ([]sandbox.Snapshot, error)
	RemoveSnapshot(ctx context.Context, ref, actor string) (sandbox.Snapshot, error)
	Fork(ctx context.Context, ref string, req sandbox.ForkRequest) ([]sandbox.Fork, error)

	SetTemplate(ctx context.Context, req sandbox.TemplateRequest) (sandbox.BaseTemplate, error)
	Template(ctx context.Context, name, actor string) (sandbox.BaseTemplate, error)
	Templates(ctx context.Context, actor string) ([]sandbox.BaseTemplate, error)
	RemoveTemplate(ctx context.Context, name, actor string) error

	Images(ctx context.Context) ([]sandbox.Image, error)
	Image(ctx context.Context, name string) (sandbox.Image, error)
	Events(ctx context.Context, after int64, ref string, limit int) ([]sandbox.Event, error)

	Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error)
	Attach(ctx context.Context, ref string, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error)
	Processes(ctx context.Context, ref string) ([]sandbox.Process, error)
	Process(ctx context.Context, ref string, id sandbox.ProcessID) (sandbox.Process, error)
	SignalProcess(ctx context.Context, ref string, id sandbox.ProcessID, signal string) error
	Files(ctx context.Context, ref string) (sandbox.Files, error)
	// DialPort connects to a TCP port of a running sandbox.
	DialPort(ctx context.Context, ref string, port int) (net.Conn, error)
}

// Callers tells who calls.
type Callers interface {
	// Authenticate returns the context of a request to the control plane,
	// with whoever sent it, and the actor of what it does.
	Authenticate(r *http.Request) (ctx context.Context, actor string, err error)
	// Acting returns the context of a request with a token of a sandbox that
	// was given to an API key; an error where that key may not act there now.
	Acting(r *http.Request, box sandbox.Sandbox, key string) (context.Context, error)
	// Guest returns the context of a request by somebody whom the sandbox
	// admits without a key; an error where its owner may not act now.
	Guest(r *http.Request, box sandbox.Sandbox) (context.Context, error)
	// ActingKeys lists the API keys that may act on what an owner has.
	ActingKeys(owner string) []string
	// Hold has cut called, which must not wait, when what let a context's
	// request in goes away. release may be called twice.
	Hold(ctx context.Context, cut func()) (release func())
	// Refused counts a request that brought nothing good; an error where its
	// address sends too many.
	Refused(r *http.Request) error
}
