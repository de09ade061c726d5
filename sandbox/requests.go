package sandbox

import "time"

// CreateRequest asks for a new sandbox.
type CreateRequest struct {
	Spec Spec
	// IdempotencyKey, when not empty, makes a repeated request return the
	// sandbox the first one made. The same key with another spec is a conflict.
	IdempotencyKey string
	Actor          string // who asks: uid:0, daemon, …
	// Base, when not nil, is what it is made of, in place of the spec's image:
	// an image that needs no name. For the daemon's own builds.
	Base *Image
}

// Filter chooses sandboxes from a list. Its zero value means the first page
// of all that have not ended.
type Filter struct {
	Statuses []Status          // any of these; empty means all that All permits
	Labels   map[string]string // every one must match
	Unlike   map[string]string // none may match; one that lacks the label does not
	Name     string            // exactly this name; empty means any
	Owner    string            // only of this owner; empty means any
	All      bool              // ended ones too
	// StartedAfter leaves out those that first ran by then, or never did.
	StartedAfter time.Time
	OldestFirst  bool   // the other way round
	Cursor       string // Page.Next of the page before; empty means the first
	Limit        int    // most items in the page; 0 means DefaultPage
}

// Bounds of a page.
const (
	DefaultPage = 100
	MaxPage     = 1000
)

// Page is one page of a list, newest first unless the filter says otherwise.
type Page struct {
	Items []Sandbox
	Next  string // cursor of the next page; empty on the last
}

// Check is one finding of the doctor: something the daemon needs of its
// host, how it stands and how to mend it.
type Check struct {
	Name   string      `json:"name"`
	Status CheckStatus `json:"status" enum:"ok,warn,fail"`
	Detail string      `json:"detail" doc:"What was found."`
	Mend   string      `json:"mend,omitempty" doc:"What to do about it."`
}

// CheckStatus is how a check came out.
type CheckStatus string

// The outcomes of a check.
const (
	CheckOK   CheckStatus = "ok"   // as it should be
	CheckWarn CheckStatus = "warn" // sandboxes run, but something is weaker or slower
	CheckFail CheckStatus = "fail" // sandboxes cannot run
)
