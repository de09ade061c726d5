package api

import "github.com/sandboxd/sandboxd/sandbox"

// SnapshotList is the answer to a listing of snapshots, newest first.
type SnapshotList struct {
	Items []sandbox.Snapshot `json:"items"`
	Next  string             `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// ForkList is what a fork made, in the order of the names.
type ForkList struct {
	Items []sandbox.Fork `json:"items"`
}

// RollbackRequest names the snapshot to go back to.
type RollbackRequest struct {
	Snapshot string `json:"snapshot" minLength:"1" maxLength:"63" doc:"Id, name or unique beginning of an id."`
}

// UndoRequest says how far to go back.
type UndoRequest struct {
	Steps int `json:"steps,omitempty" minimum:"0" maximum:"10000" doc:"Restore points to go back; 0 means 1."`
}

// ResetRequest says what to reset.
type ResetRequest struct {
	Only []string `json:"only,omitempty" maxItems:"1000" doc:"Absolute paths to give their first content again, while processes go on; empty: everything, and processes are killed."`
}

// FileChanges is the answer to a comparison, in the order of the paths.
type FileChanges struct {
	Items []sandbox.FileChange `json:"items"`
	More  bool                 `json:"more" doc:"There are more than the limit."`
}

// ScheduleList is the answer to a listing of schedules.
type ScheduleList struct {
	Items []sandbox.Schedule `json:"items"`
}

// ScheduleRequest asks for a schedule; see sandbox.Schedule.
type ScheduleRequest struct {
	Action  string `json:"action" enum:"snapshot,reset"`
	Cron    string `json:"cron" minLength:"1" maxLength:"120" doc:"Five fields, or @hourly, @daily, @weekly, @monthly, @every DURATION; in UTC unless it begins with TZ=…"`
	Keep    int    `json:"keep,omitempty" minimum:"0" maximum:"10000" doc:"Of snapshots: how many are kept, the newest; 0: all."`
	KeepFor int64  `json:"keep_seconds,omitempty" minimum:"0" doc:"Of snapshots: how long each is kept; 0: for good."`
	Force   bool   `json:"force,omitempty" doc:"Of resets: also while a process runs."`
}
