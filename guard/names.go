package guard

import (
	"errors"
	"maps"
	"strings"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// maxName is what a name and the mark leave of the 63 characters.
const maxName = 63 - sandbox.MarkLength

// names are those of one owner.
type names struct{ mark string } // with its dot

func namesOf(owner string) names { return names{sandbox.OwnerMark(owner)} }

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
	return p.Unmarked(a.mark)
}

func (a *asker) spec(s sandbox.Spec) sandbox.Spec {
	if a == nil {
		return s
	}
	return s.Unmarked(a.mark)
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
