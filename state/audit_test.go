package state

import (
	"fmt"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/access"
)

func appendAudit(t *testing.T, d *DB, n int) {
	t.Helper()
	var rows []access.AuditRow
	for i := range n {
		rows = append(rows, access.AuditRow{
			Time: time.Unix(0, int64(1_790_000_000_000_000_000+i)), Owner: "alice", Key: "key_a", Role: access.RoleDeveloper, From: "unix",
			Operation: "create-sandbox", Object: fmt.Sprint("sb", i%3), Status: 201, Request: fmt.Sprint("rq<&>", i),
		})
	}
	if err := d.AppendAudit(t.Context(), rows, i64(n)%2 == 0); err != nil {
		t.Fatal(err)
	}
}

func i64(n int) int64 { return int64(n) }

func verify(t *testing.T, d *DB, anchor int64, hash access.Sum) access.AuditCheck {
	t.Helper()
	check, err := d.VerifyAudit(t.Context(), anchor, hash)
	if err != nil {
		t.Fatal(err)
	}
	return check
}

func TestAuditChain(t *testing.T) {
	d := open(t)
	if c := verify(t, d, 0, access.Sum{}); !c.OK || c.Rows != 0 {
		t.Errorf("an empty audit: %+v", c)
	}
	appendAudit(t, d, 5)
	appendAudit(t, d, walkAudit)
	c := verify(t, d, 0, access.Sum{})
	if !c.OK || c.Rows != walkAudit+5 || c.First != 1 || c.Last != c.Rows {
		t.Errorf("%+v", c)
	}
	newest, err := d.Audit(t.Context(), access.AuditQuery{Owner: "alice", Object: "sb1", Limit: 2})
	if err != nil || len(newest) != 2 || newest[0].Seq < newest[1].Seq || newest[0].Object != "sb1" {
		t.Errorf("%+v, %v", newest, err)
	}
	older, err := d.Audit(t.Context(), access.AuditQuery{Before: 3})
	if err != nil || len(older) != 2 || older[0].Seq != 2 {
		t.Errorf("%+v, %v", older, err)
	}
	if got := verify(t, d, c.Last, c.Head); !got.OK {
		t.Errorf("with its own head: %+v", got)
	}
	if got := verify(t, d, c.Last, access.Sum{1}); got.OK || got.BrokenAt != c.Last {
		t.Errorf("with another hash of the newest row: %+v", got)
	}
	if got := verify(t, d, c.Last+1, c.Head); got.OK || got.BrokenAt != c.Last+1 {
		t.Errorf("with the hash of a row that is not there: %+v", got)
	}
}

// TestAuditSaysWhichRow: whatever is changed in a row, taken away or put in is
// found, at the row.
func TestAuditSaysWhichRow(t *testing.T) {
	for name, tc := range map[string]struct {
		change string
		at     int64
	}{
		"control":   {`UPDATE audit SET owner = owner WHERE seq = 4`, 0},
		"time":      {`UPDATE audit SET time = time + 1 WHERE seq = 4`, 4},
		"owner":     {`UPDATE audit SET owner = 'bob' WHERE seq = 4`, 4},
		"key":       {`UPDATE audit SET key = '' WHERE seq = 4`, 4},
		"role":      {`UPDATE audit SET role = 'admin' WHERE seq = 4`, 4},
		"origin":    {`UPDATE audit SET origin = 'x' WHERE seq = 4`, 4},
		"operation": {`UPDATE audit SET operation = 'x' WHERE seq = 4`, 4},
		"object":    {`UPDATE audit SET object = 'x' WHERE seq = 4`, 4},
		"status":    {`UPDATE audit SET status = 403 WHERE seq = 4`, 4},
		"code":      {`UPDATE audit SET code = 'x' WHERE seq = 4`, 4},
		"request":   {`UPDATE audit SET request = 'x' WHERE seq = 4`, 4},
		"hash":      {`UPDATE audit SET hash = zeroblob(32) WHERE seq = 4`, 4},
		"short":     {`UPDATE audit SET hash = substr(hash, 1, 31) WHERE seq = 4`, 4},
		"missing":   {`DELETE FROM audit WHERE seq = 4`, 4},
		"emptied":   {`UPDATE audit SET owner = '', key = '', role = '', origin = '', operation = '', object = '', code = '', request = '', time = 0, status = 0 WHERE seq = 4`, 4},
		"first":     {`DELETE FROM audit WHERE seq = 1`, 1},
		"base":      {`UPDATE audit_base SET hash = randomblob(32)`, 1},
		"moved":     {`UPDATE audit SET object = request, request = object WHERE seq = 4`, 4},
	} {
		d := open(t)
		appendAudit(t, d, 9)
		if _, err := d.writer.ExecContext(t.Context(), tc.change); err != nil {
			t.Fatal(err)
		}
		if c := verify(t, d, 0, access.Sum{}); c.OK != (tc.at == 0) || c.BrokenAt != tc.at {
			t.Errorf("%s: %+v, want row %d", name, c, tc.at)
		}
	}
}

// TestAuditDisplacesWhoWritesMost: an owner who fills the audit loses rows; others,
// and changes of keys, stay, and the chain can be checked.
func TestAuditDisplacesWhoWritesMost(t *testing.T) {
	d := open(t)
	d.auditKept = 1500
	write := func(owner, operation string, n int) {
		t.Helper()
		rows := make([]access.AuditRow, n)
		for i := range rows {
			rows[i] = access.AuditRow{Time: time.Unix(1, 0), Owner: owner, Role: access.RoleDeveloper, Operation: operation, Status: 200}
		}
		if err := d.AppendAudit(t.Context(), rows, true); err != nil {
			t.Fatal(err)
		}
	}
	count := func(owner string) (n int) {
		for q := (access.AuditQuery{Owner: owner, Limit: 1000}); ; {
			rows, err := d.Audit(t.Context(), q)
			if err != nil {
				t.Fatal(err)
			}
			n += len(rows)
			if len(rows) < q.Limit {
				return n
			}
			q.Before = rows[len(rows)-1].Seq
		}
	}
	write("root", "create-key", 10)
	for range 60 {
		write("bob", "exec", 5)
		write("alice", "exec", 95)
	}
	write("root", "exec", 2000) // the newest
	if got := [...]int{count("bob"), count("alice"), count("root")}; got[0] != 300 || got[1] < 500 || got[2] < 500 || got[1]+got[2] < 1200 || got[1]+got[2] > 1200+pruneAudit {
		t.Errorf("rows of bob, alice and root: %v", got)
	}
	keys := 0
	if err := d.reader.QueryRowContext(t.Context(), `SELECT count(*) FROM audit WHERE operation = 'create-key'`).Scan(&keys); err != nil || keys != 10 {
		t.Errorf("%d changes of keys are left, %v", keys, err)
	}
	all := 0
	if err := d.reader.QueryRowContext(t.Context(), `SELECT count(*) FROM audit`).Scan(&all); err != nil || all > 2*(1500+pruneAudit) {
		t.Errorf("%d rows with those that are displaced, %v", all, err)
	}
	c := verify(t, d, 0, access.Sum{})
	if !c.OK || c.Last != 8010 || c.Rows+c.Displaced != 8010 || c.Displaced == 0 {
		t.Errorf("%+v", c)
	}
	if got := verify(t, d, 700, access.Sum{}); !got.OK || got.Detail == "" {
		t.Errorf("a hash of a row that is no longer kept: %+v", got)
	}
	if _, err := d.writer.ExecContext(t.Context(), `UPDATE audit SET object = 'x' WHERE owner = 'bob' AND seq < 1000`); err != nil {
		t.Fatal(err)
	}
	if got := verify(t, d, 0, access.Sum{}); got.OK { // the control: a changed row between displaced ones
		t.Errorf("a row was changed: %+v", got)
	}
}
