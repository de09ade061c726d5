package access

import "github.com/sandboxd/sandboxd/sandbox"

// Held is what an owner has of what quotas bound.
type Held struct {
	Sandboxes   int     // that live, those of builds too
	CPUs        float64 // sum of their limits
	MemoryBytes int64   // the same
	DiskBytes   int64   // the same, with the sizes of volumes and snapshots
}

// Plus returns both together.
func (h Held) Plus(o Held) Held {
	return Held{h.Sandboxes + o.Sandboxes, h.CPUs + o.CPUs, sandbox.AddHeld(h.MemoryBytes, o.MemoryBytes), sandbox.AddHeld(h.DiskBytes, o.DiskBytes)}
}

// Less takes back what Plus added.
func (h Held) Less(o Held) Held {
	return Held{h.Sandboxes - o.Sandboxes, h.CPUs - o.CPUs, h.MemoryBytes - o.MemoryBytes, h.DiskBytes - o.DiskBytes}
}
