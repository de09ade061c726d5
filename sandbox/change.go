package sandbox

// FileChange is one file that differs between two states of a sandbox.
type FileChange struct {
	Path string     `json:"path" doc:"Absolute, as seen inside."`
	Kind ChangeKind `json:"kind" enum:"added,changed,removed"`
	Type FileType   `json:"type" enum:"file,dir,symlink,other" doc:"What it is now; of a removed file, what it was."`
	Size int64      `json:"size" doc:"Bytes of a file; 0 for anything else."`
	Mode uint32     `json:"mode" doc:"Permission bits with set-id and sticky."`
}

// ChangeKind is what became of a file.
type ChangeKind string

// The kinds of change.
const (
	ChangeAdded   ChangeKind = "added"
	ChangeChanged ChangeKind = "changed"
	ChangeRemoved ChangeKind = "removed"
)
