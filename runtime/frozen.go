package runtime

import (
	"context"
	"errors"
	"slices"

	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/sandbox"
)

// frozen counts the layers that a sandbox wrote and that its stack or its
// snapshots keep. Together they hold at most as much as its disk limit: what it
// writes next has that limit too, so all of it is at most twice the limit.
type frozen struct {
	m     *Manager
	sb    sandbox.Sandbox
	known bool     // the host counts what files take
	base  []string // what the sandbox stands on and did not write

	stack []string
	own   []sandbox.Snapshot // newest first
	sizes map[string]int64   // of layers
}

// bounded reports whether there is anything to keep to.
func (f *frozen) bounded() bool { return f.known && f.sb.Spec.Limits.DiskBytes > 0 }

// full reports whether it is time to make one layer of many, which drops what
// was written over.
func (f *frozen) full() bool {
	return f.bounded() && f.held(f.own, f.stack) > f.sb.Spec.Limits.DiskBytes/2
}

// count looks at what there is.
func (f *frozen) count(ctx context.Context, stack []string) (err error) {
	if !f.bounded() {
		return nil
	}
	f.stack, f.sizes = stack, map[string]int64{}
	if f.own, err = f.m.state.Snapshots(ctx, sandbox.SnapshotFilter{Sandbox: f.sb.ID}); err != nil {
		return err
	}
	for _, s := range f.own {
		if err := f.measure(ctx, s.Layers); err != nil {
			return err
		}
	}
	return f.measure(ctx, stack)
}

func (f *frozen) measure(ctx context.Context, layers []string) error {
	for _, l := range layers {
		if _, seen := f.sizes[l]; seen || !isUpper(l) || slices.Contains(f.base, l) {
			continue
		}
		bytes, _, err := f.m.roots.LayerUsage(ctx, l)
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
		f.sizes[l] = bytes
	}
	return nil
}

// held adds up the layers of some snapshots and of a stack, each once.
func (f *frozen) held(snaps []sandbox.Snapshot, stack []string) (sum int64) {
	seen := map[string]bool{}
	add := func(layers []string) {
		for _, l := range layers {
			if !seen[l] {
				seen[l] = true
				sum += f.sizes[l]
			}
		}
	}
	for _, s := range snaps {
		add(s.Layers)
	}
	add(stack)
	return sum
}

// room makes room for a snapshot of these layers, on which the sandbox stands
// then, and of some bytes more, by forgetting the oldest restore points. Class ErrExhausted, with
// nothing forgotten, where that is not enough.
func (f *frozen) room(ctx context.Context, layers []string, more int64) error {
	if !f.bounded() {
		return nil
	}
	if err := f.measure(ctx, layers); err != nil {
		return err
	}
	most := f.sb.Spec.Limits.DiskBytes
	kept := slices.Clone(f.own)
	var gone []sandbox.Snapshot
	for f.held(kept, layers)+more > most {
		oldest := -1
		for i, s := range kept {
			if s.Kind == sandbox.SnapshotAuto {
				oldest = i
			}
		}
		if oldest < 0 {
			return sandbox.Errorf(sandbox.ErrExhausted, "snapshots_full",
				"the snapshots of sandbox %s would hold %s, and together they may hold its disk limit of %s once more: remove some ('sandbox snapshot ls --sandbox %s'), or go on in a fork of the newest",
				f.sb.ID, units.BytesSize(float64(f.held(kept, layers)+more)), units.BytesSize(float64(most)), f.sb.ID)
		}
		gone = append(gone, kept[oldest])
		kept = slices.Delete(kept, oldest, oldest+1)
	}
	return f.m.removeAll(ctx, gone)
}
