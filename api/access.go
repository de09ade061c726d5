package api

import (
	"time"

	"github.com/sandboxd/sandboxd/access"
)

// KeyRequest asks for an API key.
type KeyRequest struct {
	Owner     string      `json:"owner" minLength:"1" maxLength:"63" doc:"To whom belongs what is made with it; made where there is none of the name."`
	Role      access.Role `json:"role,omitempty" enum:"admin,operator,developer,viewer" doc:"At most the owner's; the owner's when absent, of a new owner developer."`
	Name      string      `json:"name,omitempty" maxLength:"100" doc:"For people."`
	ExpiresAt *time.Time  `json:"expires_at,omitempty" doc:"From when on it does not work; never when absent."`
}

// KeyList lists API keys, the oldest first, without their secrets.
type KeyList struct {
	Items []access.Key `json:"items"`
}

// Quota is what an owner may have at once. Zero means no bound.
type Quota struct {
	access.Quota

	LifetimeSeconds int64 `json:"max_lifetime_seconds" doc:"Of one sandbox, from its creation."`
	IdleSeconds     int64 `json:"max_idle_seconds" doc:"After which an idle sandbox is stopped."`
}

// QuotaOf is a quota as the API shows it.
func QuotaOf(q access.Quota) Quota {
	return Quota{Quota: q, LifetimeSeconds: int64(q.Lifetime / time.Second), IdleSeconds: int64(q.Idle / time.Second)}
}

// Owner is somebody to whom objects belong.
type Owner struct {
	Name      string      `json:"name" doc:"A name, or uid:N of a user on the unix socket."`
	Role      access.Role `json:"role" doc:"The most its keys may be; of uid:N what that user is."`
	Quota     Quota       `json:"quota"`
	Keys      int         `json:"keys" doc:"Keys that work."`
	CreatedAt time.Time   `json:"created_at"`
	Disabled  bool        `json:"disabled" doc:"None of its keys works, nor its way over the socket."`
}

// OwnerList lists owners by name.
type OwnerList struct {
	Items []Owner `json:"items"`
}

// OwnerChange says what to set of an owner; what is absent stays as it is.
type OwnerChange struct {
	Role     access.Role  `json:"role,omitempty" enum:"admin,operator,developer,viewer" doc:"Brings its usual quota along, unless the quota was set apart."`
	Disabled *bool        `json:"disabled,omitempty"`
	Quota    *QuotaChange `json:"quota,omitempty"`
}

// QuotaChange says which bounds to set; 0 takes one away.
type QuotaChange struct {
	Sandboxes       *int     `json:"max_sandboxes,omitempty" minimum:"0"`
	CPUs            *float64 `json:"max_cpus,omitempty" minimum:"0" maximum:"1048576"`
	MemoryBytes     *int64   `json:"max_memory_bytes,omitempty" minimum:"0"`
	DiskBytes       *int64   `json:"max_disk_bytes,omitempty" minimum:"0"`
	PerMinute       *int     `json:"requests_per_minute,omitempty" minimum:"0" maximum:"10000000"`
	LifetimeSeconds *int64   `json:"max_lifetime_seconds,omitempty" minimum:"0" maximum:"9000000000"`
	IdleSeconds     *int64   `json:"max_idle_seconds,omitempty" minimum:"0" maximum:"9000000000"`
}

// Apply sets what is not absent.
func (c QuotaChange) Apply(q *access.Quota) {
	set(&q.Sandboxes, c.Sandboxes)
	set(&q.CPUs, c.CPUs)
	set(&q.MemoryBytes, c.MemoryBytes)
	set(&q.DiskBytes, c.DiskBytes)
	set(&q.PerMinute, c.PerMinute)
	if c.LifetimeSeconds != nil {
		q.Lifetime = time.Duration(*c.LifetimeSeconds) * time.Second
	}
	if c.IdleSeconds != nil {
		q.Idle = time.Duration(*c.IdleSeconds) * time.Second
	}
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// AuditList is a page of the audit, the newest row first.
type AuditList struct {
	Items []access.AuditRow `json:"items"`
	Next  int64             `json:"next,omitempty" doc:"before of the next page; absent on the last."`
}

// Whoami tells a caller who it is.
type Whoami struct {
	Owner string      `json:"owner"`
	Role  access.Role `json:"role"`
	Key   string      `json:"key,omitempty" doc:"Id of the API key; none on the unix socket."`
	From  string      `json:"from" doc:"unix, or the address the daemon sees."`
	Quota Quota       `json:"quota"`
}
