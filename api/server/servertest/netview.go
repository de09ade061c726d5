package servertest

import (
	"context"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Network implements server.Manager.
func (m *Memory) Network(ctx context.Context, ref string) (sandbox.NetworkState, error) {
	if err := m.fail("Network"); err != nil {
		return sandbox.NetworkState{}, err
	}
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.NetworkState{}, err
	}
	return sandbox.NetworkState{Sandbox: sb.ID, Policy: sb.Spec.Network, Address: sb.Address, Usage: sb.Usage}, nil
}

// ExplainNetwork implements server.Manager: by the lists alone.
func (m *Memory) ExplainNetwork(ctx context.Context, ref string, q sandbox.NetworkQuery) (sandbox.NetworkVerdict, error) {
	if err := m.fail("ExplainNetwork"); err != nil {
		return sandbox.NetworkVerdict{}, err
	}
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.NetworkVerdict{}, err
	}
	allow, _, err := sb.Spec.Network.Rules()
	v := sandbox.NetworkVerdict{
		Sandbox: sb.ID, Dest: q.Dest, Port: q.Port, Protocol: q.Protocol, Step: "default", Why: "no rule names it",
		Mend: "sandbox net set " + ref + " --add " + q.Dest, Steps: []sandbox.NetworkStep{{Step: "default", Answer: "no rule names it"}},
	}
	for _, r := range allow {
		if r.MatchesPort(q.Protocol, q.Port) && r.MatchesName(q.Dest) {
			v.Allowed, v.Step, v.Why, v.Rule, v.Mend = true, "allow", "an allow rule names it", r.String(), ""
			v.Steps = []sandbox.NetworkStep{{Step: "allow", Answer: v.Why}}
		}
	}
	return v, err
}
