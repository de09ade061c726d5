package runtime

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// Costs are derived, not stored: a statement takes the readings of the ledger
// at the ends of its span and wherever a price book came in force, and rates
// the differences. Only what comes from outside has rows of its own.

// openPrices puts the configured price books beside those that were in use.
func (m *Manager) openPrices(ctx context.Context) error {
	kept, err := m.state.Books(ctx)
	if err != nil {
		return err
	}
	if m.prices, err = cost.Reopen(m.cfg.Prices, kept); err != nil {
		return err
	}
	if err := m.noteBooks(ctx); err != nil {
		return err
	}
	return m.reportQuarantine(ctx)
}

// noteBooks keeps the price books that have begun: charges are made with them
// from now on.
func (m *Manager) noteBooks(ctx context.Context) error {
	now := time.Now()
	for _, b := range m.prices.Books() {
		if b.From.After(now) {
			break
		}
		if err := m.state.NoteBook(ctx, b, now); err != nil {
			return err
		}
	}
	return nil
}

// Prices lists the price books, the earliest first.
func (m *Manager) Prices(context.Context) ([]cost.Book, error) {
	var all []cost.Book
	for _, b := range m.prices.Books() {
		all = append(all, *b)
	}
	return all, nil
}

// PostEntry takes in a cost or a revenue from outside. With the same key it is
// taken once.
func (m *Manager) PostEntry(ctx context.Context, req cost.EntryRequest) (cost.Posted, error) {
	e, err := req.Entry(time.Now())
	if err != nil {
		return cost.Posted{}, err
	}
	if e.Scope == cost.ScopeSandbox {
		if e.ID, err = m.inLedger(ctx, e.ID); err != nil {
			return cost.Posted{}, err
		}
	}
	if e.Key == "" {
		e.Key = "once-" + string(sandbox.NewID())
	}
	book, _ := m.prices.At(e.At)
	ctx = context.WithoutCancel(ctx)
	m.budgets.posting.RLock()
	p, existed, err := m.state.PutEntry(ctx, e, book, req.Actor)
	if err == nil && !existed {
		m.budgets.entered(p)
	}
	m.budgets.posting.RUnlock()
	if err == nil && !existed && p.Kind == cost.KindCost {
		m.assess(ctx, func(t *tally, _ time.Time) bool { return t.counts(p) })
	}
	return p, err
}

// CancelEntry takes an entry back for good: every sum, report and budget is as
// if it had not been. Cancelling it again answers with the same cancellation.
// ErrNotFound with code entry_not_found.
func (m *Manager) CancelEntry(ctx context.Context, number int64, reason, actor string) (cost.Posted, error) {
	ctx = context.WithoutCancel(ctx)
	m.budgets.posting.RLock()
	p, existed, err := m.state.CancelEntry(ctx, number, reason, actor, time.Now())
	m.budgets.posting.RUnlock()
	if err != nil || existed {
		return p, err
	}
	ev := sandbox.Event{Type: "cost.cancelled", Actor: actor, Data: map[string]string{
		"entry": strconv.FormatInt(number, 10), "cancellation": strconv.FormatInt(p.Number, 10), "kind": string(p.Kind),
		"scope": string(p.Scope), "id": p.ID, "amount": p.Charged.String(), "reason": reason,
	}}
	if p.Scope == cost.ScopeSandbox {
		ev.Sandbox = sandbox.ID(p.ID)
	}
	m.record(ctx, ev)
	m.assess(ctx, func(t *tally, _ time.Time) bool {
		t.built = false // what it added up had the entry
		return true
	})
	return p, nil
}

// Entry returns an entry. ErrNotFound with code entry_not_found.
func (m *Manager) Entry(ctx context.Context, number int64) (cost.Posted, error) {
	return m.state.Entry(ctx, number)
}

// reportQuarantine tells at start which entries no sum has.
func (m *Manager) reportQuarantine(ctx context.Context) error {
	all, err := m.state.Quarantined(ctx, cost.EntryQuery{})
	for _, e := range all {
		m.log.WarnContext(ctx, "an entry is beyond the bounds of an entry: no sum has it, and the budgets it is of hold until it is cancelled ('sandbox cost cancel')",
			"entry", e.Number, "kind", e.Kind, "scope", e.Scope, "id", e.ID, "owner", e.Owner, "amount", e.Charged, "meter", e.Meter, "quantity", e.Quantity)
	}
	return err
}

// inLedger returns the id of a sandbox that ref names, which may have been
// forgotten but for the ledger.
func (m *Manager) inLedger(ctx context.Context, ref string) (string, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err == nil {
		return string(sb.ID), nil
	}
	if errors.Is(err, sandbox.ErrNotFound) && m.state.InLedger(ctx, sandbox.ID(ref)) {
		return ref, nil
	}
	return "", err
}

// Entries lists costs and revenue from outside, the newest first.
func (m *Manager) Entries(ctx context.Context, q cost.EntryQuery) ([]cost.Posted, error) {
	if q.Sandbox != "" {
		var err error
		if q.Sandbox, err = m.inLedger(ctx, q.Sandbox); err != nil {
			return nil, err
		}
	}
	if q.Limit <= 0 || q.Limit > sandbox.MaxPage+1 { // the server asks for one more
		q.Limit = sandbox.MaxPage + 1
	}
	return m.state.Entries(ctx, q)
}

// Statement tells what was spent and earned in a span of time, as UsageReport
// what was used.
func (m *Manager) Statement(ctx context.Context, q cost.StatementQuery) (cost.Statement, error) {
	pieces, book, err := m.pieces(&q)
	if err != nil {
		return cost.Statement{}, err
	}
	if q.Sandbox != "" {
		if q.Sandbox, err = m.inLedger(ctx, q.Sandbox); err != nil {
			return cost.Statement{}, err
		}
	}
	if time.Until(q.To) > -2*m.cfg.Usage.Interval {
		if err := m.meterRound(ctx, m.livingOf(payers{sandbox: q.Sandbox, project: q.Project, owner: q.Owner}), true); err != nil {
			return cost.Statement{}, err
		}
	}
	s := &statement{
		out:  cost.Statement{From: q.From, To: q.To, By: q.By, Book: q.Book, Currency: m.prices.Currency()},
		keys: map[string]*statementLine{}, end: q.To,
	}
	if len(pieces) > 0 {
		s.end = pieces[len(pieces)-1].To
	}
	if err := m.addUsage(ctx, s, q, pieces); err != nil {
		return cost.Statement{}, err
	}
	if err := m.addEntries(ctx, s, q, book); err != nil {
		return cost.Statement{}, err
	}
	return s.finish()
}

// pieces checks a query and completes it; book is the one to rate anew with.
// Until now means to the last reading, which may be ahead of the clock.
func (m *Manager) pieces(q *cost.StatementQuery) (pieces []cost.Stretch, book *cost.Book, err error) {
	var end time.Time
	if q.To.IsZero() {
		q.To = time.Now()
		end = whole(q.To.Add(aheadOfClock))
	}
	q.From, q.To = whole(q.From), whole(q.To)
	if q.To.Before(q.From) || !q.From.IsZero() && q.From.Unix() < 0 {
		return nil, nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_report", "a span from %s to %s: begin after 1970 and end later", q.From.Format(time.RFC3339), q.To.Format(time.RFC3339))
	}
	pieces = m.prices.Stretches(q.From, q.To)
	if q.Book != "" {
		var ok bool
		if book, ok = m.prices.Book(q.Book); !ok {
			return nil, nil, sandbox.Errorf(sandbox.ErrNotFound, "book_not_found", "no price book %.70q: the daemon's configuration has the books, GET /v1/prices lists them", q.Book)
		}
		pieces = cost.Rerated(book, q.From, q.To)
	}
	if !end.IsZero() {
		pieces = openEnded(pieces, end)
	}
	return pieces, book, nil
}

// whole drops what the ledger does not tell apart.
func whole(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC().Truncate(time.Millisecond)
}

// statement is one being made.
type statement struct {
	end  time.Time // of what is added up: where it is until now, later
	out  cost.Statement
	keys map[string]*statementLine
}

type statementLine struct {
	cost.StatementLine
	bill cost.Bill
}

func (s *statement) line(key string) *statementLine {
	l := s.keys[key]
	if l == nil {
		l = &statementLine{StatementLine: cost.StatementLine{Key: key}}
		s.keys[key] = l
	}
	return l
}

// addUsage charges what the daemon counted.
func (m *Manager) addUsage(ctx context.Context, s *statement, q cost.StatementQuery, pieces []cost.Stretch) error {
	times, end := cost.Instants(pieces), s.end
	all, err := m.state.Totals(ctx, state.TotalsQuery{
		Times: times, From: q.From, To: end, By: q.By, Sandbox: q.Sandbox, Owner: q.Owner, Project: q.Project,
	})
	if err != nil {
		return err
	}
	for _, t := range all {
		meters := func(at time.Time) sandbox.Meters { return metersAt(times, t.At, at) }
		charges, err := cost.ChargePieces(pieces, func(at time.Time) cost.Usage { return cost.UsageOf(meters(at)) })
		if err != nil {
			return err
		}
		l := s.line(t.Key)
		l.Sandboxes++
		l.Meters = l.Meters.Add(meters(end).Less(meters(q.From)))
		if err := l.bill.Add(charges...); err != nil {
			return err
		}
	}
	for _, l := range s.keys {
		l.Usage = l.bill.Total()
	}
	return nil
}

// metersAt finds what was read at a time.
func metersAt(times []time.Time, at []sandbox.Meters, t time.Time) sandbox.Meters {
	for i := range times {
		if times[i].Equal(t) {
			return at[i]
		}
	}
	return sandbox.Meters{} // the beginning
}

// addEntries adds what came from outside; with a book, quantities are rated
// anew.
func (m *Manager) addEntries(ctx context.Context, s *statement, q cost.StatementQuery, book *cost.Book) error {
	eq := cost.EntryQuery{From: q.From, To: s.end, Sandbox: q.Sandbox, Owner: q.Owner, Project: q.Project}
	sums, err := m.state.EntrySums(ctx, q.By, eq)
	if err != nil {
		return err
	}
	for _, e := range sums {
		l := s.line(e.Key)
		switch {
		case e.Kind == cost.KindRevenue:
			l.Revenue = l.Revenue.Add(e.Amount)
		case e.Meter == "":
			l.Outside = l.Outside.Add(e.Amount)
		case book == nil:
			if err := l.outside(cost.Charge{Book: e.Book, Meter: e.Meter, Quantity: e.Quantity, Amount: e.Amount}); err != nil {
				return err
			}
		}
	}
	aside, err := m.state.Quarantined(ctx, eq)
	if err != nil {
		return err
	}
	for _, e := range aside {
		s.out.Quarantined = append(s.out.Quarantined, e.Number)
	}
	if book == nil {
		return nil
	}
	anew, err := m.state.MeteredEntries(ctx, q.By, eq)
	if err != nil {
		return err
	}
	for _, e := range anew {
		amount, err := book.Charge(e.Meter, e.Before, e.Upto)
		if err == nil {
			err = s.line(e.Key).outside(cost.Charge{Book: book.Version, Meter: e.Meter, Quantity: e.Upto.Less(e.Before), Amount: amount})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// outside adds the charge of a custom meter.
func (l *statementLine) outside(c cost.Charge) error {
	l.Outside = l.Outside.Add(c.Amount)
	return l.bill.Add(c)
}

// finish adds the lines up.
func (s *statement) finish() (cost.Statement, error) {
	var bill cost.Bill
	total := &s.out.Total
	for _, key := range slices.Sorted(maps.Keys(s.keys)) {
		l := s.keys[key]
		l.Charges = l.bill.Charges()
		l.Finish()
		if err := bill.Add(l.Charges...); err != nil {
			return s.out, err
		}
		total.Sandboxes += l.Sandboxes
		total.Meters = total.Meters.Add(l.Meters)
		total.Usage, total.Outside, total.Revenue = total.Usage.Add(l.Usage), total.Outside.Add(l.Outside), total.Revenue.Add(l.Revenue)
		s.out.Lines = append(s.out.Lines, l.StatementLine)
	}
	total.Charges = bill.Charges()
	total.Finish()
	return s.out, nil
}
