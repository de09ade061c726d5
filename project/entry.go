package project

import (
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Entry is money that the daemon cannot count itself: spent or earned outside,
// by an agent or by the project as a whole. It is added once for its key and
// never changed; one below zero takes another back.
type Entry struct {
	Key    string    `json:"key" minLength:"1" maxLength:"128" doc:"Chosen by the sender, new for each entry; the same when it is sent again."`
	Kind   cost.Kind `json:"kind" enum:"cost,revenue"`
	Agent  AgentID   `json:"agent,omitempty" maxLength:"63" doc:"Empty: the project as a whole."`
	Amount cost.Nano `json:"amount"`
	Note   string    `json:"note,omitempty" maxLength:"1024"`
	At     time.Time `json:"at,omitzero" doc:"When it was taken in."`
}

// Validate checks an entry. Class ErrInvalid.
func (e Entry) Validate() error {
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_entry", format, args...)
	}
	switch {
	case e.Key == "" || len(e.Key) > cost.MaxKey || strings.ContainsFunc(e.Key, func(c rune) bool { return c <= ' ' || c >= 0x7f }):
		return bad("key %.40q: give 1 to %d printable ASCII characters, new for each entry", e.Key, cost.MaxKey)
	case e.Kind != cost.KindCost && e.Kind != cost.KindRevenue:
		return bad("kind %.40q: use cost or revenue", string(e.Kind))
	case e.Amount == 0:
		return bad("amount 0: give more, or less, than nothing")
	case len(e.Note) > cost.MaxNote:
		return bad("note: at most %d bytes", cost.MaxNote)
	}
	return cost.CheckCharge(cost.SumOf(e.Amount))
}
