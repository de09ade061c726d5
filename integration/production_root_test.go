//go:build root

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestProductionDatabaseLost: production's database, lost, emptied or put back
// from before, alone, starts that world in quarantine, and the lab's as always:
// nothing of production's is deleted or made anew in its place. The control is
// the start with the right one, after each.
func TestProductionDatabaseLost(t *testing.T) {
	l := newLab(t, project.Settings{Criteria: project.Criteria{MinAge: -1, MinExperiments: -1}})
	a := l.deploy("settler", project.AgentSpec{})
	l.active(a.ID)
	l.enter(a.ID, cost.KindRevenue, cost.Unit)
	if _, err := l.Promote(t.Context(), string(l.ID), project.PromotionRequest{Force: true}); err != nil {
		t.Fatal(err)
	}
	if p := l.ended(t.Context()); p.Status != project.PromotionDone {
		t.Fatalf("the promotion: %s: %s", p.Status, p.Detail)
	}
	l.onlyIn(a, true)
	agent := string(a.ID.Promoted())
	far, err := l.InProduction().Sandbox(t.Context(), agent)
	if err != nil {
		t.Fatal(err)
	}
	files := []string{"production.db", "production.db-wal", "production.db-shm"}
	path := func(name string) string { return filepath.Join(l.Dir, "state", name) }
	save := func() map[string][]byte {
		kept := map[string][]byte{}
		for _, n := range files {
			if b, err := os.ReadFile(path(n)); err == nil {
				kept[n] = b
			}
		}
		return kept
	}
	load := func(kept map[string][]byte) {
		for _, n := range files {
			if err := os.RemoveAll(path(n)); err != nil {
				t.Fatal(err)
			}
			if b, ok := kept[n]; ok {
				if err := os.WriteFile(path(n), b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	l.Shut()
	older := save()
	l.start()
	for _, way := range []struct {
		name string
		with map[string][]byte
	}{{"missing", nil}, {"empty", map[string][]byte{"production.db": {}}}, {"older", older}} {
		<-time.After(100 * time.Millisecond) // the volume hears of what happened
		l.Crash()
		right := save()
		load(way.with)
		said := len(l.Log.String())
		l.start()
		log := l.Log.String()[said:]
		if n := strings.Count(log, "QUARANTINE"); n != 1 || !strings.Contains(log, "world=production") || !strings.Contains(log, "recover") {
			t.Errorf("%s: the start says %d times that there is a quarantine, of production, and what to do:\n%s", way.name, n, log)
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", far.InitPID)); err != nil {
			t.Errorf("%s: the promoted agent's PID 1: %v", way.name, err)
		}
		sb := l.create(t, sandbox.Spec{}) // the lab's world goes on
		if _, err := l.Remove(t.Context(), string(sb.ID)); err != nil {
			t.Errorf("%s: rm in the lab's world: %v", way.name, err)
		}
		l.Crash()
		load(right)
		said = len(l.Log.String())
		l.start()
		if log := l.Log.String()[said:]; strings.Contains(log, "QUARANTINE") {
			t.Fatalf("%s: quarantine with the right database back:\n%s", way.name, log)
		}
		if now, err := l.InProduction().Sandbox(t.Context(), agent); err != nil || now.ID != far.ID || now.InitPID != far.InitPID {
			t.Fatalf("%s: the promoted agent is %s, PID 1 %d, %v; was %s, %d", way.name, now.ID, now.InitPID, err, far.ID, far.InitPID)
		}
	}
}
