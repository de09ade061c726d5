package initd

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

func keyOf(n int) (keyID, []byte) {
	var id keyID
	binary.BigEndian.PutUint64(id[:], uint64(n)+1)
	return id, []byte("requests")
}

// TestKeysOutliveTheirProcesses: what a key has started is known when its record
// is gone and in the next PID 1, as far as the newest keys go.
func TestKeysOutliveTheirProcesses(t *testing.T) {
	old := newTable()
	for n := range initproto.MaxKeys + 1 {
		id, request := keyOf(n)
		if p, err := old.claim(id, request); p != nil || err != nil {
			t.Fatalf("key %d: %v, %v", n, p, err)
		}
		p := &process{rec: sandbox.Process{ID: old.newID()}}
		if n%2 == 0 {
			p.exit = &sandbox.ExitStatus{Code: n % 256}
		}
		old.settle(id, p)
	}
	failed, request := keyOf(-2)
	if _, err := old.claim(failed, request); err != nil {
		t.Fatal(err)
	}
	old.settle(failed, nil)
	kept := old.closeKeys()
	if len(kept) != initproto.MaxKeys*initproto.KeyEntrySize {
		t.Errorf("%d bytes kept", len(kept))
	}
	if _, err := old.claim(failed, request); sandbox.CodeOf(err) != "sandbox_stopping" {
		t.Errorf("a new key while it is stopped: %v", err)
	}
	next := newTable()
	next.restoreKeys(kept)
	for n, want := range map[int]string{2: "already_run", 3: "already_run", initproto.MaxKeys: "already_run", 1: "already_run", 0: "internal"} {
		id, request := keyOf(n)
		if _, err := next.claim(id, request); sandbox.CodeOf(err) != want {
			t.Errorf("key %d in the next one: %v, want %s", n, err, want)
		}
	}
	id, _ := keyOf(2)
	if _, err := next.claim(id, []byte("anothers")); sandbox.CodeOf(err) != "idempotency_mismatch" {
		t.Errorf("another command: %v", err)
	}
	if got := next.newID(); got != sandbox.ProcessID("p8194") {
		t.Errorf("numbers go on at %s", got)
	}
	if k := next.keys[id]; k.number != 3 || k.end != 3 {
		t.Errorf("restored as %+v", k)
	}
	torn := newTable()
	torn.restoreKeys(kept[:initproto.KeyEntrySize+5])
	if len(torn.keys) != 1 {
		t.Errorf("%d keys of a torn table", len(torn.keys))
	}
}

// TestKeysAreClosedWhenAllHaveSettled: a start that fails meanwhile hides none of the
// others.
func TestKeysAreClosedWhenAllHaveSettled(t *testing.T) {
	tab := newTable()
	ids := []keyID{{1}, {2}, {3}}
	for _, id := range ids {
		if p, err := tab.claim(id, make([]byte, initproto.KeyHashSize)); p != nil || err != nil {
			t.Fatal(p, err)
		}
	}
	closed := make(chan []byte, 1)
	go func() { closed <- tab.closeKeys() }()
	testenv.Eventually(t, 10*time.Second, "the keys are being closed", func() bool {
		tab.mu.Lock()
		defer tab.mu.Unlock()
		return tab.keysClosed
	})
	tab.settle(ids[0], nil)
	for i, id := range []keyID{ids[2], ids[1]} {
		<-time.After(20 * time.Millisecond) // it looks
		tab.settle(id, &process{rec: sandbox.Process{ID: sandbox.ProcessID(fmt.Sprint("p", i+1))}})
	}
	next := newTable()
	next.restoreKeys(<-closed)
	if len(next.keys) != 2 {
		t.Errorf("kept %d keys of 2 that started something", len(next.keys))
	}
}
