package cost

import (
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Posted is an entry as it was taken in.
type Posted struct {
	Entry
	Number  int64  `json:"number"`
	Charged Nano   `json:"charged" doc:"What it comes to: the amount, or the price of the quantity."`
	Book    string `json:"book,omitempty" doc:"The price book a quantity was priced with."`
	Actor   string `json:"actor,omitempty" doc:"Who sent it."`
	Owner   string `json:"owner,omitempty" doc:"Who has the sandbox or project it is for, or the owner it is for."`
	Project string `json:"project,omitempty"`

	Cancels     int64     `json:"cancels,omitempty" doc:"It is the cancellation of the entry with this number: its opposite, at the same time."`
	MadeAt      time.Time `json:"made_at,omitzero" doc:"Of a cancellation: when it was made."`
	CancelledBy int64     `json:"cancelled_by,omitempty" doc:"The number of its cancellation: it counts no more."`
	Quarantined bool      `json:"quarantined,omitempty" doc:"It is beyond the bounds of an entry, from before there were bounds: no sum has it, and the budgets it is of hold until it is cancelled."`

	Agent string `json:"-"` // of the sandbox; known to who has just posted it
}

// EntryQuery picks entries.
type EntryQuery struct {
	From, To time.Time // From is in, To is not; zero: no bound
	Sandbox  string    // of this one only, if set
	Owner    string
	Project  string
	Agent    string // of sandboxes with this AgentLabel only, if set
	Kind     Kind
	Before   int64 // a number: older ones only; 0: the newest
	Limit    int   // at most so many
}

// EntryRequest is an entry as it is sent: for one sandbox, project or owner.
type EntryRequest struct {
	Sandbox  string   `json:"sandbox,omitempty" maxLength:"63" doc:"Id, name or unique beginning of an id."`
	Project  string   `json:"project,omitempty" maxLength:"63"`
	Owner    string   `json:"owner,omitempty" maxLength:"256" doc:"As records name it: uid:1000."`
	Amount   Nano     `json:"amount,omitempty" maxLength:"32" doc:"In the currency of the price books, as 12.5; below zero takes something back."`
	Meter    Meter    `json:"meter,omitempty" maxLength:"63" doc:"In place of an amount: a custom meter of the price book in force, as model.tokens."`
	Quantity Quantity `json:"quantity,omitzero" maxLength:"39" doc:"How much of it, as a text: 1200."`
	Note     string   `json:"note,omitempty" maxLength:"1024"`

	Key   string `json:"-"` // idempotency key
	Kind  Kind   `json:"-"`
	Actor string `json:"-"`
}

// Entry returns the entry asked for. Class ErrInvalid where it is not for one
// target.
func (r EntryRequest) Entry(at time.Time) (Entry, error) {
	e := Entry{Key: r.Key, Kind: r.Kind, At: at, Amount: r.Amount, Meter: r.Meter, Quantity: r.Quantity, Note: r.Note}
	var err error
	e.Scope, e.ID, err = OneTarget(r.Sandbox, r.Project, r.Owner)
	return e, err
}

// OneTarget returns the one of three that is not empty. Class ErrInvalid.
func OneTarget(sb, project, owner string) (Scope, string, error) {
	var scope Scope
	var id string
	n := 0
	for _, c := range []struct {
		scope Scope
		id    string
	}{{ScopeSandbox, sb}, {ScopeProject, project}, {ScopeOwner, owner}} {
		if c.id != "" {
			scope, id = c.scope, c.id
			n++
		}
	}
	if n != 1 {
		return "", "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_scope", "name one sandbox, project or owner; %d are named", n)
	}
	var err error
	switch scope {
	case ScopeProject:
		err = sandbox.ValidateProject(id)
	case ScopeOwner:
		err = sandbox.ValidateOwner(id)
	}
	if err != nil {
		return "", "", err
	}
	return scope, id, nil
}

// EntryNotFound is the error for a number that no entry has.
func EntryNotFound(number int64) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "entry_not_found", "no entry %d: 'sandbox cost ls' shows those there are", number)
}
