package guard

import (
	"context"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of what is not in a quota and would still be had at others' cost.
const (
	maxCPUWeight = 100 // the weight of who asks for none
	maxPIDs      = 32768
)

// labelAgent is the label of the lab's own sandboxes.
const labelAgent = project.LabelAgent

// agentNames begin the names of the lab's own sandboxes, by which it finds
// them again.
const agentNames = "sandbox_prj_"

// amend checks a spec against what its owner may have, and makes it one in the
// daemon's words: names, ids, and the lifetime the quota leaves.
func (g *Manager) amend(ctx context.Context, a *asker, q access.Quota, s *sandbox.Spec) error {
	*s = s.Clone()
	if strings.HasPrefix(s.Name, agentNames) {
		return sandbox.Errorf(sandbox.ErrForbidden, "name_reserved", "name %.70q: names that begin with %s are those of the lab's agents: choose another", s.Name, agentNames)
	}
	if err := g.amendSource(ctx, a, s); err != nil {
		return err
	}
	if err := limitsAllowed(s.Limits); err != nil {
		return err
	}
	if err := a.amendPolicy(&s.Network); err != nil {
		return err
	}
	if err := g.amendVolumes(ctx, a, s.Volumes); err != nil {
		return err
	}
	if err := g.chargeable(ctx, a, s.Project, s.Labels); err != nil {
		return err
	}
	s.TTLSeconds = within(s.TTLSeconds, g.cfg.DefaultTTL, q.Lifetime)
	s.IdleTimeoutSeconds = within(s.IdleTimeoutSeconds, g.cfg.DefaultIdle, q.Idle)
	return nil
}

// amendSource resolves the image or snapshot among what the owner sees.
func (g *Manager) amendSource(ctx context.Context, a *asker, s *sandbox.Spec) error {
	if s.Snapshot != "" {
		snap, err := g.rows.OwnSnapshot(ctx, a.Owner, string(s.Snapshot))
		if err != nil {
			if of, ok := g.shared(ctx, a, string(s.Snapshot)); ok {
				snap, err = of, nil
			}
		}
		s.Snapshot = snap.ID
		return err
	}
	if s.Image == "" {
		return nil
	}
	if err := sandbox.ValidateImageName(s.Image); err != nil {
		return err
	}
	img, err := g.image(ctx, a, s.Image)
	s.Image = img.Name
	return err
}

func limitsAllowed(l sandbox.Limits) error {
	switch {
	case l.CPUWeight > maxCPUWeight:
		return forOperators("a cpu_weight above 100 takes from others")
	case l.PIDs > maxPIDs:
		return forOperators("more than 32768 pids take from others")
	}
	return nil
}

// amendPolicy puts the owner's names into a policy.
func (a *asker) amendPolicy(p *sandbox.NetworkPolicy) error {
	if a == nil {
		return nil
	}
	if len(p.DNS) > 0 {
		return forOperators("network dns: the daemon itself would ask that resolver")
	}
	*p = p.Clone()
	if err := a.fits("group", p.Group); err != nil {
		return err
	}
	if p.Group != "" && sandbox.ValidateName(p.Group) == nil {
		p.Group = a.stored(p.Group)
	}
	if p.HTTP == nil {
		return nil
	}
	for i := range p.HTTP.Inject {
		c := &p.HTTP.Inject[i]
		if err := a.fits("secret", c.Secret); err != nil {
			return err
		}
		if sandbox.ValidateName(c.Secret) == nil { // else it is the policy's to refuse
			c.Secret = a.stored(c.Secret)
		}
	}
	return nil
}

// amendVolumes finds the volumes of mounts among the owner's.
func (g *Manager) amendVolumes(ctx context.Context, a *asker, mounts []sandbox.VolumeMount) error {
	for i := range mounts {
		switch m := &mounts[i]; {
		case m.HostPath != "":
			return sandbox.Errorf(sandbox.ErrForbidden, "bind_denied", "host path %s: only root may hand directories of the host to sandboxes: ask root, or use a volume", m.HostPath)
		case m.Volume != "":
			name, err := g.ownVolume(ctx, a, m.Volume)
			if err != nil {
				return err
			}
			m.Volume = name
		}
	}
	return nil
}

// ownVolume is the stored name of one of the owner's volumes.
func (g *Manager) ownVolume(ctx context.Context, a *asker, name string) (string, error) {
	if err := sandbox.ValidateName(name); err != nil {
		return "", err
	}
	return g.rows.OwnVolume(ctx, a.Owner, a.stored(name), name)
}

// chargeable refuses what would be charged to others' projects and agents.
func (g *Manager) chargeable(ctx context.Context, a *asker, of string, labels map[string]string) error {
	for _, p := range []string{of, labels[project.LabelProject]} {
		if !strings.HasPrefix(p, "prj_") {
			continue // a mistake in the first is the spec's to refuse
		}
		if _, err := g.rows.OwnProject(ctx, a.Owner, p); err != nil {
			return err
		}
	}
	if id := labels[labelAgent]; id != "" {
		if _, err := g.rows.OwnAgent(ctx, a.Owner, project.AgentID(id)); err != nil {
			return err
		}
	}
	return nil
}

// within is a time in seconds, 0 for the daemon's own, as far as a bound
// leaves it.
func within(asked int64, own, bound time.Duration) int64 {
	most := int64(bound / time.Second)
	switch {
	case bound <= 0:
		return asked
	case asked == 0 && own > 0 && own <= bound:
		return 0
	case asked == 0, asked > most:
		return max(most, 1)
	}
	return asked
}
