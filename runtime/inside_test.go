package runtime

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestEntriesFromInside: a program enters what its sandbox costs and earns, once
// however often it is told, and nothing it should not.
func TestEntriesFromInside(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	sb, mute := create(t, h, sandbox.Spec{CostEntries: true, Project: "prj_a"}), create(t, h, sandbox.Spec{})
	ask := func(id sandbox.ID, n int64, line string) string {
		t.Helper()
		h.answer(t.Context(), h.box(id), n, "k"+string(rune('0'+n)), line)
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.answers[n]
	}
	for range 2 { // told again, as after a restart
		if got := ask(sb.ID, 1, `{"op":"cost","meter":"model.tokens","quantity":"2000000"}`); got != `{"charged":"2","number":1}` {
			t.Errorf("tokens: %s", got)
		}
		if got := ask(sb.ID, 2, `{"op":"revenue","amount":"0.5","key":"mine","note":"sold"}`); got != `{"charged":"0.5","number":2}` {
			t.Errorf("revenue: %s", got)
		}
	}
	for i, c := range []struct{ line, code string }{
		{`{"op":"cost","amount":"-1"}`, "invalid_amount"},
		{`{"op":"cost","amount":"10001"}`, "invalid_amount"},
		{`{"op":"cost","amount":"NaN"}`, "invalid_amount"},
		{`{"op":"cost","meter":"model.tokens","quantity":"-5"}`, "invalid_quantity"},
		{`{"op":"gift","amount":"1"}`, "invalid_entry"},
		{`{"op":"cost"}`, "invalid_entry"},
		{`{"op":"cost","amount":1}`, "invalid_request"},
		{`{"op":"cost","amount":"1","sandbox":"x"}`, "invalid_request"},
		{`not JSON`, "invalid_request"},
		{`{"op":"cost","meter":"pages","quantity":"1"}`, "unknown_meter"},
		{`{"op":"revenue","amount":"0.6","key":"mine"}`, "idempotency_mismatch"},
	} {
		if got := ask(sb.ID, int64(i+3), c.line); !strings.Contains(got, `"code":"`+c.code+`"`) {
			t.Errorf("%s: %s, want %s", c.line, got, c.code)
		}
	}
	if got := ask(mute.ID, 1, `{"op":"cost","amount":"1"}`); !strings.Contains(got, "entries_forbidden") {
		t.Errorf("of one that may not: %s", got)
	}
	s := spent(t, h, cost.StatementQuery{By: "sandbox", Project: "prj_a"})
	if s.Total.Outside != cost.SumOf(2*cost.Unit) || s.Total.Revenue != cost.SumOf(cost.Unit/2) || s.Lines[0].Key != string(sb.ID) {
		t.Errorf("%+v", s.Total)
	}
}
