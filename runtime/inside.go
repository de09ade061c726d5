package runtime

import (
	"bytes"
	"context"
	"encoding/json"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// actorInside is who a program in a sandbox is.
const actorInside = "inside"

// maxInside is the largest amount from inside: many times it fits into a sum.
const maxInside = 10_000 * cost.Unit

// question is what a program inside may ask: to enter a cost or a revenue of
// its own sandbox.
type question struct {
	Op       string     `json:"op"` // cost or revenue
	Amount   string     `json:"amount"`
	Meter    cost.Meter `json:"meter"`
	Quantity string     `json:"quantity"`
	Key      string     `json:"key"`
	Note     string     `json:"note"`
}

// reply is the answer: what the entry came to, or why there is none.
type reply struct {
	Charged *cost.Nano  `json:"charged,omitempty"`
	Number  int64       `json:"number,omitempty"`
	Error   *replyError `json:"error,omitempty"`
}

type replyError struct {
	Class  string `json:"class"`
	Code   string `json:"code"`
	Detail string `json:"detail"`
}

// answer answers a program inside. Who asks is hostile: it
// can enter what it likes, but nothing that makes its sandbox cost less, and for
// that sandbox alone, if whoever made it permits it at all. Told again by PID 1, as to a new daemon, a
// question makes no second entry: where it brings no key it has PID 1's.
func (m *Manager) answer(ctx context.Context, b *box, id int64, key, line string) {
	p, err := m.enterInside(ctx, b, key, line)
	r := reply{Charged: &p.Charged, Number: p.Number}
	if err != nil {
		e := replyError{Class: "internal", Code: sandbox.CodeOf(err), Detail: "the daemon is in trouble: try again"}
		if class := sandbox.ClassOf(err); class != nil {
			e.Class, e.Detail = class.Error(), err.Error()
		} else {
			m.log.ErrorContext(ctx, "take an entry from inside", "sandbox", b.id, "err", err)
		}
		r = reply{Error: &e}
	}
	text, err := json.Marshal(r)
	if err == nil {
		err = b.guest.Answer(ctx, id, string(text))
	}
	if err != nil {
		m.log.DebugContext(ctx, "answer a program inside", "sandbox", b.id, "err", err)
	}
}

func (m *Manager) enterInside(ctx context.Context, b *box, key, line string) (cost.Posted, error) {
	var q question
	d := json.NewDecoder(bytes.NewReader([]byte(line)))
	d.DisallowUnknownFields()
	if err := d.Decode(&q); err != nil {
		return cost.Posted{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", `one line as {"op":"cost","meter":"model.tokens","quantity":"1200","key":"…"}: %w`, err)
	}
	req := cost.EntryRequest{
		Sandbox: string(b.id), Meter: q.Meter, Note: q.Note, Key: q.Key, Kind: cost.Kind(q.Op), Actor: actorInside,
	}
	if req.Key == "" {
		req.Key = actorInside + "-" + key
	}
	var err error
	if q.Amount != "" {
		if req.Amount, err = cost.ParseAmount("amount", q.Amount, 0, maxInside); err != nil {
			return cost.Posted{}, err
		}
	}
	if q.Quantity != "" {
		if req.Quantity, err = cost.ParseEntryQuantity("quantity", q.Quantity); err != nil {
			return cost.Posted{}, err
		}
	}
	sb, err := m.state.Sandbox(ctx, b.id)
	switch {
	case err != nil:
		return cost.Posted{}, err
	case !sb.Spec.CostEntries:
		return cost.Posted{}, sandbox.Errorf(sandbox.ErrForbidden, "entries_forbidden", "this sandbox enters no costs: create it with cost_entries ('sandbox create --cost-entries')")
	}
	return m.PostEntry(ctx, req)
}
