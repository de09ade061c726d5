package state

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// maxGap is the longest distance of two readings, in milliseconds, whose square
// SQLite can hold; longer ones are measured in larger units.
const maxGap = 3_000_000_000

// UsageReport adds up what was used in a span of time, by a key. What was used
// until a time T is the last reading at or before T, and the part of the way
// to the next that T has come:
//
//	f(T) = a + floor((b - a) · (T - at(a)) / (at(b) - at(a)))
//
// with nothing at the creation, and the last reading from then on. What was
// used in [from, to) is f(to) - f(from): so spans that meet leave nothing out
// and count nothing twice, to the last digit. ErrInvalid with code
// invalid_report.
func (d *DB) UsageReport(ctx context.Context, q sandbox.UsageQuery) (sandbox.UsageReport, error) {
	key, label, err := reportKey(q.By)
	if err != nil {
		return sandbox.UsageReport{}, err
	}
	from, to := int64(0), int64(math.MaxInt64/2) // readings may be ahead of a clock that was set back
	if !q.From.IsZero() {
		from = q.From.UnixMilli()
	}
	if q.To.IsZero() {
		q.To = time.Now()
	} else {
		to = q.To.UnixMilli()
	}
	if from < 0 || to < from || to > math.MaxInt64/2 {
		return sandbox.UsageReport{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_report", "a span from %s to %s: begin after 1970 and end later", q.From.Format(time.RFC3339), q.To.Format(time.RFC3339))
	}
	rows, err := d.reader.QueryContext(ctx, reportQuery(key), from, to, label, string(q.Sandbox), q.Owner)
	if err != nil {
		return sandbox.UsageReport{}, fmt.Errorf("reporting usage: %w", translate(err))
	}
	out := sandbox.UsageReport{From: time.UnixMilli(from).UTC(), To: time.UnixMilli(q.To.UnixMilli()).UTC(), By: q.By}
	out.Lines, err = drain(rows, func(row scanner) (l sandbox.UsageLine, err error) {
		var halves [sandbox.MeterCount][2]int64
		var v [sandbox.MeterCount]int64
		dest := []any{&l.Key, &l.Sandboxes}
		for i := range halves {
			dest = append(dest, &halves[i][0], &halves[i][1])
		}
		err = row.Scan(dest...)
		for i, h := range halves { // what does not fit stays at the bound
			n, _ := cost.SplitSum(h[0], h[1]).Nano()
			v[i] = int64(n)
		}
		l.Meters = sandbox.MetersOf(v)
		return l, err
	})
	if err != nil {
		return sandbox.UsageReport{}, fmt.Errorf("reporting usage: %w", translate(err))
	}
	for _, l := range out.Lines {
		out.Total.Sandboxes += l.Sandboxes
		out.Total.Meters = out.Total.Meters.Add(l.Meters)
	}
	return out, nil
}

// reportKey is the expression a report groups by, and the label in it.
func reportKey(by string) (expr, label string, err error) {
	if name, ok := strings.CutPrefix(by, "label:"); ok && name != "" {
		return `coalesce((SELECT value FROM json_each(l.labels) WHERE key = ?3), '')`, name, nil
	}
	switch by {
	case "":
		return `''`, "", nil
	case "sandbox", "owner", "project", "image":
		return `l.` + by, "", nil
	}
	return "", "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_report", "no report by %.80q: use sandbox, owner, project, image or label:KEY", by)
}

// reportQuery is the query for ?1 ≤ time < ?2, a label ?3, a sandbox ?4 and an owner ?5. A
// sandbox that began in the span, or ended in it, needs no reading at that end.
func reportQuery(key string) string {
	var sums, values strings.Builder
	for _, c := range meterColumns {
		fmt.Fprintf(&sums, ", sum(%[1]s >> 32), sum(%[1]s & 4294967295)", c) // see splitSums
		fmt.Fprintf(&values, ",\n\t\t%s - %s AS %s", until("a2", "b2", "?2", c), until("a1", "b1", "?1", c), c)
	}
	return `SELECT key, count(*)` + sums.String() + ` FROM (
	SELECT ` + key + ` AS key` + values.String() + `
	FROM ledger l
	LEFT JOIN readings a1 ON a1.ledger = l.number AND a1.at = (SELECT max(at) FROM readings
		WHERE ledger = CASE WHEN l.created_at < ?1 THEN l.number END AND at <= ?1)
	LEFT JOIN readings b1 ON b1.ledger = l.number AND b1.at = (SELECT min(at) FROM readings
		WHERE ledger = CASE WHEN l.created_at < ?1 THEN l.number END AND at > ?1)
	LEFT JOIN readings a2 ON a2.ledger = l.number AND a2.at = (SELECT max(at) FROM readings WHERE ledger = l.number AND at <= ?2)
	LEFT JOIN readings b2 ON b2.ledger = l.number AND b2.at = (SELECT min(at) FROM readings WHERE ledger = l.number AND at > ?2)
	WHERE l.created_at < ?2 AND (l.ended_at IS NULL OR l.ended_at >= ?1) AND (?4 = '' OR l.sandbox = ?4) AND (?5 = '' OR l.owner = ?5)
	) GROUP BY key ORDER BY key`
}

// until is f(T) of one meter: a is the reading before, b the one after.
func until(a, b, t, meter string) string {
	before, gap := "coalesce("+a+".at, l.created_at)", ""
	gap = "(" + b + ".at - " + before + ")"
	unit := fmt.Sprintf("(1 + %s / %d)", gap, int64(maxGap))
	had := "coalesce(" + a + "." + meter + ", 0)"
	used := "(" + b + "." + meter + " - " + had + ")"
	num, den := "(("+t+" - "+before+") / "+unit+")", "("+gap+" / "+unit+")"
	return fmt.Sprintf(`CASE WHEN %[1]s.at IS NULL OR %[2]s <= %[3]s OR %[4]s <= 0 THEN %[5]s
			ELSE %[5]s + %[6]s / %[7]s * %[8]s + %[6]s %% %[7]s * %[8]s / %[7]s END`, b, t, before, gap, had, used, den, num)
}
