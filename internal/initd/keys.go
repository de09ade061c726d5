package initd

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// keyID is the hash of an idempotency key.
type keyID [initproto.KeyIDSize]byte

// keyed is the command that an idempotency key has started in this sandbox. It
// outlives the record of its process, and PID 1: see keys.
type keyed struct {
	request [initproto.KeyHashSize]byte
	number  int64 // of its process; 0 while that is being started
	end     int   // exit code + 1; 0 where no end was seen yet
}

func (k keyed) process() sandbox.ProcessID { return sandbox.ProcessID(fmt.Sprint("p", k.number)) }

// startOnce is start for a command with an idempotency key: it is started once,
// and whoever repeats the request gets that process.
func (s *Server) startOnce(spec sandbox.ProcessSpec, key []byte) (*process, error) {
	if len(key) == 0 {
		return s.start(spec)
	}
	if len(key) != initproto.KeySize {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "bad_request", "an idempotency key of %d bytes", len(key))
	}
	id := keyID(key)
	if p, err := s.procs.claim(id, key[len(id):]); p != nil || err != nil {
		return p, err
	}
	p, err := s.start(spec)
	s.procs.settle(id, p)
	return p, err
}

// claim returns the process that a key has started, waiting while that is under
// way; or nothing, and then the caller starts it and calls settle.
func (t *table) claim(id keyID, request []byte) (*process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		k, known := t.keys[id]
		switch {
		case !known && t.keysClosed:
			return nil, sandbox.Errorf(sandbox.ErrUnavailable, "sandbox_stopping", "the sandbox is being stopped: start it, then try again")
		case !known:
			t.addKeyLocked(id, keyed{request: [initproto.KeyHashSize]byte(request)})
			return nil, nil
		case k.number == 0:
			t.changed.Wait()
		case string(k.request[:]) != string(request):
			return nil, sandbox.Errorf(sandbox.ErrConflict, "idempotency_mismatch", "the idempotency key belongs to process %s, another command: use a new key", k.process())
		case t.all[k.process()] != nil:
			return t.all[k.process()], nil
		case k.end == 0:
			return nil, sandbox.Errorf(sandbox.ErrConflict, "already_run", "the idempotency key started process %s before, which the stop of the sandbox ended: nothing is run again; use a new key to run it again", k.process())
		default:
			return nil, sandbox.Errorf(sandbox.ErrConflict, "already_run", "the idempotency key started process %s before, which ended with exit code %d; its output is no longer kept: nothing is run again; use a new key to run it again", k.process(), k.end-1)
		}
	}
}

func (t *table) addKeyLocked(id keyID, k keyed) {
	if t.keys == nil {
		t.keys = make(map[keyID]keyed)
	}
	t.keys[id] = k
	t.keyOrder = append(t.keyOrder, id)
}

// settle notes what a claimed key has started, nil for nothing, and forgets the
// oldest of too many keys.
func (t *table) settle(id keyID, p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	defer t.changed.Broadcast()
	k, known := t.keys[id]
	switch {
	case !known: // forgotten already
	case p == nil:
		delete(t.keys, id)
		t.keyOrder = slices.DeleteFunc(t.keyOrder, func(o keyID) bool { return o == id })
	default:
		_, _ = fmt.Sscanf(string(p.rec.ID), "p%d", &k.number) // newID made it
		t.keys[id], p.key = k, id
		t.keyEndedLocked(p)
		if len(t.keyOrder) > initproto.MaxKeys {
			delete(t.keys, t.keyOrder[0])
			t.keyOrder = t.keyOrder[1:]
		}
	}
}

// keyEndedLocked notes how the process of a key ended.
func (t *table) keyEndedLocked(p *process) {
	if k, known := t.keys[p.key]; known && p.exit != nil {
		k.end = p.exit.Code + 1
		t.keys[p.key] = k
	}
}

// closeKeys has no more keys start anything, and returns all there are for the
// next PID 1 of this sandbox, oldest first.
func (t *table) closeKeys() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.keysClosed = true
	for slices.ContainsFunc(t.keyOrder, func(id keyID) bool { return t.keys[id].number == 0 }) {
		t.changed.Wait()
	}
	var b []byte
	for _, id := range t.keyOrder {
		k := t.keys[id]
		b = append(append(b, id[:]...), k.request[:]...)
		b = binary.BigEndian.AppendUint64(b, uint64(k.number)<<endBits|uint64(k.end)&(1<<endBits-1))
	}
	return b
}

// endBits hold the end of a key's command, an exit code of at most 255 + 1.
const endBits = 10

// restoreKeys takes over what an earlier PID 1 of this sandbox returned.
func (t *table) restoreKeys(b []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for ; len(b) >= initproto.KeyEntrySize; b = b[initproto.KeyEntrySize:] {
		id, rest := keyID(b[:initproto.KeyIDSize]), b[initproto.KeyIDSize:]
		n := binary.BigEndian.Uint64(rest[initproto.KeyHashSize:])
		k := keyed{request: [initproto.KeyHashSize]byte(rest[:initproto.KeyHashSize]), number: int64(n >> endBits), end: int(n & (1<<endBits - 1))}
		if _, known := t.keys[id]; !known && k.number > 0 {
			t.addKeyLocked(id, k)
			t.next = max(t.next, k.number)
		}
	}
}
