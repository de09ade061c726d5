package runtime

import (
	"context"
	"errors"
	"slices"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// NetworkConfig is what the operator says about every sandbox's network.
type NetworkConfig struct {
	// Default is the policy of specs that name no mode. Its zero value is off.
	Default sandbox.NetworkPolicy
	// Most is the widest mode a sandbox may have; empty means open. It holds for
	// those made under another configuration, too.
	Most sandbox.NetworkMode
}

// eventNetwork tells that a network policy was changed.
const eventNetwork = "net.policy"

// networkOf fills the operator's default in where a policy names no mode, and
// checks it against what the operator permits.
func (m *Manager) networkOf(p sandbox.NetworkPolicy) (sandbox.NetworkPolicy, error) {
	p = p.Clone()
	if p.Mode == "" {
		p = withNetworkDefault(p, m.cfg.Network.Default)
	}
	if err := p.Validate(); err != nil {
		return p, err
	}
	if most := m.cfg.Network.Most; most != "" && width(p.Mode) > width(most) {
		return p, sandbox.Errorf(sandbox.ErrForbidden, "network_mode_forbidden",
			"network mode %s: this daemon permits %s at most; its operator sets that with network.most in the configuration", p.Mode, most)
	}
	return p, m.net.CheckPolicy(p)
}

// withNetworkDefault lays what a policy without a mode says over the default:
// it can narrow it, and choose limits.
func withNetworkDefault(p, d sandbox.NetworkPolicy) sandbox.NetworkPolicy {
	out := d.Clone()
	if out.Mode == "" {
		out.Mode = sandbox.NetworkOff
	}
	out.Deny = append(out.Deny, p.Deny...)
	if len(p.DNS) > 0 {
		out.DNS = p.DNS
	}
	if p.Limits != (sandbox.NetworkLimits{}) {
		out.Limits = p.Limits
	}
	if p.HTTP != nil {
		out.HTTP = p.HTTP
	}
	return out
}

// width orders the modes by what they can permit.
func width(m sandbox.NetworkMode) int {
	return slices.Index([]sandbox.NetworkMode{sandbox.NetworkOff, sandbox.NetworkAllow, sandbox.NetworkOpen}, m)
}

// inForce is what the operator's ceiling of today leaves of a policy that was
// set before.
func (m *Manager) inForce(p sandbox.NetworkPolicy) sandbox.NetworkPolicy {
	most := m.cfg.Network.Most
	if most == "" || width(p.Mode) <= width(most) {
		return p
	}
	if most == sandbox.NetworkOff {
		return sandbox.NetworkPolicy{Mode: sandbox.NetworkOff, Deny: p.Deny, Limits: p.Limits}
	}
	p.Mode = most
	return p
}

// SetNetwork changes the network policy of a living sandbox. On return it is
// in force: new connections are judged by it, and those it forbids are cut. A
// stopped sandbox has it from its next start. After an error the old policy
// holds. Errors are those of a spec's policy, and ErrConflict where the
// sandbox has ended or is not up yet.
func (m *Manager) SetNetwork(ctx context.Context, ref string, p sandbox.NetworkPolicy, actor string) (sandbox.Sandbox, error) {
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		switch sb.Status {
		case sandbox.StatusRunning, sandbox.StatusPaused, sandbox.StatusStopped:
		default:
			return sb, wrongState(sb, "change the network of", sandbox.StatusRunning)
		}
		p, err := m.networkOf(p)
		if err != nil {
			return sb, err
		}
		// The intent comes first: after a crash recovery makes the kernel agree
		// with the row, whichever policy it holds.
		if err := m.writeNetwork(ctx, sb, p, actor); err != nil {
			return sb, err
		}
		changed := sb
		changed.Spec.Network = p
		b.meter.permit(m.caps(changed.Spec))
		m.budgets.begun(b) // it may spend faster
		if err := m.applyNetwork(ctx, b, changed); err != nil {
			return sb, errors.Join(err, m.revertNetwork(ctx, b, sb))
		}
		return m.state.Sandbox(ctx, b.id)
	})
}

// writeNetwork puts a policy into the row.
func (m *Manager) writeNetwork(ctx context.Context, sb sandbox.Sandbox, p sandbox.NetworkPolicy, actor string) error {
	spec := sb.Spec.Clone()
	spec.Network = p
	return m.state.Update(ctx, sb.ID, state.Change{
		Spec: &spec, Enforcement: m.enforcement(spec), EventType: eventNetwork, Actor: actor,
		Data: map[string]string{"mode": string(p.Mode), "from": string(sb.Spec.Network.Mode)},
	})
}

// applyNetwork makes the kernel agree with the policy of a sandbox that has a
// shell.
func (m *Manager) applyNetwork(ctx context.Context, b *box, sb sandbox.Sandbox) error {
	shell := b.present()
	if shell == nil { // stopped, or about to be
		return nil
	}
	return m.net.SetPolicy(ctx, m.attachment(sb, shell))
}

// revertNetwork goes back to the policy before a change that did not work.
func (m *Manager) revertNetwork(ctx context.Context, b *box, sb sandbox.Sandbox) error {
	err := errors.Join(m.writeNetwork(ctx, sb, sb.Spec.Network, "daemon"), m.applyNetwork(ctx, b, sb))
	if err != nil {
		m.log.ErrorContext(ctx, "undo a change of a network policy: set it again", "sandbox", b.id, "err", err)
	}
	return err
}
