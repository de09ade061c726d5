package cost

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// NoBook is the version of charges made while no book is in force: counted,
// and free. No book may be called so.
const NoBook = "none"

// Price is what some units of a meter cost: Price for each Per of Unit.
type Price struct {
	Price Nano   `yaml:"price" json:"price"`
	Per   int64  `yaml:"per" json:"per,omitempty"` // 0 means 1
	Unit  string `yaml:"unit" json:"unit"`         // cpu-second, gib-hour, …; of custom meters any name
}

// UnmarshalYAML reads a price, of which none of the numbers is guessed: the
// decoder would make 1 of a per of 1.5, and nothing of a missing price.
func (p *Price) UnmarshalYAML(read func(any) error) error {
	var in struct {
		Price *newPrice `yaml:"price"`
		Per   whole     `yaml:"per"`
		Unit  string    `yaml:"unit"`
	}
	if err := read(&in); err != nil {
		return err
	}
	if err := p.set((*Nano)(in.Price), int64(in.Per), in.Unit); err != nil {
		return err
	}
	// Of a kept book, which is JSON, it is no error: it was in force.
	if _, known := units[p.Unit]; !known && p.Unit != "" && uint64(p.Price)/p.per() > uint64(MaxEntry) {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_prices",
			"price %s of %d %.40q: none could be entered, for one entry comes to at most %s: use a price from 0 to %[4]s for each, as 0.15", p.Price, p.per(), p.Unit, MaxEntry)
	}
	return nil
}

// newPrice is a price in a configuration.
type newPrice Nano

// UnmarshalYAML reads a number as it is written in the file, in quotes or not.
func (p *newPrice) UnmarshalYAML(b []byte) error {
	n, err := ParseAmount("price", unquote(b), 0, MaxNano)
	*p = newPrice(n)
	return err
}

// UnmarshalJSON does the same for JSON: a price is there, and a text.
func (p *Price) UnmarshalJSON(b []byte) error {
	var in struct {
		Price *Nano  `json:"price"`
		Per   int64  `json:"per"`
		Unit  string `json:"unit"`
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		return err
	}
	return p.set(in.Price, in.Per, in.Unit)
}

func (p *Price) set(price *Nano, per int64, unit string) error {
	if price == nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_prices", "a price is missing: write it as {price: 0.000011, unit: cpu-second}, or 0 for what is free")
	}
	*p = Price{*price, per, unit}
	return nil
}

// whole is a number that a decoder must not round.
type whole int64

// UnmarshalYAML reads plain digits.
func (w *whole) UnmarshalYAML(b []byte) error {
	text := unquote(b)
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_prices", "per %.40q: use a whole number from 1 to %d, as 1000000", text, int64(maxPer))
	}
	*w = whole(n)
	return nil
}

func (p Price) per() uint64 { return uint64(max(p.Per, 1)) }

// base is the unit's size in base units.
func (p Price) base() uint64 {
	if u, ok := units[p.Unit]; ok {
		return u.base
	}
	return 1
}

// validate checks the price of one meter.
func (p Price) validate(m Meter) error {
	if err := m.Validate(); err != nil {
		return err
	}
	bad := func(format string, args ...any) error {
		return fmt.Errorf("prices: %s: %s", m, fmt.Sprintf(format, args...))
	}
	unit, known := units[p.Unit]
	switch {
	case !m.priced():
		return bad("only budgets have this meter: price net_out, net_in, wall_running or wall_paused")
	case p.Price < 0:
		return bad("price %s: prices are not negative; a credit is an outside cost below zero", p.Price)
	case p.Per < 0 || p.Per > maxPer:
		return bad("per %d: use 1 to %d", p.Per, int64(maxPer))
	case m.Custom() && (known || Meter(p.Unit).Validate() != nil):
		return bad("unit %.40q: name what is counted, as token; a custom meter counts whole things", p.Unit)
	case !m.Custom() && (!known || unit.of != m.dimension()):
		return bad("unit %.40q: use %s", p.Unit, strings.Join(unitNames(m.dimension()), " or "))
	}
	return nil
}

// Book is one version of the prices. It does not change once it is in force:
// new prices are a new book.
type Book struct {
	Version  string          `yaml:"version" json:"version"`
	Currency string          `yaml:"currency" json:"currency"`
	From     time.Time       `yaml:"from" json:"from"` // when it comes in force
	Prices   map[Meter]Price `yaml:"prices" json:"prices"`
}

// Validate checks a book alone. Class ErrInvalid, code invalid_prices.
func (b *Book) Validate() error {
	err := sandbox.ValidateName(b.Version)
	switch {
	case err != nil:
	case b.Version == NoBook:
		err = fmt.Errorf("version %q means that no book is in force: choose another name", NoBook)
	case !isCurrency(b.Currency):
		err = fmt.Errorf("currency %.20q: use three to eight capital letters, as EUR", b.Currency)
	case b.From.IsZero():
		err = fmt.Errorf("from: say when it comes in force, as 2026-11-01T00:00:00Z")
	case len(b.Prices) > maxMeters:
		err = fmt.Errorf("%d prices: at most %d", len(b.Prices), maxMeters)
	default:
		for _, m := range slices.Sorted(maps.Keys(b.Prices)) {
			if err = b.Prices[m].validate(m); err != nil {
				break
			}
		}
	}
	if err != nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_prices", "price book %.70q: %w", b.Version, err)
	}
	return nil
}

func isCurrency(s string) bool {
	return len(s) >= 3 && len(s) <= 8 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") == ""
}

// Fingerprint tells whether two books say the same: it is a hash of all but
// the order things are written in.
func (b *Book) Fingerprint() string {
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %d\n", b.Version, b.Currency, b.From.UnixMilli())
	for _, m := range slices.Sorted(maps.Keys(b.Prices)) {
		p := b.Prices[m]
		fmt.Fprintf(h, "%q %s %d %q\n", m, p.Price, p.per(), p.Unit)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Shelf is all books there are, of one currency. The zero Shelf is empty. It
// is not changed after it was made, and safe for use by many.
type Shelf struct {
	books []*Book // by From
}

// NewShelf checks the books, each and beside one another. Class ErrInvalid,
// code invalid_prices.
func NewShelf(books []Book) (Shelf, error) {
	var s Shelf
	for _, b := range books {
		if err := b.Validate(); err != nil {
			return Shelf{}, err
		}
		b.Prices = maps.Clone(b.Prices)
		s.books = append(s.books, &b)
	}
	slices.SortStableFunc(s.books, func(a, b *Book) int { return a.From.Compare(b.From) })
	versions := map[string]bool{}
	for i, b := range s.books {
		bad := func(format string, args ...any) error {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_prices", "price book %q: "+format, append([]any{b.Version}, args...)...)
		}
		if versions[b.Version] {
			return Shelf{}, bad("two books have this version: charges name it, so give the newer one a name of its own")
		}
		versions[b.Version] = true
		if i == 0 {
			continue
		}
		if before := s.books[i-1]; before.From.Equal(b.From) {
			return Shelf{}, bad("it comes in force at the same time as %q: change one of the two", before.Version)
		} else if before.Currency != b.Currency {
			return Shelf{}, bad("its currency is %s and that of %q is %s: budgets add charges up, so all books need one currency", b.Currency, before.Version, before.Currency)
		}
	}
	return s, nil
}

// At returns the book in force at a time: the one that came last. Before the
// first there is none.
func (s Shelf) At(t time.Time) (*Book, bool) {
	for _, b := range slices.Backward(s.books) {
		if !b.From.After(t) {
			return b, true
		}
	}
	return nil, false
}

// Book returns the book of a version.
func (s Shelf) Book(version string) (*Book, bool) {
	for _, b := range s.books {
		if b.Version == version {
			return b, true
		}
	}
	return nil, false
}

// Books returns all books, the earliest first. They are not to be changed.
func (s Shelf) Books() []*Book { return slices.Clone(s.books) }

// Currency returns the currency of the books, or nothing without any.
func (s Shelf) Currency() string {
	if len(s.books) == 0 {
		return ""
	}
	return s.books[0].Currency
}

// CheckUnchanged compares the books with the fingerprints that those in use
// had, by version. Class ErrConflict, code prices_changed: charges that name a
// version must stay explained by it. Books that are gone are no error.
func (s Shelf) CheckUnchanged(known map[string]string) error {
	for _, b := range s.books {
		if f, ok := known[b.Version]; ok && f != b.Fingerprint() {
			return sandbox.Errorf(sandbox.ErrConflict, "prices_changed",
				"price book %q is not what it was when charges were made with it: undo the change, and put new prices into a book with a new version and a later from", b.Version)
		}
	}
	return nil
}
