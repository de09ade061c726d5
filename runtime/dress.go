package runtime

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// raise builds a shell: cgroup, namespaces, PID 1 on its skeleton root. awaited
// says that a request waits for it.
func (m *Manager) raise(ctx context.Context, b *box, slot int, awaited bool) (*launch.Shell, error) {
	b.mu.Lock()
	b.counted = false
	b.mu.Unlock()
	b.reach.begin()
	b.words = nil
	if err := m.cgroup.Create(b.id); err != nil {
		return nil, err
	}
	if awaited { // milliseconds go by until libcontainer moves its first process
		m.spawn(m.cgroup.Hasten)
	}
	uidBase := m.uidBase(slot)
	shell, err := m.start(ctx, launch.ShellSpec{ID: b.id, CgroupPath: m.cgroup.Path(b.id), UIDBase: uidBase, InitID: m.initID(slot)})
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	b.shell, b.expected, b.oomKills, b.oomAt = shell, false, 0, time.Time{}
	b.mu.Unlock()
	return shell, m.cgroup.Settle(ctx, b.id, shell.PID, uidBase)
}

// launchTimeout is how long a shell may take to start.
const launchTimeout = 15 * time.Second

// start makes a shell within its time, or the context's: libcontainer knows
// neither. One that is late is killed, and what becomes of it nevertheless is
// taken away.
func (m *Manager) start(ctx context.Context, spec launch.ShellSpec) (*launch.Shell, error) {
	ctx, cancel := context.WithTimeout(ctx, m.launchIn)
	defer cancel()
	type result struct {
		shell *launch.Shell
		err   error
	}
	done := make(chan result, 1)
	go func() {
		shell, err := m.shells.Start(ctx, spec)
		done <- result{shell, err}
	}()
	select {
	case r := <-done:
		return r.shell, r.err
	case <-ctx.Done():
	}
	err := sandbox.Errorf(sandbox.ErrDeadline, "launch_timeout", "the shell of sandbox %s did not start in %v: try again; 'sandbox doctor' checks the host: %w", spec.ID, m.launchIn, ctx.Err())
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), retryTeardown)
	defer cancel()
	err = errors.Join(err, m.cgroup.Kill(clean, spec.ID)) // what it waits for ends
	go func() {
		if r := <-done; r.shell != nil {
			if err := errors.Join(r.shell.Kill(), r.shell.Close(), m.shells.Remove(spec.ID)); err != nil {
				m.log.Error("remove a shell that started late: the next start of the daemon does", "shell", spec.ID, "err", err)
			}
		}
	}()
	return nil, err
}

// raiseFor builds a shell for one sandbox, and makes its files meanwhile.
func (m *Manager) raiseFor(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image) (has given, err error) {
	var files errgroup.Group
	files.Go(func() error {
		return m.part(ctx, PartRoot, func() (err error) {
			has, err = m.layFiles(b, sb, image)
			return err
		})
	})
	err = m.part(ctx, PartShell, func() error {
		_, err := m.raise(ctx, b, sb.Slot, true)
		return err
	})
	return has, errors.Join(err, files.Wait())
}

// layFiles makes a sandbox's writable layer where it has none yet.
func (m *Manager) layFiles(b *box, sb sandbox.Sandbox, image sandbox.Image) (has given, err error) {
	if sb.StartedAt != nil { // somebody has been in these files
		err = m.roots.CreateUpper(b.id, sb.Slot, sb.Spec.Limits)
	} else {
		has.identity, err = m.freshFiles(b.id, sb, image, rootfs.FirstBase)
	}
	has.upper = &sb.Spec.Limits
	return has, err
}

// freshFiles makes a writable layer. It returns what its files tell of the
// sandbox; nothing where PID 1 must write them.
func (m *Manager) freshFiles(id sandbox.ID, sb sandbox.Sandbox, image sandbox.Image, base string) (told rootfs.Identity, err error) {
	if err := m.roots.CreateUpperOn(id, sb.Spec.Limits, base); err != nil {
		return told, err
	}
	want, err := m.identity(sb)
	if err != nil {
		return told, err
	}
	furnished, err := m.roots.Furnish(id, image, rootfs.Identity{}, want)
	if furnished {
		told = want
	}
	return told, err
}

// given is what a shell has already when it is dressed.
type given struct {
	cgroup   *sandbox.Limits // the limits of its cgroup; nil: it has none
	upper    *sandbox.Limits // those of its writable layer; nil: there is none
	identity rootfs.Identity // what its files say about it
	network  bool            // it has its network, in mode off
	prepared bool            // PID 1 has its filter and work cgroup
}

// dress gives a sandbox's shell its limits, files and network. It returns what
// PID 1 must be told and what the row of the running sandbox must say.
func (m *Manager) dress(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image, has given) (*outfit, state.Change, error) {
	shell, uidBase := b.present(), m.uidBase(sb.Slot)
	if err := m.limit(ctx, b, sb, has); err != nil {
		return nil, state.Change{}, err
	}
	if !has.network || sb.Spec.Network.Mode != sandbox.NetworkOff {
		if err := m.part(ctx, PartNetwork, func() error { return m.net.Attach(ctx, m.attachment(sb, shell)) }); err != nil {
			return nil, state.Change{}, err
		}
	}
	furnished := false
	if sb.StartedAt == nil { // nobody has been in these files yet
		want, err := m.identity(sb)
		if err != nil {
			return nil, state.Change{}, err
		}
		err = m.part(ctx, PartRoot, func() (err error) {
			furnished, err = m.roots.Furnish(b.id, image, has.identity, want)
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
		o, err = m.outfit(ctx, b, sb, image, furnished)
		return err
	})
	if err != nil || has.prepared {
		return o, ch, err
	}
	o.config.Seccomp, o.config.Work = m.cfg.Seccomp, true
	return o, ch, nil
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

// limit sets the limits of a sandbox where they are not what its shell has.
func (m *Manager) limit(ctx context.Context, b *box, sb sandbox.Sandbox, has given) error {
	want := sb.Spec.Limits
	cgroup, upper := has.cgroup == nil || *has.cgroup != want, has.upper == nil || *has.upper != want
	if !cgroup && !upper {
		return nil
	}
	return m.part(ctx, PartLimits, func() error {
		if cgroup {
			if err := m.cgroup.SetLimits(b.id, want); err != nil {
				return err
			}
		}
		if upper {
			return m.roots.CreateUpper(b.id, sb.Slot, want)
		}
		return nil
	})
}

// outfit is a mounted root and everything else PID 1 must be told.
type outfit struct {
	config guest.Config
	root   *rootfs.Root
}

// Close lets go of the descriptors; what PID 1 took it keeps.
func (o *outfit) Close() {
	_ = o.root.Close() // descriptors of mounts: nothing to lose
}

// outfit mounts the root of a sandbox; furnished says that the root tells its
// identity already.
func (m *Manager) outfit(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image, furnished bool) (*outfit, error) {
	identity, err := m.identity(sb)
	if err != nil {
		return nil, err
	}
	var last int64
	var keys []byte
	if sb.StartedAt != nil { // numbers go on after those of earlier shells, and keys start nothing again
		if last, err = m.state.LastProcess(ctx, b.id); err != nil {
			return nil, err
		}
		if keys, err = m.state.CommandKeys(ctx, b.id); err != nil {
			return nil, err
		}
	}
	o := &outfit{config: guest.Config{
		Hostname: sb.Spec.Hostname, Env: environment(image.Config.Env, sb.Spec.Env),
		WorkDir: first(sb.Spec.WorkDir, image.Config.WorkDir), User: first(sb.Spec.User, image.Config.User),
		Capabilities: sb.Spec.Capabilities, OpenFiles: sb.Spec.Limits.OpenFiles,
		Hosts: identity.Hosts, ResolvConf: identity.ResolvConf, Furnished: furnished, LastProcess: last, Keys: keys, Entries: sb.Spec.CostEntries,
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
	return o, nil
}
