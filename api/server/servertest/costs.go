package servertest

import (
	"context"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Prices implements server.Manager: one book, with a custom meter.
func (m *Memory) Prices(context.Context) ([]cost.Book, error) {
	if err := m.fail("Prices"); err != nil {
		return nil, err
	}
	return []cost.Book{*testBook()}, nil
}

func testBook() *cost.Book {
	return &cost.Book{
		Version: "2026-01", Currency: "EUR", From: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
		Prices: map[cost.Meter]cost.Price{"model.tokens": {Price: 150_000_000, Per: 1_000_000, Unit: "token"}},
	}
}

// PostEntry implements server.Manager.
func (m *Memory) PostEntry(_ context.Context, req cost.EntryRequest) (cost.Posted, error) {
	if err := m.fail("PostEntry"); err != nil {
		return cost.Posted{}, err
	}
	e, err := req.Entry(time.Now().UTC())
	if err != nil {
		return cost.Posted{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.Scope == cost.ScopeSandbox {
		b, err := m.find(e.ID)
		if err != nil {
			return cost.Posted{}, err
		}
		e.ID = string(b.sb.ID)
	}
	if e.Key == "" {
		e.Key = "once-" + string(sandbox.NewID())
	}
	if err := e.Validate(); err != nil {
		return cost.Posted{}, err
	}
	for _, p := range m.entries {
		if p.Scope == e.Scope && p.ID == e.ID && p.Key == e.Key {
			return p, e.Repeats(p.Entry)
		}
	}
	p := cost.Posted{Entry: e, Number: int64(len(m.entries) + 1), Charged: e.Amount, Actor: req.Actor}
	if e.Meter != "" {
		if err := e.Check(testBook()); err != nil {
			return cost.Posted{}, err
		}
		p.Book = testBook().Version
		charged, err := testBook().Rate(e.Meter, e.Quantity)
		if err != nil {
			return cost.Posted{}, err
		}
		p.Charged, _ = charged.Nano()
	}
	m.entries = append(m.entries, p)
	return p, nil
}

// Entry implements server.Manager.
func (m *Memory) Entry(_ context.Context, number int64) (cost.Posted, error) {
	if err := m.fail("Entry"); err != nil {
		return cost.Posted{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.entries {
		if p.Number == number {
			return p, nil
		}
	}
	return cost.Posted{}, cost.EntryNotFound(number)
}

// CancelEntry implements server.Manager.
func (m *Memory) CancelEntry(ctx context.Context, number int64, reason, actor string) (cost.Posted, error) {
	p, err := m.Entry(ctx, number)
	if err == nil {
		err = cost.ValidateReason(reason)
	}
	if err != nil {
		return cost.Posted{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.entries {
		if c.Cancels == number {
			return c, nil
		}
	}
	p.Number, p.Cancels, p.Amount, p.Charged, p.Note, p.Actor, p.MadeAt = int64(len(m.entries)+1), number, -p.Amount, -p.Charged, reason, actor, time.Now().UTC()
	m.entries = append(m.entries, p)
	return p, nil
}

// Entries implements server.Manager.
func (m *Memory) Entries(_ context.Context, q cost.EntryQuery) ([]cost.Posted, error) {
	if err := m.fail("Entries"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []cost.Posted
	for _, p := range slices.Backward(m.entries) {
		if (q.Kind == "" || p.Kind == q.Kind) && (q.Before == 0 || p.Number < q.Before) && len(out) < q.Limit {
			out = append(out, p)
		}
	}
	return out, nil
}

// Statement implements server.Manager: of the entries alone.
func (m *Memory) Statement(_ context.Context, q cost.StatementQuery) (cost.Statement, error) {
	if err := m.fail("Statement"); err != nil {
		return cost.Statement{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := cost.Statement{From: q.From, To: q.To, By: q.By, Book: q.Book, Currency: "EUR"}
	for _, p := range m.entries {
		if p.Kind == cost.KindRevenue {
			s.Total.Revenue = s.Total.Revenue.Add(cost.SumOf(p.Charged))
		} else {
			s.Total.Outside = s.Total.Outside.Add(cost.SumOf(p.Charged))
		}
	}
	s.Total.Finish()
	if len(m.entries) > 0 {
		l := s.Total
		l.Key = m.entries[0].ID
		s.Lines = append(s.Lines, l)
	}
	return s, nil
}
