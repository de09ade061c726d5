package access

import (
	"context"
	"time"
)

// Role is what kind of caller somebody is.
type Role string

// The roles, from most rights to least. Admins and operators see the objects
// of all owners; developers and viewers those of their own.
const (
	RoleAdmin     Role = "admin"     // everything: also keys, owners and the audit
	RoleOperator  Role = "operator"  // everything but keys, owners and the audit
	RoleDeveloper Role = "developer" // their owner's objects, within a quota
	RoleViewer    Role = "viewer"    // looks at their owner's objects
)

// Roles lists every role once, from most rights to least.
func Roles() []Role { return []Role{RoleAdmin, RoleOperator, RoleDeveloper, RoleViewer} }

// Caller is whoever sent a request. What a caller makes belongs to Owner,
// which is also the actor of events: the name of an owner with keys, or
// uid:N of a user on the unix socket.
type Caller struct {
	Owner string
	Role  Role
	Key   string // id of the API key; empty on the unix socket
	From  string // unix, or the address of the other side
}

// SeesAll reports whether other owners' objects exist for the caller.
func (c Caller) SeesAll() bool { return c.Role == RoleAdmin || c.Role == RoleOperator }

// Sees reports whether an owner's objects exist for the caller. To whom they
// do not exist they are missing, byte for byte.
func (c Caller) Sees(owner string) bool { return c.SeesAll() || owner == c.Owner }

// MayChange reports whether the caller may do more than look.
func (c Caller) MayChange() bool { return c.SeesAll() || c.Role == RoleDeveloper }

type callerKey struct{}

// With returns a context that carries who asks.
func With(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// Of returns who asks; false in contexts that no request brought, as the
// daemon's own work.
func Of(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok
}

// Without returns a context for the daemon's own work on behalf of a request:
// names in it mean what they mean to the daemon, whoever asked.
func Without(ctx context.Context) context.Context {
	return context.WithValue(ctx, callerKey{}, nil)
}

// Quota is the most an owner may have at once. Zero in a field means no bound.
type Quota struct {
	Sandboxes   int           `json:"max_sandboxes" doc:"Living sandboxes."`
	CPUs        float64       `json:"max_cpus" doc:"Sum of the cpu limits of living sandboxes."`
	MemoryBytes int64         `json:"max_memory_bytes" doc:"Sum of their memory limits."`
	DiskBytes   int64         `json:"max_disk_bytes" doc:"Sum of their disk limits, of volumes and of snapshots."`
	PerMinute   int           `json:"requests_per_minute" doc:"Requests of all keys together."`
	Lifetime    time.Duration `json:"-"` // of one sandbox
	Idle        time.Duration `json:"-"` // after which a sandbox is stopped
}

// DeveloperQuota bounds developers of whom nothing else was said.
func DeveloperQuota() Quota {
	return Quota{
		Sandboxes: 3, CPUs: 6, MemoryBytes: 6 << 30, DiskBytes: 30 << 30, PerMinute: 3000,
		Lifetime: 24 * time.Hour, Idle: time.Hour,
	}
}
