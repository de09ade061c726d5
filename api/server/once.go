package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"hash/fnv"
	"slices"
	"sync"

	"github.com/sandboxd/sandboxd/sandbox"
)

// once makes requests that carry the same key wait for each other.
type once [64]sync.Mutex

func (o *once) lock(key string) (unlock func()) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key)) // never fails
	m := &o[h.Sum32()%uint32(len(o))]
	m.Lock()
	return m.Unlock
}

// keyTag is the tag of the process that a request with an idempotency key
// started: the record of a process lives as long as it can be started twice,
// across restarts of the daemon.
func keyTag(key string) string {
	sum := sha256.Sum256([]byte(key))
	return "key:" + hex.EncodeToString(sum[:])[:40]
}

// started looks for what an earlier request with the key started; the tag of
// the spec is set for the one that is about to be.
func (s *server) started(ctx context.Context, ref, key string, spec *sandbox.ProcessSpec) (sandbox.Process, bool, error) {
	if spec.Tag != "" {
		return sandbox.Process{}, false, sandbox.Errorf(sandbox.ErrInvalid, "invalid_tag", "tag: an idempotency key takes its place; give one of them")
	}
	spec.Tag = keyTag(key)
	all, err := s.m.Processes(ctx, ref)
	if err != nil {
		return sandbox.Process{}, false, err
	}
	for _, p := range all {
		if p.Tag != spec.Tag {
			continue
		}
		if !spec.ImageCommand && !slices.Equal(p.Argv, spec.Argv) {
			return p, false, sandbox.Errorf(sandbox.ErrConflict, "idempotency_mismatch", "the idempotency key belongs to process %s, another command: use a new key", p.ID)
		}
		return p, true, nil
	}
	return sandbox.Process{}, false, nil
}

// execOnce is Exec, or a connection to what the key started before, from the
// beginning of its output.
func (s *server) execOnce(ctx context.Context, ref, key string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	defer s.keys.lock(ref + "\x00" + key)()
	p, found, err := s.started(ctx, ref, key, &spec)
	switch {
	case err != nil:
		return nil, err
	case found:
		return s.m.Attach(ctx, ref, p.ID, -1)
	}
	return s.m.Exec(ctx, ref, spec)
}

// startOnce is StartProcess, or the record of what the key started before.
func (s *server) startOnce(ctx context.Context, ref, key string, spec sandbox.ProcessSpec) (sandbox.Process, error) {
	defer s.keys.lock(ref + "\x00" + key)()
	p, found, err := s.started(ctx, ref, key, &spec)
	if err != nil || found {
		return p, err
	}
	return s.m.StartProcess(ctx, ref, spec)
}
