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

// The bounds of one entry, either way, and of what the entries of one target
// add up to by kind, meter and book. A mistake of units is refused by them; no
// sum relies on them. The database's migration 0013 has those of an entry.
const (
	MaxEntry         Nano   = 1_000_000_000 * Unit
	MaxEntryQuantity uint64 = 1_000_000_000_000_000
)

// trillion is 10^12 units.
const trillion = 1_000_000_000_000 * 1_000_000_000

var (
	maxEntries         = Sum{hi: trillion >> 64, lo: trillion & (1<<64 - 1)}
	maxEntriesQuantity = Count(1_000_000_000_000_000_000)
)

// Entry is a cost or a revenue from outside: an amount, or a quantity of a
// custom meter that the book in force has a price for. Amounts are of the
// books' currency. Entries are added, never changed: an entry is taken back by
// another one below zero, or by its cancellation.
type Entry struct {
	Key      string    `json:"key"` // idempotency key, chosen by the sender; unique for its sender and target
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
		return CheckCharge(SumOf(e.Amount))
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
	case e.Quantity.Cmp(Count(MaxEntryQuantity)) > 0:
		return sandbox.Errorf(sandbox.ErrTooLarge, "entry_too_large", "quantity %s of %s: one entry has at most %d: check its unit, or send several", e.Quantity, e.Meter, MaxEntryQuantity)
	}
	return nil
}

// CheckCharge checks what one entry comes to. Class ErrTooLarge, code
// entry_too_large.
func CheckCharge(amount Sum) error {
	if amount.Cmp(SumOf(MaxEntry)) > 0 || amount.Cmp(SumOf(-MaxEntry)) < 0 {
		return sandbox.Errorf(sandbox.ErrTooLarge, "entry_too_large", "an entry of %s: one entry comes to at most %s either way: check its unit and the price, or send several", amount, MaxEntry)
	}
	return nil
}

// CheckEntries checks what all entries of one target come to. Class
// ErrTooLarge, code entries_too_large.
func CheckEntries(amount Sum, quantity Quantity) error {
	if amount.Cmp(maxEntries) > 0 || amount.Cmp(maxEntries.Neg()) < 0 || quantity.Cmp(maxEntriesQuantity) > 0 {
		return sandbox.Errorf(sandbox.ErrTooLarge, "entries_too_large",
			"with it the entries of this target come to %s (quantity %s); together they end at %s (%s): cancel those that are wrong ('sandbox cost ls', 'sandbox cost cancel')",
			amount, quantity, maxEntries, maxEntriesQuantity)
	}
	return nil
}

// ValidateReason checks why an entry is cancelled. Class ErrInvalid.
func ValidateReason(reason string) error {
	if reason == "" || len(reason) > MaxNote || !utf8.ValidString(reason) {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_reason", "reason: say why the entry is cancelled, in 1 to %d bytes of UTF-8", MaxNote)
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
