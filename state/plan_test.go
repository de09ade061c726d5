package state

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestLifeDoesNotSlowWithHistory: no statement of a sandbox's life may walk
// through the rows of those that ended, nor through the events.
func TestLifeDoesNotSlowWithHistory(t *testing.T) {
	d := open(t)
	of := func(query string) []string {
		rows, err := d.reader.QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+query, make([]any, parameters(query))...)
		if err != nil {
			t.Fatalf("plan of %s: %v", query, err)
		}
		defer rows.Close()
		var steps []string
		for rows.Next() {
			var id, parent, unused int
			var detail string
			if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
				t.Fatal(err)
			}
			steps = append(steps, detail)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		return steps
	}
	long := func(step string) bool {
		return strings.HasPrefix(step, "SCAN sandboxes") && !strings.HasSuffix(step, "_living") || strings.HasPrefix(step, "SCAN events") ||
			strings.Contains(step, "sandboxes_ended") || strings.HasPrefix(step, "SCAN ledger") || strings.HasPrefix(step, "SCAN readings")
	}
	for _, query := range []string{
		sqlIdempotent, sqlNextSlot, sqlFreeSlot, sqlFreeSlots, sqlLease, sqlLeaseReserved, sqlFree, sqlFreeOf,
		sqlReserve, sqlRelease, sqlInsertSandbox, sqlInsertKey, sqlSandbox, sqlStatus, sqlMove, sqlSet,
		sqlInsertEvent, sqlImage, sqlUser, sqlPutProcess, sqlProcesses, sqlRootOf, sqlBeginRoot, sqlEndRoot,
		sqlByName, sqlHostName, sqlDropHostNames, sqlOwnByID, sqlOwnByName, sqlByPrefix, sqlOwnByPrefix, sqlHeld, sqlOwnEvents, sqlSpoken, sqlLiving, sqlLastEvent, sqlEventsOf, sqlDropSchedules, sqlLayers,
		sqlLedger, sqlInsertLedger, sqlLedgerBoot, sqlEndLedger, sqlPutReading, sqlLastReadings, sqlDue, sqlThin, sqlLastAt, sqlRolled,
	} {
		if steps := of(query); slices.ContainsFunc(steps, long) {
			t.Errorf("%s\nwalks through what is over:\n  %s", query, strings.Join(steps, "\n  "))
		}
	}
	if steps := of(sqlOldSchedules); !slices.ContainsFunc(steps, long) { // the control: done once, at the start
		t.Errorf("this test does not see a walk where there is one: %v", steps)
	}
}

// parameters counts what a statement is given: ?1 … ?n, or one for each ?.
func parameters(query string) int {
	high, plain := 0, 0
	for _, m := range regexp.MustCompile(`\?(\d*)`).FindAllStringSubmatch(query, -1) {
		if n, err := strconv.Atoi(m[1]); err == nil {
			high = max(high, n)
		} else {
			plain++
		}
	}
	return max(high, plain)
}
