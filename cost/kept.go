package cost

import (
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Kept is a book that was in force while a daemon ran, as that one kept it.
type Kept struct {
	Book        Book
	Fingerprint string
	Until       time.Time // when it was last seen to be in force
}

// Reopen puts the books of a configuration beside those that were in use. What
// was charged stays as it was: one that was in use must not have changed, stays
// where the configuration has it no more, and no new one begins before the
// time that others are known to have been in force. Books begin at midnight
// UTC, for of older times the ledger keeps only the ends of days. Class
// ErrInvalid, code invalid_prices, or ErrConflict, code prices_changed.
func Reopen(configured []Book, kept []Kept) (Shelf, error) {
	for i := range configured {
		b := &configured[i]
		if from := b.From.UTC(); !from.Equal(from.Truncate(24 * time.Hour)) {
			return Shelf{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_prices", "price book %.70q: from %s: books begin at midnight UTC, as 2026-11-01T00:00:00Z", b.Version, from.Format(time.RFC3339))
		}
	}
	asked, err := NewShelf(configured)
	if err != nil {
		return Shelf{}, err
	}
	known, until := map[string]string{}, time.Time{}
	all := configured
	for _, k := range kept {
		known[k.Book.Version] = k.Fingerprint
		if k.Until.After(until) {
			until = k.Until
		}
		if _, ok := asked.Book(k.Book.Version); !ok {
			all = append(slices.Clip(all), k.Book)
		}
	}
	if err := asked.CheckUnchanged(known); err != nil {
		return Shelf{}, err
	}
	for _, b := range asked.books {
		if _, ok := known[b.Version]; !ok && b.From.Before(until) {
			return Shelf{}, sandbox.Errorf(sandbox.ErrConflict, "prices_changed",
				"price book %q is new and begins %s, but until %s others were in force: let it begin later", b.Version, b.From.Format(time.RFC3339), until.Format(time.RFC3339))
		}
	}
	return NewShelf(all)
}
