package guard

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Names of volumes, secrets and network groups are the daemon's: one means the
// same thing to everybody. So that owners neither meet in them nor find them
// out, those of a developer are kept as NAME.MARK, with a mark of the owner,
// and only the owner sees them without it.

// markBytes of a SHA-256 keep owners apart.
const markBytes = 5

// maxName is what a name and the mark leave of the 63 characters.
const maxName = 63 - 1 - 2*markBytes

// names are those of one owner.
type names struct{ mark string } // with its dot

func namesOf(owner string) names {
	sum := sha256.Sum256([]byte(owner))
	return names{"." + hex.EncodeToString(sum[:markBytes])}
}

// stored is the name as the daemon keeps it.
func (n names) stored(name string) string {
	if name == "" || strings.HasSuffix(name, n.mark) {
		return name
	}
	return name + n.mark
}

// said is the name as its owner says it.
func (n names) said(name string) string { return strings.TrimSuffix(name, n.mark) }

// fits refuses names that have no room for the mark.
func (n names) fits(what, name string) error {
	if len(n.said(name)) > maxName {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_name", "%s name %.70q: use at most %d characters", what, name, maxName)
	}
	return nil
}

// plain takes the mark out of what an error says.
func (a *asker) plain(err error) error {
	if a == nil || err == nil {
		return err
	}
	e, ok := errors.AsType[*sandbox.Error](err)
	if !ok || !strings.Contains(e.Detail, a.mark) {
		return err
	}
	said := *e
	said.Detail = strings.ReplaceAll(e.Detail, a.mark, "")
	return &said
}

// policy is a network policy as its owner says it.
func (a *asker) policy(p sandbox.NetworkPolicy) sandbox.NetworkPolicy {
	if a == nil || p.Group == "" && (p.HTTP == nil || len(p.HTTP.Inject) == 0) {
		return p
	}
	p = p.Clone()
	p.Group = a.said(p.Group)
	if p.HTTP != nil {
		for i := range p.HTTP.Inject {
			p.HTTP.Inject[i].Secret = a.said(p.HTTP.Inject[i].Secret)
		}
	}
	return p
}

func (a *asker) spec(s sandbox.Spec) sandbox.Spec {
	if a == nil {
		return s
	}
	s.Network = a.policy(s.Network)
	if len(s.Volumes) > 0 {
		s.Volumes = slices.Clone(s.Volumes)
		for i := range s.Volumes {
			s.Volumes[i].Volume = a.said(s.Volumes[i].Volume)
		}
	}
	return s
}

func (a *asker) sandbox(sb sandbox.Sandbox) sandbox.Sandbox {
	sb.Spec = a.spec(sb.Spec)
	return sb
}

func (a *asker) sandboxes(all []sandbox.Sandbox) []sandbox.Sandbox {
	if a != nil {
		for i := range all {
			all[i] = a.sandbox(all[i])
		}
	}
	return all
}

func (a *asker) snapshot(s sandbox.Snapshot) sandbox.Snapshot {
	s.Spec = a.spec(s.Spec)
	return s
}

func (a *asker) snapshots(all []sandbox.Snapshot) []sandbox.Snapshot {
	if a != nil {
		for i := range all {
			all[i] = a.snapshot(all[i])
		}
	}
	return all
}

func (a *asker) forks(all []sandbox.Fork) []sandbox.Fork {
	if a != nil {
		for i, f := range all {
			if f.Sandbox != nil {
				sb := a.sandbox(*f.Sandbox)
				all[i].Sandbox = &sb
			}
			all[i].Error = strings.ReplaceAll(f.Error, a.mark, "")
		}
	}
	return all
}

func (a *asker) volume(v sandbox.Volume) sandbox.Volume {
	if a != nil {
		v.Name = a.said(v.Name)
	}
	return v
}

func (a *asker) secret(s sandbox.Secret) sandbox.Secret {
	if a != nil {
		s.Name = a.said(s.Name)
	}
	return s
}

// events takes the mark out of what events tell.
func (a *asker) events(all []sandbox.Event) []sandbox.Event {
	if a != nil {
		for i := range all {
			all[i] = a.event(all[i])
		}
	}
	return all
}

func (a *asker) event(e sandbox.Event) sandbox.Event {
	for k, v := range e.Data {
		if strings.Contains(v, a.mark) {
			e.Data = maps.Clone(e.Data)
			e.Data[k] = strings.ReplaceAll(v, a.mark, "")
		}
	}
	return e
}

func (a *asker) agent(g project.Agent) project.Agent {
	g.Spec.Network = a.policy(g.Spec.Network)
	return g
}
