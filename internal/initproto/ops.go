package initproto

import (
	"encoding/json"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The operations.
const (
	OpPing      = "ping"
	OpPrepare   = "prepare"
	OpConfigure = "configure"
	OpExec      = "exec"
	OpAttach    = "attach"
	OpSignal    = "signal"
	OpResize    = "resize"
	OpProcesses = "processes"
	OpProcess   = "process"
	OpForget    = "forget"
	OpEvents    = "events"
	OpAnswer    = "answer"
	OpStat      = "stat"
	OpList      = "list"
	OpRead      = "read"
	OpWrite     = "write"
	OpMkdir     = "mkdir"
	OpMove      = "move"
	OpRemove    = "remove"
	OpChmod     = "chmod"
	OpWatch     = "watch"
	OpTarOut    = "tar_out"
	OpTarIn     = "tar_in"
	OpSetAttrs  = "set_attrs"
	OpInput     = "input"
	OpCloseKeys = "close_keys"
	OpReset     = "reset"
)

// Request is the payload of an operation's first frame.
type Request struct {
	Version int             `json:"version"`
	Op      string          `json:"op"`
	Keep    bool            `json:"keep,omitempty"` // the connection may serve another one after it
	Args    json.RawMessage `json:"args,omitempty"`
}

// Info is the reply to ping.
type Info struct {
	Version    int     `json:"version"`
	Build      string  `json:"build,omitempty"`
	UptimeSecs float64 `json:"uptime_seconds"`
	Live       int     `json:"live"` // processes that have not ended
	LastSeq    int64   `json:"last_seq"`
	Configured bool    `json:"configured"`
	Switches   int     `json:"switches"` // roots taken so far
	Before     int64   `json:"before"`   // as Configured said for the last of them
}

// WorkCgroup is the name of the cgroup workloads go to, beneath the root of
// PID 1's cgroup namespace. PID 1 opens it itself: a descriptor from the host
// would lead up into the host's files.
const WorkCgroup = "work"

// Configure carries a whole configuration. Descriptors come in this order:
// the root if Root, then one for each of Extra.
type Configure struct {
	Hostname     string               `json:"hostname,omitempty"`
	Address      string               `json:"address,omitempty"`
	Env          map[string]string    `json:"env,omitempty"`
	WorkDir      string               `json:"workdir,omitempty"`
	User         string               `json:"user,omitempty"`
	Capabilities sandbox.Capabilities `json:"capabilities,omitempty"`
	OpenFiles    uint64               `json:"open_files,omitempty"`
	Seccomp      []byte               `json:"seccomp,omitempty"`
	Hosts        string               `json:"hosts,omitempty"`
	ResolvConf   string               `json:"resolv_conf,omitempty"`
	Furnished    bool                 `json:"furnished,omitempty"` // the root's /etc says all that already
	KeepEnded    int                  `json:"keep_ended,omitempty"`
	LastProcess  int64                `json:"last_process,omitempty"` // process numbers go on after it
	Work         bool                 `json:"cgroup,omitempty"`       // workloads go to WorkCgroup
	Root         bool                 `json:"root,omitempty"`
	IfIdle       bool                 `json:"if_idle,omitempty"` // take the root only if no process runs in the one before, and go on with all else
	Extra        []string             `json:"extra,omitempty"`   // where the extra mounts go
	Entries      bool                 `json:"entries,omitempty"` // programs find sbx, which enters costs and revenue
	Keys         []byte               `json:"keys,omitempty"`    // what the PID 1 before this one replied to close_keys; counts the first time
}

// Prepare carries what a configuration will need and can have before it.
type Prepare struct {
	Capabilities sandbox.Capabilities `json:"capabilities"`
	Seccomp      []byte               `json:"seccomp"`
	Work         bool                 `json:"cgroup,omitempty"` // workloads go to WorkCgroup
}

// Configured is the reply to configure: where the time went, in nanoseconds,
// and where the processes of the new root begin.
type Configured struct {
	Kill    time.Duration `json:"kill"`    // ending the old root's processes
	Clear   time.Duration `json:"clear"`   // what they left in the namespaces
	Switch  time.Duration `json:"switch"`  // attaching, moving and pivoting
	Files   time.Duration `json:"files"`   // hostname, hosts, resolv.conf
	Workers time.Duration `json:"workers"` // the thread that forks workloads
	Total   time.Duration `json:"total"`
	// Before divides the processes of a sandbox where its root last changed:
	// one whose number is not above it belonged to an earlier root and has
	// ended, one with a higher number is of the root in force. LastProcess
	// counts as such a number; 0 where there was none before the root.
	Before int64 `json:"before"`
}

// Exec starts a process; with Attach its output follows on the connection. With
// a Key that has started one before, that is the process, with its output from
// the beginning.
type Exec struct {
	Spec   sandbox.ProcessSpec `json:"spec"`
	Attach bool                `json:"attach,omitempty"`
	Key    []byte              `json:"key,omitempty"` // KeySize bytes: the hash of an idempotency key, and that of its command
}

// The sizes of idempotency keys, in bytes, and how many PID 1 remembers.
const (
	KeyIDSize    = 16
	KeyHashSize  = 8
	KeySize      = KeyIDSize + KeyHashSize
	KeyEntrySize = KeySize + 8
	MaxKeys      = 8192
)

// Keys is the reply to close_keys, after which PID 1 starts no command with a
// new key: entries of KeyEntrySize, which only a PID 1 reads.
type Keys struct {
	Keys []byte `json:"keys"`
}

// Attach reads a process's output from Offset on; negative means from the
// oldest byte kept.
type Attach struct {
	ID     sandbox.ProcessID `json:"id"`
	Offset int64             `json:"offset"`
}

// Target names a process; Signal and Size belong to the operations of those names.
type Target struct {
	ID     sandbox.ProcessID   `json:"id"`
	Signal string              `json:"signal,omitempty"`
	Size   *sandbox.WindowSize `json:"size,omitempty"`
}

// Input gives a process Data and, with End, closes its standard input after
// that. The reply comes once the process's pipe has taken all.
type Input struct {
	ID   sandbox.ProcessID `json:"id"`
	Data []byte            `json:"data,omitempty"`
	End  bool              `json:"end,omitempty"`
}

// EventsAfter asks for the events after a sequence number.
type EventsAfter struct {
	After int64 `json:"after"`
}

// The event types.
const (
	EventStarted = "started"
	EventExited  = "exited"
	EventLost    = "lost"  // events before this one are no longer kept
	EventAsked   = "asked" // a program inside asks the daemon something
)

// The bounds of a question from inside and its answer, in bytes.
const (
	MaxAsk    = 4 << 10
	MaxAnswer = 16 << 10
)

// Ask is a question of a program inside: a line. The key is new for each
// question, also over restarts of PID 1.
type Ask struct {
	ID   int64  `json:"id"`
	Key  string `json:"key"`
	Line string `json:"line"`
}

// Answer is the daemon's line to the program that asked.
type Answer struct {
	ID   int64  `json:"id"`
	Line string `json:"line"`
}

// Event is one change in the process table.
type Event struct {
	Seq     int64            `json:"seq"`
	Type    string           `json:"type"`
	Live    int              `json:"live"` // processes that have not ended, after it
	Process *sandbox.Process `json:"process,omitempty"`
	Ask     *Ask             `json:"ask,omitempty"`
}

// File carries the arguments of every file operation; each uses its own part.
type File struct {
	User string `json:"user,omitempty"`
	// Owner lets the work be done as root, where the sandbox's root has rights,
	// and gives what is made to that user. Files are told at length.
	Owner     string `json:"owner,omitempty"`
	Path      string `json:"path"`
	To        string `json:"to,omitempty"`
	Depth     int    `json:"depth,omitempty"`
	Offset    int64  `json:"offset,omitempty"`
	Limit     int64  `json:"limit,omitempty"`
	Mode      uint32 `json:"mode,omitempty"`
	Recursive bool   `json:"recursive,omitempty"`
	Check     bool   `json:"check,omitempty"` // of a reset: only tell whether it may be

	Attrs map[string]string `json:"attrs,omitempty"`
}
