package cost

import (
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Kind says which way an outside amount goes.
type Kind string

// The kinds of entries.
const (
	KindCost    Kind = "cost"    // paid elsewhere, as for model tokens; below zero: a credit
	KindRevenue Kind = "revenue" // earned; below zero: paid back
)

// The bounds of an entry's texts, in bytes.
const (
	MaxKey  = 128
	MaxNote = 1024
)

// Entry is a cost or a revenue from outside: an amount, or a quantity of a
// custom meter that the book in force has a price for. Amounts are of the
// books' currency. Entries are added,
// never changed: an entry is taken back by another one below zero.
type Entry struct {
	Key      string    `json:"key"` // idempotency key, chosen by the sender; unique for its target
	Kind     Kind      `json:"kind"`
	Scope    Scope     `json:"scope"`
	ID       string    `json:"id"` // of the sandbox, project or owner
	At       time.Time `json:"at"` // when it was taken in
	Amount   Nano      `json:"amount,omitempty"`
	Meter    Meter     `json:"meter,omitempty"`
	Quantity Quantity  `json:"quantity,omitzero"`
	Note     string    `json:"note,omitempty"`
}

// Validate checks an entry. Class ErrInvalid, code invalid_entry.
func (e Entry) Validate() error {
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_entry", format, args...)
	}
	if err := e.Scope.validate(e.ID); err != nil {
		return bad("%w", err)
	}
	switch {
	case e.Key == "" || len(e.Key) > MaxKey || strings.ContainsFunc(e.Key, func(c rune) bool { return c <= ' ' || c >= 0x7f }):
		return bad("key %.40q: give 1 to %d printable ASCII characters, new for each entry and the same when it is sent again", e.Key, MaxKey)
	case e.Kind != KindCost && e.Kind != KindRevenue:
		return bad("kind %.40q: use %s or %s", string(e.Kind), KindCost, KindRevenue)
	case len(e.Note) > MaxNote || !utf8.ValidString(e.Note):
		return bad("note: at most %d bytes of UTF-8", MaxNote)
	case e.Meter == "" && !e.Quantity.IsZero():
		return bad("a quantity needs a meter: name the one it is of")
	case e.Meter == "" && e.Amount == 0:
		return bad("give an amount, or a meter and a quantity")
	case e.Meter == "":
		return nil
	}
	if err := e.Meter.Validate(); err != nil {
		return bad("%w", err)
	}
	switch {
	case !e.Meter.Custom():
		return bad("meter %s: the daemon counts it itself; use a custom one", e.Meter)
	case e.Amount != 0:
		return bad("give an amount, or a meter and a quantity: not both")
	case e.Quantity.IsZero():
		return bad("quantity of %s: give more than nothing", e.Meter)
	case e.Kind == KindRevenue:
		return bad("meter %s: revenue is an amount", e.Meter)
	}
	return nil
}

// Check says whether a book can price the entry. Class ErrInvalid, code
// unknown_meter; b may be nil.
func (e Entry) Check(b *Book) error {
	if e.Meter == "" {
		return nil
	}
	if b == nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "unknown_meter", "meter %.70q: no price book is in force: send an amount, or add a book to the configuration", string(e.Meter))
	}
	if _, ok := b.Prices[e.Meter]; !ok {
		return sandbox.Errorf(sandbox.ErrInvalid, "unknown_meter", "meter %.70q has no price in book %s: send an amount, or use a meter of the book", string(e.Meter), b.Version)
	}
	return nil
}

// Repeats compares an entry with the one kept under its key: nil where they
// say the same, so that sending it again did nothing. Class ErrConflict, code
// idempotency_mismatch, where they do not. When it was taken in does not count.
func (e Entry) Repeats(kept Entry) error {
	e.At = kept.At
	if e != kept {
		return sandbox.Errorf(sandbox.ErrConflict, "idempotency_mismatch", "key %.40q was used for another entry before: use a new key for a new entry", e.Key)
	}
	return nil
}
