package runtime

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// policy is what the fake kernel's link obeys.
func (k *kernel) policy(id sandbox.ID) sandbox.NetworkPolicy {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.policies[id]
}

func allowOnly(rules ...string) sandbox.NetworkPolicy {
	return sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: rules}
}

func TestSetNetwork(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{Name: "a"})
	want := allowOnly("example.com:443")
	got, err := h.SetNetwork(t.Context(), "a", want, "me")
	if err != nil || !cmp.Equal(got.Spec.Network, want) || !cmp.Equal(k.policy(sb.ID), want) {
		t.Fatalf("set: row %+v, kernel %+v, %v", got.Spec.Network, k.policy(sb.ID), err)
	}
	events, err := h.Events(t.Context(), 0, "a", 100)
	if err != nil || events[len(events)-1].Type != eventNetwork || events[len(events)-1].Actor != "me" {
		t.Errorf("the last event is %+v, %v", events[len(events)-1], err)
	}
	if _, err := h.SetNetwork(t.Context(), "a", allowOnly("::1"), "me"); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a policy that makes no sense: %v", err)
	}
	// The kernel refuses: the old one holds.
	k.setFail("net.policy", true)
	if _, err := h.SetNetwork(t.Context(), "a", allowOnly("9.9.9.9"), "me"); !errors.Is(err, errInjected) {
		t.Errorf("error %v", err)
	}
	k.setFail("net.policy", false)
	if now := h.get(t, sb.ID); !cmp.Equal(now.Spec.Network, want) {
		t.Errorf("after a change that failed the row says %+v", now.Spec.Network)
	}
	// A stopped sandbox has it from its next start.
	if _, err := h.Stop(t.Context(), "a", ""); err != nil {
		t.Fatal(err)
	}
	open := sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}
	if _, err := h.SetNetwork(t.Context(), "a", open, ""); err != nil || !cmp.Equal(k.policy(sb.ID), want) {
		t.Errorf("of a stopped sandbox: %v, kernel %+v", err, k.policy(sb.ID))
	}
	if _, err := h.Start(t.Context(), "a", ""); err != nil || !cmp.Equal(k.policy(sb.ID), open) {
		t.Errorf("after its start: %v, kernel %+v", err, k.policy(sb.ID))
	}
	if _, err := h.Remove(t.Context(), "a", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.SetNetwork(t.Context(), string(sb.ID), want, ""); !errors.Is(err, sandbox.ErrConflict) {
		t.Errorf("of an ended sandbox: %v", err)
	}
}

// TestCrashInSetNetwork: the row holds the intent, and the next daemon makes
// the kernel agree with it.
func TestCrashInSetNetwork(t *testing.T) {
	for _, after := range []bool{false, true} {
		k, dir := newKernel(t), t.TempDir()
		h := open(t, k, dir)
		sb := create(t, h, sandbox.Spec{Name: "a"})
		k.killAt("net.policy", after)
		go func() { _, _ = h.SetNetwork(context.Background(), "a", allowOnly("9.9.9.9"), "me") }()
		k.waitDead(t, "net.policy")
		h.crash()
		k.revive()
		h = open(t, k, dir)
		if now := h.get(t, sb.ID); !cmp.Equal(now.Spec.Network, k.policy(sb.ID)) {
			t.Errorf("died after the step: %v: the row says %+v, the kernel %+v", after, now.Spec.Network, k.policy(sb.ID))
		}
	}
}

func TestNetworkOfTheOperator(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	h.cfg.Network = NetworkConfig{Default: sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"example.com"}, Deny: []string{"9.9.9.9"}}, Most: sandbox.NetworkAllow}
	sb := create(t, h, sandbox.Spec{Network: sandbox.NetworkPolicy{Deny: []string{"bad.example.com"}, Limits: sandbox.NetworkLimits{Flows: 10}}})
	want := sandbox.NetworkPolicy{
		Mode: sandbox.NetworkAllow, Allow: []string{"example.com"}, Deny: []string{"9.9.9.9", "bad.example.com"}, Limits: sandbox.NetworkLimits{Flows: 10},
	}
	if d := cmp.Diff(want, sb.Spec.Network); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"9.9.9.9"}, h.cfg.Network.Default.Deny); d != "" {
		t.Errorf("the default was changed:\n%s", d)
	}
	if sb := create(t, h, sandbox.Spec{Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOff}}); sb.Spec.Network.Mode != sandbox.NetworkOff {
		t.Errorf("off became %+v", sb.Spec.Network)
	}
	_, err := h.SetNetwork(t.Context(), string(sb.ID), sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}, "")
	if !errors.Is(err, sandbox.ErrForbidden) || sandbox.CodeOf(err) != "network_mode_forbidden" {
		t.Errorf("more than the most: %v", err)
	}
	h.cfg.Network.Most = sandbox.NetworkOpen
	if _, err = h.SetNetwork(t.Context(), string(sb.ID), sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}, ""); err != nil {
		t.Errorf("the most itself: %v", err)
	}
}

// TestCeilingHoldsForAll: an operator who lowers the ceiling means the
// sandboxes there are, too.
func TestCeilingHoldsForAll(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	wide := sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Allow: []string{"10.0.0.0/8"}, Deny: []string{"9.9.9.9"}, Group: "g"}
	narrow := allowOnly("example.com")
	living, stopped, other := create(t, h, sandbox.Spec{Name: "a", Network: wide}), create(t, h, sandbox.Spec{Name: "b", Network: wide}), create(t, h, sandbox.Spec{Network: narrow})
	if _, err := h.Stop(t.Context(), "b", ""); err != nil {
		t.Fatal(err)
	}
	held := wide
	held.Mode = sandbox.NetworkAllow
	for most, want := range map[sandbox.NetworkMode][2]sandbox.NetworkPolicy{
		sandbox.NetworkAllow: {held, narrow},
		sandbox.NetworkOff:   {{Mode: sandbox.NetworkOff, Deny: wide.Deny}, {Mode: sandbox.NetworkOff}},
		"":                   {wide, narrow},
	} {
		h.crash()
		h = openWith(t, k, dir, func(c *Config) { c.Network.Most = most })
		if _, err := h.Start(t.Context(), "b", ""); err != nil {
			t.Fatal(err)
		}
		for id, want := range map[sandbox.ID]sandbox.NetworkPolicy{living.ID: want[0], stopped.ID: want[0], other.ID: want[1]} {
			if d := cmp.Diff(want, k.policy(id)); d != "" {
				t.Errorf("most %q: the kernel has\n%s", most, d)
			}
			if err := want.Validate(); err != nil {
				t.Error(err)
			}
			s, err := h.Network(t.Context(), string(id))
			if err != nil || !cmp.Equal(s.Policy, want) {
				t.Errorf("most %q: shown %+v, %v", most, s.Policy, err)
			}
		}
		if _, err := h.Stop(t.Context(), "b", ""); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRecoverNetworkInPart: one sandbox whose network cannot be put in order
// does not keep the daemon from its start.
func TestRecoverNetworkInPart(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{})
	h.crash()
	k.setFail("net.recover.part", true)
	h = open(t, k, dir)
	if now := h.get(t, sb.ID); now.Status != sandbox.StatusRunning {
		t.Errorf("it is %s", now.Status)
	}
	h.crash()
	k.setFail("net.recover", true) // control: without rules nothing is served
	if _, err := tryOpen(t, k, dir, func(*Config) {}); !errors.Is(err, errInjected) {
		t.Errorf("recovered over a network that failed as a whole: %v", err)
	}
}
