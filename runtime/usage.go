package runtime

import (
	"context"
	"sync"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Inspect is Sandbox with the counters of a living sandbox read now.
func (m *Manager) Inspect(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sb, err
	}
	m.lookForFiles(ctx, &sb)
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
	if u := b.looks.share(func() *sandbox.Usage { return m.readUsage(b, sb) }); u != nil {
		return *u
	}
	return sb.Usage
}

// looks lets those who want to know a sandbox's counters at the same time look
// once: whoever comes while one looks waits for the next look, which begins
// after they came. What they get is never older than their question.
type looks struct {
	turn sync.Mutex // held while one looks; taken before mu
	mu   sync.Mutex
	next *look // guarded by mu; not begun yet
}

// look is one reading of the counters.
type look struct {
	done  chan struct{}
	usage *sandbox.Usage // nil where there was nothing to read; set before done is closed
}

// share reads, or returns what another read meanwhile; nobody changes it.
func (l *looks) share(read func() *sandbox.Usage) *sandbox.Usage {
	l.mu.Lock()
	if n := l.next; n != nil {
		l.mu.Unlock()
		<-n.done
		return n.usage
	}
	n := &look{done: make(chan struct{})}
	l.next = n
	l.mu.Unlock()

	l.turn.Lock()
	defer l.turn.Unlock()
	l.mu.Lock()
	l.next = nil // who comes from now on wants to know more
	l.mu.Unlock()
	defer close(n.done)
	n.usage = read()
	return n.usage
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
