package runtime

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The events of faults.
const (
	eventFaultSet     = "net.fault.set"
	eventFaultCleared = "net.fault.cleared"
)

// faulted is a fault on the link of a shell. The box's mu guards it.
type faulted struct {
	fault sandbox.NetworkFault
	timer *time.Timer // nil: until somebody clears it
}

// takeFault forgets the box's fault, if it has one, and stops its timer.
func (b *box) takeFault() *faulted {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.takeFaultLocked()
}

func (b *box) takeFaultLocked() *faulted {
	f := b.fault
	b.fault = nil
	if f != nil && f.timer != nil {
		f.timer.Stop()
	}
	return f
}

// faultNow is the fault the link has now, or nil.
func (b *box) faultNow() *sandbox.NetworkFault {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fault == nil {
		return nil
	}
	f := b.fault.fault
	return &f
}

// SetFault disturbs the link of a running or paused sandbox, in place of what
// disturbed it before.
func (m *Manager) SetFault(ctx context.Context, ref string, f sandbox.NetworkFault, actor string) (sandbox.NetworkFault, error) {
	if err := f.Validate(); err != nil {
		return f, err
	}
	f.Until = nil
	err := m.withLink(ctx, ref, func(ctx context.Context, b *box, a netns.Attachment) error {
		if err := m.net.SetFault(ctx, a, &f); err != nil {
			return err
		}
		b.takeFault()
		set := &faulted{fault: f}
		b.mu.Lock()
		if f.Seconds > 0 {
			after := time.Duration(f.Seconds) * time.Second
			until := time.Now().Add(after).UTC()
			f.Until, set.fault.Until = &until, &until
			set.timer = time.AfterFunc(after, func() { m.faultOver(b, set) })
		}
		b.fault = set
		b.mu.Unlock()
		m.record(ctx, sandbox.Event{Sandbox: b.id, Type: eventFaultSet, Actor: actor, Data: faultData(f)})
		return nil
	})
	return f, err
}

// ClearFault ends what disturbs a sandbox's link. Without a fault it does
// nothing.
func (m *Manager) ClearFault(ctx context.Context, ref, actor string) error {
	if f, err := m.Fault(ctx, ref); err != nil || f.Zero() {
		return err
	}
	return m.withLink(ctx, ref, func(ctx context.Context, b *box, a netns.Attachment) error {
		return m.clearFault(ctx, b, a, actor, "request")
	})
}

// Fault returns what disturbs a sandbox's link; the zero fault where nothing
// does.
func (m *Manager) Fault(ctx context.Context, ref string) (sandbox.NetworkFault, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.NetworkFault{}, err
	}
	if b := m.box(sb.ID); b != nil {
		if f := b.faultNow(); f != nil {
			return *f, nil
		}
	}
	return sandbox.NetworkFault{}, nil
}

// withLink calls do with a sandbox that has a shell, while nobody changes its
// status.
func (m *Manager) withLink(ctx context.Context, ref string, do func(context.Context, *box, netns.Attachment) error) error {
	_, err := m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusRunning && sb.Status != sandbox.StatusPaused {
			return sb, wrongState(sb, "disturb the network of", sandbox.StatusRunning, sandbox.StatusPaused)
		}
		shell := b.present()
		if shell == nil { // its PID 1 died just now
			return sb, ended(sb)
		}
		return sb, do(ctx, b, m.attachment(sb, shell))
	})
	return err
}

func (m *Manager) clearFault(ctx context.Context, b *box, a netns.Attachment, actor, why string) error {
	if err := m.net.SetFault(ctx, a, nil); err != nil {
		return err
	}
	if b.takeFault() != nil {
		m.record(ctx, sandbox.Event{Sandbox: b.id, Type: eventFaultCleared, Actor: actor, Data: map[string]string{"why": why}})
	}
	return nil
}

// faultOver ends a fault whose time has come, unless another is there by now.
// Where the link cannot be mended yet it tries again.
func (m *Manager) faultOver(b *box, f *faulted) {
	if m.life.Err() != nil {
		return // the next daemon ends it
	}
	ctx, cancel := context.WithTimeout(m.life, teardownTimeout)
	defer cancel()
	err := m.withLink(ctx, string(b.id), func(ctx context.Context, b *box, a netns.Attachment) error {
		b.mu.Lock()
		current := b.fault == f
		b.mu.Unlock()
		if !current {
			return nil
		}
		return m.clearFault(ctx, b, a, "daemon", "time")
	})
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil && b.fault == f && m.life.Err() == nil {
		m.log.WarnContext(ctx, "end a fault whose time is over: tried again", "sandbox", b.id, "err", err)
		f.timer = time.AfterFunc(m.retry, func() { m.faultOver(b, f) })
	}
}

// tellDisturbed records the faults of an earlier daemon that recovery ended.
func (m *Manager) tellDisturbed(ctx context.Context) {
	for _, id := range m.net.Disturbed() {
		m.record(ctx, sandbox.Event{Sandbox: id, Type: eventFaultCleared, Actor: "daemon", Data: map[string]string{"why": "restart"}})
	}
}

// faultData is a fault as events tell it.
func faultData(f sandbox.NetworkFault) map[string]string {
	data := map[string]string{}
	put := func(key string, set bool, value any) {
		if set {
			data[key] = fmt.Sprint(value)
		}
	}
	put("latency_ms", f.LatencyMS > 0, f.LatencyMS)
	put("jitter_ms", f.JitterMS > 0, f.JitterMS)
	put("loss_percent", f.LossPercent > 0, strconv.FormatFloat(f.LossPercent, 'f', -1, 64))
	put("rate_bps", f.RateBPS > 0, f.RateBPS)
	put("partition", f.Partition, f.Partition)
	if f.Until != nil {
		data["until"] = f.Until.Format(time.RFC3339)
	}
	return data
}
