package sandbox

import "slices"

// Status is where a sandbox stands in its life.
type Status string

// The statuses.
const (
	StatusPending    Status = "pending"    // row and leases exist, nothing in the kernel yet
	StatusCreating   Status = "creating"   // kernel objects are being made
	StatusRunning    Status = "running"    // PID 1 answers
	StatusPaused     Status = "paused"     // frozen, memory kept
	StatusStopped    Status = "stopped"    // no process, filesystem kept
	StatusCompleting Status = "completing" // teardown under way, reason known
	StatusCompleted  Status = "completed"  // gone; terminal
	StatusFailed     Status = "failed"     // gone after a failure; terminal
)

// The permitted moves.
//
//	pending → creating → running ⇄ paused
//	                      │  ⇅
//	                      │ stopped
//	                      ▼
//	                 completing → completed
//	any but terminal ──────────→ failed
//
// stopped → creating is the start of a stopped sandbox; paused and stopped
// may end without running again.
var moves = map[Status][]Status{
	StatusPending:    {StatusCreating, StatusCompleting, StatusFailed},
	StatusCreating:   {StatusRunning, StatusStopped, StatusCompleting, StatusFailed},
	StatusRunning:    {StatusPaused, StatusStopped, StatusCompleting, StatusFailed},
	StatusPaused:     {StatusRunning, StatusStopped, StatusCompleting, StatusFailed},
	StatusStopped:    {StatusCreating, StatusCompleting, StatusFailed},
	StatusCompleting: {StatusCompleted, StatusFailed},
	StatusCompleted:  nil,
	StatusFailed:     nil,
}

// Statuses lists every status, in the order of a life.
func Statuses() []Status {
	return []Status{
		StatusPending, StatusCreating, StatusRunning, StatusPaused,
		StatusStopped, StatusCompleting, StatusCompleted, StatusFailed,
	}
}

// Valid reports whether s is one of the statuses.
func (s Status) Valid() bool { _, ok := moves[s]; return ok }

// Terminal reports whether nothing follows s.
func (s Status) Terminal() bool { return s == StatusCompleted || s == StatusFailed }

// CanMove reports whether a sandbox may go from s to t.
func (s Status) CanMove(t Status) bool {
	return slices.Contains(moves[s], t)
}

// Reason says why a sandbox ended or stopped.
type Reason string

// The end reasons.
const (
	ReasonNone         Reason = ""
	ReasonExited       Reason = "exited"        // its main command ended
	ReasonCancelled    Reason = "cancelled"     // a person or program removed it
	ReasonTTL          Reason = "ttl"           // its lifetime was over
	ReasonIdle         Reason = "idle"          // nothing ran and nobody called for the idle timeout
	ReasonBudget       Reason = "budget"        // its money was gone
	ReasonOOM          Reason = "oom"           // the kernel killed its workload for memory
	ReasonDisk         Reason = "disk"          // its disk quota was full
	ReasonPolicy       Reason = "policy"        // a guardian or rule ended it
	ReasonTimeout      Reason = "timeout"       // its main command ran over its time
	ReasonCrashed      Reason = "crashed"       // PID 1 died
	ReasonHostRestart  Reason = "host_restart"  // the host went down under it
	ReasonCreateFailed Reason = "create_failed" // it never came to run
	ReasonFilesGone    Reason = "files_gone"    // it is stopped, and its files were lost meanwhile
)

// Reasons lists every end reason.
func Reasons() []Reason {
	return []Reason{
		ReasonExited, ReasonCancelled, ReasonTTL, ReasonIdle, ReasonBudget, ReasonOOM, ReasonDisk,
		ReasonPolicy, ReasonTimeout, ReasonCrashed, ReasonHostRestart, ReasonCreateFailed, ReasonFilesGone,
	}
}

// Failed reports whether a sandbox that ends for r ends as failed rather
// than completed.
func (r Reason) Failed() bool {
	switch r {
	case ReasonCrashed, ReasonHostRestart, ReasonCreateFailed, ReasonOOM, ReasonDisk:
		return true
	}
	return false
}
