package runtime

import (
	"context"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Inspect is Sandbox with the counters of a living sandbox read now.
func (m *Manager) Inspect(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sb, err
	}
	sb.Usage = m.usage(sb)
	if b := m.box(sb.ID); b != nil {
		sb.Fault = b.faultNow()
	}
	return sb, nil
}

// Usage reads a sandbox's counters now; of one that has no shell, the last
// ones read.
func (m *Manager) Usage(ctx context.Context, ref string) (sandbox.Usage, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.Usage{}, err
	}
	return m.usage(sb), nil
}

func (m *Manager) usage(sb sandbox.Sandbox) sandbox.Usage {
	b := m.box(sb.ID)
	if b == nil {
		return sb.Usage
	}
	switch sb.Status {
	case sandbox.StatusRunning, sandbox.StatusPaused, sandbox.StatusCompleting:
	default:
		return sb.Usage
	}
	if u := m.readUsage(b, sb); u != nil {
		return *u
	}
	return sb.Usage
}

// readUsage reads the kernel's counters of a sandbox's present shell and adds
// those of its earlier ones; nil where there is nothing to read, as after a
// crash of the host. Once the shell is counted, that is the answer.
func (m *Manager) readUsage(b *box, row sandbox.Sandbox) *sandbox.Usage {
	earlier, counted := b.counters()
	if counted {
		return &earlier
	}
	u, err := m.cgroup.Usage(b.id)
	if err != nil {
		if final, counted := b.counters(); counted { // meanwhile
			return &final
		}
		m.log.Debug("read usage", "sandbox", b.id, "err", err)
		return nil
	}
	if c, known, err := m.net.Counters(b.id, row.Slot); err == nil && known {
		u.NetRxBytes, u.NetTxBytes, u.NetDropped = c.RxBytes, c.TxBytes, c.Dropped
		u.NetRxPackets, u.NetTxPackets = c.RxPackets, c.TxPackets
	} else if row.Spec.Network.Mode != sandbox.NetworkOff {
		u.Unknown = append(u.Unknown, "net")
	}
	b.reach.add(&u)
	if bytes, inodes, known, err := m.roots.Usage(b.id, row.Slot); err == nil && known {
		u.DiskBytes, u.DiskInodes = bytes, inodes
	} else {
		u.Unknown = append(u.Unknown, "disk")
	}
	u = u.Add(earlier)
	return &u
}
