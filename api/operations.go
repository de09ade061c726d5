package api

import (
	"encoding/json"
	"time"
)

// PreferAsync is what the header Prefer has where a long operation is to go on
// by itself: the answer is the operation, at once (RFC 7240, 4.1).
const PreferAsync = "respond-async"

// Operation is work that takes long. It goes on when whoever asked for it in
// the background has gone, and ends with the daemon.
type Operation struct {
	ID        string          `json:"id" doc:"op and 12 characters."`
	Kind      string          `json:"kind" enum:"pull-image,push-image,build-image"`
	Subject   string          `json:"subject,omitempty" doc:"What it works on: the name of an image."`
	Owner     string          `json:"owner" doc:"Who asked for it."`
	Status    OperationStatus `json:"status" enum:"running,succeeded,failed,cancelled"`
	Progress  json.RawMessage `json:"progress,omitempty" doc:"What it told last: of a pull or push an ImageProgress, of a build a BuildEvent."`
	Result    json.RawMessage `json:"result,omitempty" doc:"Once succeeded: what the call would have answered, an Image or Pushed."`
	Problem   *Problem        `json:"problem,omitempty" doc:"Once failed: what the call would have answered."`
	CreatedAt time.Time       `json:"created_at"`
	EndedAt   *time.Time      `json:"ended_at,omitempty"`
}

// OperationStatus is how far an operation is.
type OperationStatus string

// The statuses of operations.
const (
	OperationRunning   OperationStatus = "running"
	OperationSucceeded OperationStatus = "succeeded"
	OperationFailed    OperationStatus = "failed"
	OperationCancelled OperationStatus = "cancelled"
)

// Ended reports whether nothing of it will change.
func (o Operation) Ended() bool { return o.Status != OperationRunning }

// OperationList is a page of operations, newest first.
type OperationList struct {
	Items []Operation `json:"items"`
	Next  string      `json:"next,omitempty" doc:"cursor of the next page; absent on the last."`
}

// MaxOperationWait is the longest a request waits for an operation, in seconds.
const MaxOperationWait = 60
