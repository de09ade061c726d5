package runtime

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

const manySlots = 200

// openFull starts a manager with a pool and waits until that is full.
func openFull(t *testing.T, k *kernel, dir string, size int) *house {
	t.Helper()
	h := openPool(t, k, dir, manySlots, PoolConfig{Size: size, CPUShare: 1})
	h.pooled(t, size)
	return h
}

// pooled waits until n shells are ready.
func (h *house) pooled(t *testing.T, n int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); h.Pool().Ready != n; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("pool: %+v, want %d ready", h.Pool(), n)
		}
	}
}

// front returns the shell the next sandbox will get.
func (h *house) front() *pooled {
	h.pool.mu.Lock()
	defer h.pool.mu.Unlock()
	return h.pool.ready[0]
}

func TestCreateTakesAReadyShell(t *testing.T) {
	h := openFull(t, newKernel(t), t.TempDir(), 2)
	h.agree(t)
	s := h.front()
	sb := create(t, h, sandbox.Spec{Name: "a"})
	if sb.ID != s.b.id || sb.Slot != s.slot || sb.Status != sandbox.StatusRunning || sb.InitPID != s.b.present().PID {
		t.Errorf("got %+v, want the sandbox to be shell %s of slot %d", sb, s.b.id, s.slot)
	}
	if kept := h.get(t, sb.ID); kept.Status != sandbox.StatusRunning || kept.Spec.Hostname != "a" {
		t.Errorf("row: %+v", kept)
	}
	events, err := h.Events(t.Context(), 0, "a", 10)
	if err != nil || len(events) != 3 || events[2].Type != "sandbox.running" {
		t.Errorf("events of a claimed sandbox: %v, %v; want pending, creating, running", events, err)
	}
	h.pooled(t, 2)
	if st := h.Pool(); st.Hits != 1 || st.Misses != 0 || st.Built != 3 {
		t.Errorf("stats: %+v", st)
	}
	if _, err := h.Remove(t.Context(), "a", ""); err != nil {
		t.Fatal(err)
	}
	h.agree(t)
}

func TestMissesRaiseTheTarget(t *testing.T) {
	k := newKernel(t)
	h := openPool(t, k, t.TempDir(), manySlots, PoolConfig{Size: 1, CPUShare: 0.01}) // slow to refill
	h.pooled(t, 1)
	for i := range 3 {
		create(t, h, sandbox.Spec{Name: fmt.Sprint("s", i)})
	}
	if st := h.Pool(); st.Hits+st.Misses != 3 || st.Misses == 0 || st.Target <= 1 {
		t.Errorf("after three at once from a pool of one: %+v", st)
	}
	h.pool.mu.Lock()
	h.pool.target, h.pool.missed = 4, time.Now().Add(-2*poolCalm)
	h.pool.mu.Unlock()
	for range 5 {
		h.pool.mu.Lock()
		h.pool.missed = time.Now().Add(-2 * poolCalm)
		h.pool.mu.Unlock()
		h.pool.calmDown()
	}
	if st := h.Pool(); st.Target != 1 {
		t.Errorf("long after the last miss the target is %d, want 1", st.Target)
	}
	h.pooled(t, 1)
	h.agree(t)
}

// TestShellsNobodyMayHave: one that died, and one that cannot be dressed.
func TestShellsNobodyMayHave(t *testing.T) {
	k := newKernel(t)
	h := openFull(t, k, t.TempDir(), 2)
	dead := h.front()
	if err := unix.Kill(dead.b.present().PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(5 * time.Second); dead.b.present().Alive(); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a killed PID 1 counts as alive")
		}
	}
	if sb := create(t, h, sandbox.Spec{}); sb.ID == dead.b.id {
		t.Error("a sandbox got a dead shell")
	}
	h.pooled(t, 2)
	if st := h.Pool(); st.Lost != 1 || st.Hits != 1 {
		t.Errorf("stats: %+v", st)
	}
	h.agree(t)
	if err := unix.Kill(h.front().b.present().PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); h.Pool().Lost != 2; <-time.After(time.Millisecond) { // nobody asks for it
		if time.Now().After(deadline) {
			t.Fatalf("a dead shell stays in the pool: %+v", h.Pool())
		}
	}
	h.pooled(t, 2)

	// Whatever goes wrong is tried again with a shell of its own making, and
	// then recorded.
	k.setFail("guest.configure", true)
	_, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "x"}})
	if !errors.Is(err, errInjected) || errors.Is(err, errUnfit) {
		t.Errorf("create without a PID 1 that can be configured: %v", err)
	}
	k.setFail("guest.configure", false)
	if sb, err := h.Sandbox(t.Context(), "x"); err != nil || sb.Reason != sandbox.ReasonCreateFailed {
		t.Errorf("its record: %+v, %v", sb, err)
	}
	h.agree(t)
}

// TestRefusedCreatesCostNoShell: a taken name and a repeated key are known
// before a shell is taken.
func TestRefusedCreatesCostNoShell(t *testing.T) {
	h := openFull(t, newKernel(t), t.TempDir(), 1)
	create(t, h, sandbox.Spec{Name: "a"})
	h.pooled(t, 1)
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "a"}, Actor: "uid:0"}); sandbox.CodeOf(err) != "name_taken" {
		t.Errorf("a second of the name: %v", err)
	}
	h.agree(t)
	req := sandbox.CreateRequest{Spec: sandbox.Spec{Name: "b"}, IdempotencyKey: "k", Actor: "me"}
	first, err := h.Create(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	h.pooled(t, 1)
	if second, err := h.Create(t.Context(), req); err != nil || second.ID != first.ID {
		t.Errorf("the same key again: %s, %v; want %s", second.ID, err, first.ID)
	}
	h.agree(t)
	if st := h.Pool(); st.Hits != 2 {
		t.Errorf("two sandboxes took %d shells: %+v", st.Hits, st)
	}
}

// TestTheLastWordIsTheRows: of many that want one name, all may pass the look
// before; one gets it, and what the others made must go.
func TestTheLastWordIsTheRows(t *testing.T) {
	h := openFull(t, newKernel(t), t.TempDir(), 8)
	var wg sync.WaitGroup
	var won atomic.Int32
	for range 8 {
		wg.Go(func() {
			_, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "a"}})
			if err == nil {
				won.Add(1)
			} else if sandbox.CodeOf(err) != "name_taken" {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d sandboxes got the one name", won.Load())
	}
	h.agree(t)
}

// TestSlotsOfThoseThatLeave: who removes one of a full house can make another.
func TestSlotsOfThoseThatLeave(t *testing.T) {
	for name, pool := range map[string]PoolConfig{"no pool": {}, "pool": {Size: 2, CPUShare: 1}} {
		t.Run(name, func(t *testing.T) {
			const slots = 8
			h := openPool(t, newKernel(t), t.TempDir(), slots, pool)
			var last sandbox.Sandbox
			for range slots {
				last = create(t, h, sandbox.Spec{})
			}
			if _, err := h.Create(t.Context(), sandbox.CreateRequest{}); sandbox.CodeOf(err) != codeNoSlot {
				t.Errorf("one too many: %v", err)
			}
			for range 20 {
				if _, err := h.Remove(t.Context(), string(last.ID), ""); err != nil {
					t.Fatal(err)
				}
				last = create(t, h, sandbox.Spec{})
			}
			h.agree(t)
		})
	}
}

func TestCrashLeavesNoPooledShell(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openFull(t, k, dir, 3)
	sb := create(t, h, sandbox.Spec{})
	h.pool.mu.Lock()
	h.pool.ready = nil // what Close would give back
	h.pool.mu.Unlock()
	h.crash()
	k.plain = true
	h = openFull(t, k, dir, 3)
	h.agree(t)
	if got := h.get(t, sb.ID); got.Status != sandbox.StatusRunning {
		t.Errorf("the sandbox of a claimed shell is %s after a restart", got.Status)
	}
	// Their slots are not lost: as many sandboxes fit as before.
	n := 0
	for ; ; n++ {
		if _, err := h.Create(t.Context(), sandbox.CreateRequest{}); err != nil {
			if sandbox.CodeOf(err) != "slots_exhausted" {
				t.Fatal(err)
			}
			break
		}
	}
	if held := n + 1 + h.Pool().Ready; held != manySlots {
		t.Errorf("%d slots are used or ready, want all %d", held, manySlots)
	}
	h.agree(t)
}

// TestCrashBeforePID1HadItsRoot: the row is written while PID 1 takes it.
func TestCrashBeforePID1HadItsRoot(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openFull(t, k, dir, 1)
	sb := create(t, h, sandbox.Spec{})
	k.setFail("guest.configured", true)
	h.crash()
	h = openFull(t, k, dir, 1)
	if got := h.get(t, sb.ID); got.Status != sandbox.StatusFailed || got.Reason != sandbox.ReasonCreateFailed {
		t.Errorf("it is %s (%s), want failed (create_failed)", got.Status, got.Reason)
	}
	h.agree(t)
}

func TestCloseGivesThePoolBack(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openFull(t, k, dir, 3)
	h.crash()
	k.mu.Lock()
	defer k.mu.Unlock()
	if n := len(k.cgroups) + len(k.pids) + len(k.uppers) + len(k.links); n != 0 {
		t.Errorf("an orderly end leaves %d objects of pooled shells", n)
	}
}

func TestShortMemoryEmptiesThePool(t *testing.T) {
	k := newKernel(t)
	h := openFull(t, k, t.TempDir(), 3)
	k.setFail("memory", true)
	h.pool.nudge()
	h.pooled(t, 0)
	if st := h.Pool(); st.Shed != 3 {
		t.Errorf("stats: %+v", st)
	}
	create(t, h, sandbox.Spec{}) // without the pool
	h.agree(t)
}

func TestManyAtOnce(t *testing.T) {
	h := openFull(t, newKernel(t), t.TempDir(), 8)
	var wg sync.WaitGroup
	ids := make([]sandbox.ID, 40)
	for i := range ids {
		wg.Go(func() {
			sb, err := h.Create(t.Context(), sandbox.CreateRequest{})
			if err != nil {
				t.Error(err)
			}
			ids[i] = sb.ID
		})
	}
	wg.Wait()
	slots, addrs := map[int]bool{}, map[string]bool{}
	for _, id := range ids {
		sb := h.get(t, id)
		slots[sb.Slot], addrs[sb.Address.String()] = true, true
	}
	if len(slots) != len(ids) || len(addrs) != len(ids) {
		t.Errorf("%d sandboxes have %d slots and %d addresses", len(ids), len(slots), len(addrs))
	}
	for _, id := range ids {
		wg.Go(func() {
			if _, err := h.Remove(t.Context(), string(id), ""); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	h.agree(t)
}
