package sandbox

import (
	"fmt"
	"strings"
	"time"
)

// SnapshotID names one snapshot: "sn" and 12 lowercase base32 characters.
type SnapshotID string

const snapshotPrefix = "sn"

// NewSnapshotID returns a fresh random SnapshotID.
func NewSnapshotID() SnapshotID { return SnapshotID(snapshotPrefix + randomName()) }

// ParseSnapshotID returns s as a SnapshotID, or an error of class ErrInvalid.
func ParseSnapshotID(s string) (SnapshotID, error) {
	if len(s) != len(snapshotPrefix)+idRandom || !strings.HasPrefix(s, snapshotPrefix) || !isBase32Lower(s[len(snapshotPrefix):]) {
		return "", Errorf(ErrInvalid, "invalid_snapshot_id", "%.40q is not a snapshot id: want %q and %d characters of a-z and 2-7", s, snapshotPrefix, idRandom)
	}
	return SnapshotID(s), nil
}

// SnapshotKind says what a snapshot was taken for.
type SnapshotKind string

// The kinds of snapshots.
const (
	SnapshotManual    SnapshotKind = "manual"    // somebody asked for it
	SnapshotFork      SnapshotKind = "fork"      // so that a living sandbox could be forked
	SnapshotAuto      SnapshotKind = "auto"      // after a command that changed something
	SnapshotScheduled SnapshotKind = "scheduled" // by a schedule
)

// Snapshot is the frozen files of a sandbox, with the spec it had. It never
// changes, and stays when its sandbox is gone.
type Snapshot struct {
	ID        SnapshotID   `json:"id"`
	Name      string       `json:"name,omitempty" doc:"Unique among the snapshots of one owner; empty for none."`
	Owner     string       `json:"owner,omitempty"`
	Kind      SnapshotKind `json:"kind" enum:"manual,fork,auto,scheduled"`
	Sandbox   ID           `json:"sandbox,omitempty" doc:"Whose files these are; empty of an imported one."`
	Parent    SnapshotID   `json:"parent,omitempty" doc:"The snapshot those files began with, or were last frozen as."`
	CreatedAt time.Time    `json:"created_at"`
	Comment   string       `json:"comment,omitempty" doc:"For people: what was asked for, or the command it follows."`
	Process   ProcessID    `json:"process,omitempty" doc:"Of an automatic one: the command it follows."`
	Spec      Spec         `json:"spec" doc:"As the sandbox had it."`
	Image     Image        `json:"image" doc:"What the files stand on: the image as it was."`
	Layers    []string     `json:"layers" doc:"All layers, lowest first; the last is the snapshot's own, unless nothing was written."`
	SizeBytes int64        `json:"size_bytes" doc:"Of its own layer; 0 until counted."`
	Files     int64        `json:"files" doc:"In its own layer; 0 until counted."`
	Live      bool         `json:"live,omitempty" doc:"Taken while processes were running, which were held meanwhile."`
	Durable   bool         `json:"durable" doc:"On disk: survives a power cut too. So within seconds."`
	Key       string       `json:"key,omitempty" doc:"Hash of the idempotency key it was asked for with."`
}

// SnapshotFilter chooses snapshots of a listing.
type SnapshotFilter struct {
	Sandbox ID             // of this sandbox; empty: of all
	Kinds   []SnapshotKind // none: all
}

// SnapshotRequest asks for a snapshot of a sandbox.
type SnapshotRequest struct {
	Name    string       `json:"name,omitempty" maxLength:"63" doc:"Unique among the snapshots of one owner; empty for none."`
	Comment string       `json:"comment,omitempty" maxLength:"1024" doc:"For people."`
	Sync    bool         `json:"sync,omitempty" doc:"Return only when it is on disk and survives a power cut."`
	Kind    SnapshotKind `json:"-"`
	Process ProcessID    `json:"-"`
	Actor   string       `json:"-"`
	// IdempotencyKey, when not empty, makes a repeated request for the same
	// sandbox return the snapshot the first one made, while that is there.
	IdempotencyKey string `json:"-"`
}

// Validate checks what a person wrote.
func (r SnapshotRequest) Validate() error {
	if r.Name != "" {
		if err := ValidateName(r.Name); err != nil {
			return err
		}
		if _, err := ParseSnapshotID(r.Name); err == nil {
			return Errorf(ErrInvalid, "invalid_name", "name %q has the form of a snapshot id: choose another", r.Name)
		}
	}
	if len(r.Comment) > 1024 || strings.ContainsRune(r.Comment, 0) {
		return Errorf(ErrInvalid, "invalid_comment", "a comment of %d bytes: at most 1024 without zero bytes", len(r.Comment))
	}
	return nil
}

// ForkRequest asks for sandboxes that begin with a snapshot's files.
type ForkRequest struct {
	Count    int               `json:"count,omitempty" minimum:"1" maximum:"1000" doc:"How many; 1 if left out."`
	Name     string            `json:"name,omitempty" maxLength:"58" doc:"Of the new sandbox; of several, NAME-1, NAME-2, …"`
	Env      map[string]string `json:"env,omitempty" doc:"Laid over the environment of the snapshot's spec."`
	Labels   map[string]string `json:"labels,omitempty" doc:"In place of the labels of the snapshot's spec."`
	Limits   *Limits           `json:"limits,omitempty" doc:"In place of the limits of the snapshot's spec."`
	Network  *NetworkPolicy    `json:"network,omitempty" doc:"In place of the network policy of the snapshot's spec."`
	Volumes  *[]VolumeMount    `json:"volumes,omitempty" doc:"In place of the mounts of the snapshot's spec; an empty list means none."`
	TTL      *int64            `json:"ttl_seconds,omitempty" minimum:"0" maximum:"31536000" doc:"In place of the lifetime of the snapshot's spec."`
	NeedsAll bool              `json:"needs_all,omitempty" doc:"Where one cannot be made, remove the others again."`
	Actor    string            `json:"-"`
	ForkOf   string            `json:"-"` // ForkOfSandbox, or empty for either

	// Amend, unless nil, is shown the spec of each new sandbox, and may change
	// or refuse it.
	Amend func(*Spec) error `json:"-"`

	// IdempotencyKey, when not empty, makes a repeated request return the
	// sandboxes the first one made.
	IdempotencyKey string `json:"-"`
}

// KeyOf is the idempotency key of the i-th sandbox.
func (r ForkRequest) KeyOf(i int) string {
	if r.IdempotencyKey == "" {
		return ""
	}
	return fmt.Sprintf("fork\x00%s\x00%d", r.IdempotencyKey, i)
}

// NothingToFork is the error where a ref names nothing that could be forked.
func NothingToFork(ref string) error {
	return Errorf(ErrNotFound, "snapshot_not_found", "neither a snapshot nor a sandbox is called %.80q: 'sandbox snapshot ls' and 'sandbox ls' show what there is", ref)
}

// ForkOfSandbox asks for forks of the sandbox a name stands for, though a
// snapshot may have the same name.
const ForkOfSandbox = "sandbox"

// Fork is the outcome of one of the sandboxes a fork asked for.
type Fork struct {
	Sandbox *Sandbox `json:"sandbox,omitempty"`
	Error   string   `json:"error,omitempty" doc:"Why this one could not be made."`
	Code    string   `json:"code,omitempty"`
}

// ChangeKind says how a file of one state differs from that of another.
type ChangeKind string

// The kinds of changes.
const (
	FileAdded   ChangeKind = "added"
	FileChanged ChangeKind = "changed"
	FileRemoved ChangeKind = "removed"
)

// FileChange is one difference between two states of a sandbox's files.
type FileChange struct {
	Path string     `json:"path" doc:"As inside the sandbox."`
	Kind ChangeKind `json:"kind" enum:"added,changed,removed"`
	Type string     `json:"type" doc:"file, dir, symlink or other; of the later state, except where removed."`
	Size int64      `json:"size" doc:"Of a file, in the later state."`
	Mode uint32     `json:"mode" doc:"Permission bits, in the later state."`
}

// The actions of a schedule.
const (
	ScheduleSnapshot = "snapshot"
	ScheduleReset    = "reset"
)

// NewScheduleID returns a fresh random id: "sc" and 12 lowercase base32
// characters.
func NewScheduleID() string { return "sc" + randomName() }

// Schedule repeats an action on one sandbox.
type Schedule struct {
	ID        string     `json:"id"`
	Sandbox   ID         `json:"sandbox"`
	Action    string     `json:"action" enum:"snapshot,reset"`
	Cron      string     `json:"cron" maxLength:"120" doc:"Five fields, or @hourly, @daily, @weekly, @monthly, @every DURATION; in UTC unless it begins with TZ=…"`
	Keep      int        `json:"keep,omitempty" minimum:"0" maximum:"10000" doc:"Of a snapshot schedule: how many of its snapshots are kept, the newest; 0: all."`
	KeepFor   int64      `json:"keep_seconds,omitempty" minimum:"0" doc:"Of a snapshot schedule: how long each is kept; 0: for good."`
	Force     bool       `json:"force,omitempty" doc:"Of a reset schedule: reset also while a process runs."`
	CreatedAt time.Time  `json:"created_at"`
	NextAt    time.Time  `json:"next_at"`
	LastAt    *time.Time `json:"last_at,omitempty"`
	LastError string     `json:"last_error,omitempty" doc:"Why the last run did nothing; empty if it did."`
	Runs      int64      `json:"runs" doc:"Times it did what it is for."`
	Skipped   int64      `json:"skipped" doc:"Times it did not, because a process was running or the sandbox could not be changed."`
}

// History is how a sandbox's files came to be.
type History struct {
	Sandbox ID         `json:"sandbox"`
	Point   SnapshotID `json:"point,omitempty" doc:"What they were last frozen as, or put back on; empty: they are those it began with."`
	Changed bool       `json:"changed" doc:"They changed since."`
	Points  []Snapshot `json:"points" doc:"From that snapshot back to the first, newest first."`
}
