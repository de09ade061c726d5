package runtime

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// raise builds a shell: cgroup, namespaces, PID 1 on its skeleton root.
func (m *Manager) raise(ctx context.Context, b *box, slot int) (*launch.Shell, error) {
	b.mu.Lock()
	b.counted = false
	b.mu.Unlock()
	b.reach.begin()
	if err := m.cgroup.Create(b.id); err != nil {
		return nil, err
	}
	uidBase := m.uidBase(slot)
	shell, err := m.shells.Start(ctx, launch.ShellSpec{ID: b.id, CgroupPath: m.cgroup.Path(b.id), UIDBase: uidBase})
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	b.shell, b.expected, b.oomKills, b.oomAt = shell, false, 0, time.Time{}
	b.mu.Unlock()
	return shell, m.cgroup.Settle(ctx, b.id, shell.PID, uidBase)
}

// dress gives a sandbox's shell its limits, files and network. It returns what
// PID 1 must be told and what the row of the running sandbox must say. ready
// tells what a pooled shell has already; nil of any other.
func (m *Manager) dress(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image, ready *pooled) (*outfit, state.Change, error) {
	shell, uidBase := b.present(), m.uidBase(sb.Slot)
	if ready == nil || ready.limits != sb.Spec.Limits {
		err := m.part(ctx, PartLimits, func() error {
			if err := m.cgroup.SetLimits(b.id, sb.Spec.Limits); err != nil {
				return err
			}
			return m.roots.CreateUpper(b.id, sb.Slot, sb.Spec.Limits)
		})
		if err != nil {
			return nil, state.Change{}, err
		}
	}
	if ready == nil || sb.Spec.Network.Mode != sandbox.NetworkOff {
		if err := m.part(ctx, PartNetwork, func() error { return m.net.Attach(ctx, m.attachment(sb, shell)) }); err != nil {
			return nil, state.Change{}, err
		}
	}
	furnished := false
	if sb.StartedAt == nil { // nobody has been in these files yet
		var had rootfs.Identity
		if ready != nil {
			had = ready.wrote
		}
		want, err := m.identity(sb)
		if err != nil {
			return nil, state.Change{}, err
		}
		err = m.part(ctx, PartRoot, func() (err error) {
			furnished, err = m.roots.Furnish(b.id, image, had, want)
			return err
		})
		if err != nil {
			return nil, state.Change{}, err
		}
	}
	addr, err := m.net.Address(sb.Slot)
	if err != nil {
		return nil, state.Change{}, err
	}
	ch := state.Change{
		InitPID: &shell.PID, InitStart: &shell.StartTime, BootID: &m.cfg.BootID, Address: &addr, UIDBase: &uidBase,
		Enforcement: m.enforcement(sb.Spec), Actor: sb.Owner,
	}
	if sb.StartedAt == nil {
		now := time.Now().UTC()
		ch.StartedAt = &now
	}
	ch.Deadline = newDeadline(sb)
	var o *outfit
	err = m.part(ctx, PartRoot, func() (err error) {
		o, err = m.outfit(ctx, b, sb, image, given{files: furnished, prepared: ready != nil})
		return err
	})
	return o, ch, err
}

// identity is what the files of a sandbox say about it.
func (m *Manager) identity(sb sandbox.Sandbox) (rootfs.Identity, error) {
	addr, err := m.net.Address(sb.Slot)
	if err != nil {
		return rootfs.Identity{}, err
	}
	return rootfs.Identity{
		Hostname: sb.Spec.Hostname, Hosts: hostsFile(sb.Spec.Hostname, addr), ResolvConf: m.resolvConf(),
	}, nil
}

// given is what a configuration need not bring any more.
type given struct {
	files    bool // the root tells the sandbox's identity already
	prepared bool // PID 1 has its filter and cgroup
}

// outfit is a mounted root and everything else PID 1 must be told.
type outfit struct {
	config guest.Config
	root   *rootfs.Root
}

// Close lets go of the descriptors; what PID 1 took it keeps.
func (o *outfit) Close() {
	_ = o.root.Close() // descriptors of mounts: nothing to lose
	if o.config.Work != nil {
		_ = o.config.Work.Close()
	}
}

// outfit mounts the root of a sandbox.
func (m *Manager) outfit(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image, has given) (*outfit, error) {
	identity, err := m.identity(sb)
	if err != nil {
		return nil, err
	}
	var last int64
	if sb.StartedAt != nil { // numbers go on after those of earlier shells
		if last, err = m.state.LastProcess(ctx, b.id); err != nil {
			return nil, err
		}
	}
	o := &outfit{config: guest.Config{
		Hostname: sb.Spec.Hostname, Env: environment(image.Config.Env, sb.Spec.Env),
		WorkDir: first(sb.Spec.WorkDir, image.Config.WorkDir), User: first(sb.Spec.User, image.Config.User),
		Capabilities: sb.Spec.Capabilities, OpenFiles: sb.Spec.Limits.OpenFiles,
		Hosts: identity.Hosts, ResolvConf: identity.ResolvConf, Furnished: has.files, LastProcess: last, Entries: sb.Spec.CostEntries,
	}}
	o.root, err = m.roots.Mount(ctx, rootfs.MountSpec{
		ID: b.id, Slot: sb.Slot, Image: image, UserNS: b.present().UserNS, UIDBase: m.uidBase(sb.Slot),
	})
	if err != nil {
		return nil, err
	}
	volumes, err := m.mountVolumes(b, sb)
	if err != nil {
		o.Close()
		return nil, err
	}
	o.root.Extra = append(o.root.Extra, volumes...)
	o.config.Root = &guest.RootMount{Root: o.root.Mount}
	for _, e := range o.root.Extra {
		o.config.Root.Extra = append(o.config.Root.Extra, guest.ExtraMount{File: e.File, Path: e.Path})
	}
	if has.prepared {
		return o, nil
	}
	o.config.Seccomp = m.cfg.Seccomp
	if o.config.Work, err = m.cgroup.WorkDir(b.id); err != nil {
		o.Close()
		return nil, err
	}
	return o, nil
}
