package state

import (
	"bufio"
	"context"
	"fmt"
	"math/big"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

var ledgerStart = time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)

// bornAt makes a running sandbox that was created at a time.
func bornAt(t testing.TB, d *DB, at time.Time, owner string, labels map[string]string) sandbox.ID {
	t.Helper()
	p := params("")
	p.Sandbox.CreatedAt, p.Sandbox.Owner, p.Sandbox.Spec.Labels, p.Status = at, owner, labels, sandbox.StatusRunning
	p.Slots = 10000
	sb, _, err := d.CreateSandbox(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	return sb.ID
}

// walk makes n readings with random steps of time and use.
func walk(rng *rand.Rand, id sandbox.ID, from time.Time, n int, step time.Duration) []sandbox.Reading {
	var all []sandbox.Reading
	var v [sandbox.MeterCount]int64
	at := from
	for range n {
		at = at.Add(time.Duration(1+rng.Int64N(step.Milliseconds())) * time.Millisecond)
		for i := range v {
			if rng.IntN(3) > 0 {
				v[i] += rng.Int64N(1 << (1 + rng.IntN(50)))
			}
		}
		all = append(all, sandbox.Reading{Sandbox: id, At: at, Meters: sandbox.MetersOf(v), Status: sandbox.StatusRunning, Boot: "b", Clock: at.UnixMilli()})
	}
	return all
}

// use is what a report says a sandbox used from one time to another.
func use(t testing.TB, d *DB, id sandbox.ID, from, to time.Time) sandbox.Meters {
	t.Helper()
	r, err := d.UsageReport(t.Context(), sandbox.UsageQuery{From: from, To: to, Sandbox: id})
	if err != nil {
		t.Fatal(err)
	}
	return r.Total.Meters
}

// model is UsageReport's f(T), written down by other means.
func model(created time.Time, all []sandbox.Reading, at time.Time) sandbox.Meters {
	a := sandbox.Reading{At: created}
	for _, b := range all {
		if !b.At.After(at) {
			a = b
			continue
		}
		if !at.After(a.At) {
			break
		}
		v, w := a.Meters.Values(), b.Meters.Values()
		for i := range v {
			part := new(big.Int).Mul(big.NewInt(w[i]-v[i]), big.NewInt(at.Sub(a.At).Milliseconds()))
			v[i] += part.Div(part, big.NewInt(b.At.Sub(a.At).Milliseconds())).Int64()
		}
		return sandbox.MetersOf(v)
	}
	return a.Meters
}

func minus(a, b sandbox.Meters) sandbox.Meters {
	v, w := a.Values(), b.Values()
	for i := range v {
		v[i] -= w[i]
	}
	return sandbox.MetersOf(v)
}

// TestReportIsWhatTheReadingsSay compares with a model at random times, and
// parts with the whole.
func TestReportIsWhatTheReadingsSay(t *testing.T) {
	for seed := range uint64(9) {
		rng := rand.New(rand.NewPCG(seed, 1))
		d := open(t)
		id := bornAt(t, d, ledgerStart, "uid:1", nil)
		all := walk(rng, id, ledgerStart, 1+rng.IntN(60), []time.Duration{time.Second, time.Hour, 100 * 24 * time.Hour}[rng.IntN(3)])
		if err := d.PutReadings(t.Context(), all); err != nil {
			t.Fatal(err)
		}
		span := all[len(all)-1].At.Sub(ledgerStart).Milliseconds()
		times := []time.Time{ledgerStart.Add(-time.Hour), ledgerStart, all[0].At, all[len(all)-1].At, all[len(all)-1].At.Add(time.Hour)}
		for range 20 {
			times = append(times, ledgerStart.Add(time.Duration(rng.Int64N(span+1))*time.Millisecond))
		}
		slices.SortFunc(times, time.Time.Compare)
		var sum sandbox.Meters
		for i := range times[1:] {
			part := use(t, d, id, times[i], times[i+1])
			// Gaps of more than maxGap are measured less finely; sums are exact all the same.
			if exp := minus(model(ledgerStart, all, times[i+1]), model(ledgerStart, all, times[i])); span < maxGap && part != exp {
				t.Fatalf("seed %d: from %s to %s: %s", seed, times[i], times[i+1], cmp.Diff(exp, part))
			}
			for _, v := range part.Values() {
				if v < 0 {
					t.Fatalf("seed %d: a negative use: %+v", seed, part)
				}
			}
			sum = sum.Add(part)
		}
		if end := all[len(all)-1].Meters; sum != end || use(t, d, id, time.Time{}, times[len(times)-1]) != end {
			t.Fatalf("seed %d: the parts come to %s", seed, cmp.Diff(end, sum))
		}
	}
}

// TestReadingsOnlyRise: again, late and lower.
func TestReadingsOnlyRise(t *testing.T) {
	d := open(t)
	id := bornAt(t, d, ledgerStart, "uid:1", nil)
	at := func(s int, cpu int64) sandbox.Reading {
		return sandbox.Reading{Sandbox: id, At: ledgerStart.Add(time.Duration(s) * time.Second), Meters: sandbox.Meters{CPU: cpu}, Status: sandbox.StatusRunning}
	}
	for range 2 {
		if err := d.PutReadings(t.Context(), []sandbox.Reading{at(1, 10), at(3, 30), at(2, 20), at(2, 35)}); err != nil {
			t.Fatal(err)
		}
	}
	want(t, d.PutReadings(t.Context(), []sandbox.Reading{at(4, 40), at(5, 39)}), sandbox.ErrConflict, "database_constraint")
	want(t, d.PutReadings(t.Context(), []sandbox.Reading{at(3, 29)}), sandbox.ErrConflict, "database_constraint")
	if err := d.PutReadings(t.Context(), []sandbox.Reading{{Sandbox: "sbzzzzzzzzzzzz", At: ledgerStart}}); err != nil {
		t.Errorf("of a sandbox that never was: %v", err)
	}
	if got := readings(t, d); len(got) != 2 {
		t.Errorf("%d readings, want 2: %v", len(got), got)
	}
	if _, err := d.writer.ExecContext(t.Context(), `UPDATE readings SET cpu = 99`); err == nil {
		t.Error("a reading was changed")
	}
	last, err := d.LastReadings(t.Context())
	if diff := cmp.Diff(map[sandbox.ID]sandbox.Reading{id: at(3, 30)}, last); err != nil || diff != "" {
		t.Errorf("last: %v %s", err, diff)
	}
}

// readings returns the times of all of them.
func readings(t testing.TB, d *DB) (at []int64) {
	t.Helper()
	rows, err := d.reader.Query(`SELECT at FROM readings ORDER BY ledger, at`)
	if err != nil {
		t.Fatal(err)
	}
	at, err = drain(rows, func(s scanner) (n int64, err error) { err = s.Scan(&n); return n, err })
	if err != nil {
		t.Fatal(err)
	}
	return at
}

// TestReadingGoesWithItsMove: both or neither; the row of the ledger stays
// when that of the sandbox goes.
func TestReadingGoesWithItsMove(t *testing.T) {
	d := open(t)
	id := bornAt(t, d, ledgerStart, "uid:1", map[string]string{"team": "a"})
	r := sandbox.Reading{Sandbox: id, At: ledgerStart.Add(time.Second), Meters: sandbox.Meters{CPU: 10, Starts: 1}, Status: sandbox.StatusStopped, Boot: "b"}
	_, err := d.Move(t.Context(), id, []sandbox.Status{sandbox.StatusPaused}, sandbox.StatusStopped, Change{Readings: []sandbox.Reading{r}})
	want(t, err, sandbox.ErrConflict, "wrong_state")
	if got := readings(t, d); len(got) != 0 {
		t.Fatalf("a move that was none left %d readings", len(got))
	}
	if _, err := d.Move(t.Context(), id, []sandbox.Status{sandbox.StatusRunning}, sandbox.StatusStopped, Change{Readings: []sandbox.Reading{r}}); err != nil {
		t.Fatal(err)
	}
	last := r
	last.At, last.Meters.CPU, last.Status = r.At.Add(time.Second), 20, sandbox.StatusCompleting
	if err := d.Update(t.Context(), id, Change{Readings: []sandbox.Reading{last}}); err != nil {
		t.Fatal(err)
	}
	low := last
	low.At, low.Meters.CPU = last.At.Add(time.Second), 1
	if _, err := d.Move(t.Context(), id, []sandbox.Status{sandbox.StatusStopped}, sandbox.StatusFailed, Change{Readings: []sandbox.Reading{low}}); err == nil {
		t.Fatal("a move went through whose reading did not")
	}
	if sb, err := d.Sandbox(t.Context(), id); err != nil || sb.Status != sandbox.StatusStopped {
		t.Fatalf("after that: %s, %v", sb.Status, err)
	}
	low.Meters.CPU = 25
	if _, err := d.Move(t.Context(), id, []sandbox.Status{sandbox.StatusStopped}, sandbox.StatusFailed, Change{Readings: []sandbox.Reading{low}}); err != nil {
		t.Fatal(err)
	}
	if err := d.Prune(t.Context(), 0, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Sandbox(t.Context(), id); err == nil {
		t.Fatal("the sandbox was not pruned")
	}
	for by, key := range map[string]string{"": "", "owner": "uid:1", "sandbox": string(id), "image": "host", "label:team": "a", "label:other": ""} {
		got, err := d.UsageReport(t.Context(), sandbox.UsageQuery{By: by})
		exp := []sandbox.UsageLine{{Key: key, Sandboxes: 1, Meters: low.Meters}}
		if diff := cmp.Diff(exp, got.Lines); err != nil || diff != "" {
			t.Errorf("by %q: %v %s", by, err, diff)
		}
	}
	if got, err := d.UsageReport(t.Context(), sandbox.UsageQuery{From: low.At.Add(time.Second)}); err != nil || len(got.Lines) != 0 {
		t.Errorf("after its end: %+v, %v", got, err)
	}
	_, err = d.UsageReport(t.Context(), sandbox.UsageQuery{By: "mood"})
	want(t, err, sandbox.ErrInvalid, "invalid_report")
	_, err = d.UsageReport(t.Context(), sandbox.UsageQuery{From: ledgerStart, To: ledgerStart.Add(-1 * time.Second)})
	want(t, err, sandbox.ErrInvalid, "invalid_report")
}

// TestRollKeepsSums thins out at random times, between more readings, and asks
// for sums over kept bounds before and after.
func TestRollKeepsSums(t *testing.T) {
	levels := DefaultRollUps(30)
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 2))
		d := open(t)
		whole := map[sandbox.ID][]sandbox.Reading{}
		ids := []sandbox.ID{}
		for i := range 3 {
			id := bornAt(t, d, ledgerStart, fmt.Sprint("uid:", i), nil)
			ids = append(ids, id)
			whole[id] = []sandbox.Reading{{Sandbox: id, At: ledgerStart}}
		}
		now := ledgerStart
		for round := range 12 {
			step := []time.Duration{5 * time.Second, time.Minute, 6 * time.Hour}[rng.IntN(3)]
			for _, id := range ids {
				last := whole[id][len(whole[id])-1]
				more := walk(rng, id, last.At, rng.IntN(150), step)
				for i := range more {
					more[i].Meters = more[i].Meters.Add(last.Meters)
				}
				if len(more) > 0 {
					whole[id] = append(whole[id], more...)
					now = later(now, more[len(more)-1].At)
				}
				if err := d.PutReadings(t.Context(), more); err != nil {
					t.Fatal(err)
				}
			}
			if rng.IntN(3) == 0 {
				now = now.Add(time.Duration(rng.Int64N(int64(40 * 24 * time.Hour))))
			}
			rollAll(t, d, now, levels)
			for _, id := range ids {
				checkBounds(t, d, rng, now, levels, whole[id], fmt.Sprintf("seed %d round %d", seed, round))
			}
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func rollAll(t testing.TB, d *DB, now time.Time, levels []RollUp) {
	t.Helper()
	for more := true; more; {
		var err error
		if more, err = d.Roll(t.Context(), now, levels); err != nil {
			t.Fatal(err)
		}
	}
}

// checkBounds compares sums over bounds that every level keeps, with those of
// all readings that ever were.
func checkBounds(t *testing.T, d *DB, rng *rand.Rand, now time.Time, levels []RollUp, whole []sandbox.Reading, what string) {
	t.Helper()
	bound := func() time.Time {
		at := ledgerStart.Add(time.Duration(rng.Int64N(int64(now.Sub(ledgerStart)) + 1)))
		width := time.Millisecond
		for _, l := range levels {
			if now.Sub(at) >= l.After {
				width = l.Width
			}
		}
		return at.Truncate(width)
	}
	for range 8 {
		a, b := bound(), bound()
		if b.Before(a) {
			a, b = b, a
		}
		exp := minus(model(ledgerStart, whole[1:], b), model(ledgerStart, whole[1:], a))
		if got := use(t, d, whole[0].Sandbox, a, b); got != exp {
			t.Fatalf("%s: from %s to %s at %s: %s", what, a, b, now, cmp.Diff(exp, got))
		}
	}
}

// TestRollThins: what stays is little, and an ended sandbox is left alone once
// nothing of it can go.
func TestRollThins(t *testing.T) {
	d := open(t)
	id := bornAt(t, d, ledgerStart, "uid:1", nil)
	var all []sandbox.Reading
	for i := range 3 * 720 { // three hours
		at := ledgerStart.Add(time.Duration(i+1) * 5 * time.Second)
		all = append(all, sandbox.Reading{Sandbox: id, At: at, Meters: sandbox.Meters{CPU: int64(i)}, Status: sandbox.StatusRunning})
	}
	end := all[len(all)-1]
	if err := d.PutReadings(t.Context(), all[:len(all)-1]); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Move(t.Context(), id, []sandbox.Status{sandbox.StatusRunning}, sandbox.StatusFailed, Change{Readings: []sandbox.Reading{end}}); err != nil {
		t.Fatal(err)
	}
	levels := DefaultRollUps(30)
	for _, c := range []struct {
		age  time.Duration
		most int
	}{{0, 720 + 2*120}, {2 * time.Hour, 2 * 180}, {30 * time.Hour, 2 * 3}, {40 * 24 * time.Hour, 2}} {
		rollAll(t, d, end.At.Add(c.age), levels)
		if got := len(readings(t, d)); got > c.most || got < 2 {
			t.Errorf("%s after the end: %d readings, want at most %d", c.age, got, c.most)
		}
	}
	var due int
	if err := d.reader.QueryRow(`SELECT count(*) FROM ledger WHERE due IS NOT NULL`).Scan(&due); err != nil || due != 0 {
		t.Errorf("%d are due for ever, %v", due, err)
	}
	if got := use(t, d, id, time.Time{}, end.At); got != end.Meters {
		t.Errorf("in all: %+v", got)
	}
}

// TestKilledRollUp kills whoever rolls up, anywhere, and asks for sums.
func TestKilledRollUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	rng := rand.New(rand.NewPCG(7, 7))
	d := openAt(t, path)
	whole := map[sandbox.ID][]sandbox.Reading{}
	now := ledgerStart
	for range 40 {
		id := bornAt(t, d, ledgerStart, "uid:1", nil)
		all := walk(rng, id, ledgerStart, 600, 4*time.Minute)
		if err := d.PutReadings(t.Context(), all); err != nil {
			t.Fatal(err)
		}
		whole[id] = append([]sandbox.Reading{{Sandbox: id, At: ledgerStart}}, all...)
		now = later(now, all[len(all)-1].At)
	}
	before := len(readings(t, d))
	for round := range 6 {
		now = now.Add(3 * time.Hour)
		c := exec.Command("/proc/self/exe")
		c.Env = append(os.Environ(), rollerVar+"="+path, rollerVar+"_NOW="+now.Format(time.RFC3339))
		c.Stderr = os.Stderr
		steps := 5 + rng.IntN(20)
		c.Stdin = strings.NewReader(strings.Repeat("x", steps+1)) // it is killed in the last one, or after it
		out, err := c.StdoutPipe()
		if err == nil {
			err = c.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		for lines := bufio.NewScanner(out); steps > 0 && lines.Scan(); steps-- {
		}
		_ = c.Process.Kill()
		_ = c.Wait()
		d := openAt(t, path)
		for id, all := range whole {
			checkBounds(t, d, rng, now, DefaultRollUps(30), all, fmt.Sprintf("round %d, sandbox %s", round, id))
		}
	}
	killed := len(readings(t, d))
	rollAll(t, d, now, DefaultRollUps(30))
	if done := len(readings(t, d)); killed >= before || done >= killed {
		t.Errorf("%d readings, %d after the kills, %d in the end: the kills came where nothing was to do", before, killed, done)
	}
}

// rollerVar makes the test binary roll up the database it names, to be killed.
const rollerVar = "SANDBOXD_STATE_ROLLER"

func rollForever(path string) error {
	now, err := time.Parse(time.RFC3339, os.Getenv(rollerVar+"_NOW"))
	if err != nil {
		return err
	}
	d, err := Open(context.Background(), path)
	for more := err == nil; more && err == nil; {
		if _, end := os.Stdin.Read(make([]byte, 1)); end != nil {
			select {} // until it is killed
		}
		if more, err = d.Roll(context.Background(), now, DefaultRollUps(30)); more {
			fmt.Println("rolled")
		}
	}
	return err
}

// TestReportOfTenMillion measures a month's report over ten million readings,
// a month of 5,000 sandboxes by the half hour.
func TestReportOfTenMillion(t *testing.T) {
	if os.Getenv("SANDBOXD_SOAK") == "" {
		t.Skip("minutes and a GiB: with SANDBOXD_SOAK=1")
	}
	const sandboxes, each = 5000, 2000
	d := open(t)
	month := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	for n := range sandboxes {
		id := bornAt(t, d, month.Add(-5*24*time.Hour), fmt.Sprint("uid:", n%100), map[string]string{"project": fmt.Sprint("p", n%100)})
		all := make([]sandbox.Reading, each)
		for i := range all {
			k := int64(i + 1)
			all[i] = sandbox.Reading{
				Sandbox: id, At: month.Add(time.Duration(i)*30*time.Minute - 5*24*time.Hour + time.Minute), Status: sandbox.StatusRunning,
				Meters: sandbox.Meters{CPU: k * 1e7, Memory: k * 1e8, Storage: k * 1e8, NetRx: k * 1e6, NetTx: k * 1e6, IORead: k * 1e5, IOWrite: k * 1e5, Running: k * 1.8e6, Starts: 1},
				Clock:  k * 1.8e6, MemoryKiB: 1 << 17, StorageKiB: 1 << 17,
			}
		}
		if err := d.PutReadings(t.Context(), all); err != nil {
			t.Fatal(err)
		}
	}
	for _, by := range []string{"label:project", "label:project", "owner"} {
		began := time.Now()
		r, err := d.UsageReport(t.Context(), sandbox.UsageQuery{From: month, To: month.AddDate(0, 1, 0), By: by})
		if err != nil || len(r.Lines) != 100 || r.Total.Sandboxes != sandboxes {
			t.Fatalf("%d lines, %v", len(r.Lines), err)
		}
		t.Logf("a month by %s over %d readings: %s", by, sandboxes*each, time.Since(began))
	}
	for range 2 {
		began := time.Now()
		all, err := d.Totals(t.Context(), TotalsQuery{Times: []time.Time{month, month.AddDate(0, 1, 0)}, From: month, To: month.AddDate(0, 1, 0), By: "label:project"})
		if err != nil || len(all) != sandboxes {
			t.Fatalf("%d, %v", len(all), err)
		}
		t.Logf("what costs are made of, in %s", time.Since(began))
	}
	for range 2 { // the floor: no more than read them
		began := time.Now()
		var cpu, rows int64
		err := d.reader.QueryRow(`SELECT sum(cpu), count(*) FROM readings WHERE at >= ? AND at < ?`, month.UnixMilli(), month.AddDate(0, 1, 0).UnixMilli()).Scan(&cpu, &rows)
		if err != nil || rows < sandboxes*each/2 {
			t.Fatalf("%d rows, %v", rows, err)
		}
		t.Logf("one sum over %d of them, in %s", rows, time.Since(began))
	}
	var pages, size int64
	if err := d.reader.QueryRow(`SELECT page_count, page_size FROM pragma_page_count, pragma_page_size`).Scan(&pages, &size); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes a reading", pages*size/(sandboxes*each))
}
