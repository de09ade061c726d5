package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

// A volume is a row and a directory. The row comes first and goes last:
//
//	row creating → directory → row ready → … → row removing → no directory → no row
//
// so that a crash leaves no directory that no row tells of, and a row that is
// not ready tells recovery to remove both.

// admin is who may hand directories of the host to sandboxes.
const admin = "uid:0"

// CreateVolume makes a volume. ErrConflict with code volume_exists.
func (m *Manager) CreateVolume(ctx context.Context, req sandbox.VolumeRequest) (sandbox.Volume, error) {
	if err := m.open(); err != nil {
		return sandbox.Volume{}, err
	}
	if err := req.Validate(); err != nil {
		return sandbox.Volume{}, err
	}
	v := sandbox.Volume{
		Name: req.Name, Owner: req.Actor, Status: sandbox.VolumeCreating, CreatedAt: time.Now().UTC(), Labels: req.Labels,
		SizeBytes: first(req.SizeBytes, m.cfg.Defaults.DiskBytes), Inodes: first(req.Inodes, m.cfg.Defaults.DiskInodes),
	}
	m.volumes.Lock()
	defer m.volumes.Unlock()
	if err := m.state.AddVolume(ctx, v); err != nil {
		return v, err
	}
	work := context.WithoutCancel(ctx)
	err := m.roots.CreateVolume(v.Name, volumeLimits(v))
	if err == nil {
		v, err = m.state.ChangeVolume(work, v.Name, func(v *sandbox.Volume) error {
			v.Status = sandbox.VolumeReady
			return nil
		})
	}
	if err != nil {
		return v, errors.Join(err, m.forgetVolume(work, req.Name))
	}
	m.record(work, sandbox.Event{Type: "volume.created", Actor: req.Actor, Data: map[string]string{"volume": v.Name}})
	return m.Volume(work, v.Name)
}

// Volume returns a volume with what it holds now and who uses it.
func (m *Manager) Volume(ctx context.Context, name string) (sandbox.Volume, error) {
	v, err := m.state.Volume(ctx, name)
	if err != nil {
		return v, err
	}
	users, err := m.state.VolumeUsers(ctx)
	if err != nil {
		return v, err
	}
	return m.look(v, users)
}

// Volumes lists the volumes as Volume shows them, in the order of the names.
func (m *Manager) Volumes(ctx context.Context) ([]sandbox.Volume, error) {
	all, err := m.state.Volumes(ctx)
	if err != nil {
		return nil, err
	}
	users, err := m.state.VolumeUsers(ctx)
	if err != nil {
		return nil, err
	}
	for i, v := range all {
		if all[i], err = m.look(v, users); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// look adds what is not in the row.
func (m *Manager) look(v sandbox.Volume, users map[string][]sandbox.ID) (sandbox.Volume, error) {
	bytes, inodes, known, err := m.roots.VolumeUsage(v.Name)
	if err != nil {
		return v, err
	}
	v.UsedBytes, v.UsedInodes, v.Uncounted = bytes, inodes, !known
	v.UsedBy = users[v.Name]
	v.Enforcement = m.roots.VolumeEnforcement(volumeLimits(v))
	return v, nil
}

// ChangeVolume changes the limits of a volume, at once also for the sandboxes
// that use it.
func (m *Manager) ChangeVolume(ctx context.Context, name string, ch sandbox.VolumeChange) (sandbox.Volume, error) {
	if err := m.open(); err != nil {
		return sandbox.Volume{}, err
	}
	if err := ch.Validate(); err != nil {
		return sandbox.Volume{}, err
	}
	m.volumes.Lock()
	defer m.volumes.Unlock()
	v, err := m.state.ChangeVolume(ctx, name, func(v *sandbox.Volume) error {
		if v.Status != sandbox.VolumeReady {
			return sandbox.Errorf(sandbox.ErrConflict, "volume_not_ready", "volume %s is being removed", name)
		}
		if ch.SizeBytes != nil {
			v.SizeBytes = first(*ch.SizeBytes, m.cfg.Defaults.DiskBytes)
		}
		if ch.Inodes != nil {
			v.Inodes = first(*ch.Inodes, m.cfg.Defaults.DiskInodes)
		}
		return nil
	})
	if err != nil {
		return v, err
	}
	// Where this fails or a crash comes first, the next start does it.
	if err := m.roots.LimitVolume(name, volumeLimits(v)); err != nil {
		return v, err
	}
	work := context.WithoutCancel(ctx)
	m.record(work, sandbox.Event{Type: "volume.changed", Actor: ch.Actor, Data: map[string]string{"volume": name}})
	return m.Volume(work, name)
}

// RemoveVolume deletes a volume and all it holds. One whose removal failed
// half-way is shown as removing, and can be removed again. ErrConflict with
// code volume_in_use while a living sandbox mounts it, ErrNotFound.
func (m *Manager) RemoveVolume(ctx context.Context, name, actor string) error {
	if err := m.open(); err != nil {
		return err
	}
	m.volumes.Lock()
	defer m.volumes.Unlock()
	if err := m.state.RemoveVolume(ctx, name); err != nil {
		return err
	}
	work := context.WithoutCancel(ctx)
	if err := m.forgetVolume(work, name); err != nil {
		return sandbox.Errorf(sandbox.ErrUnavailable, "removal_incomplete", "volume %s is not all gone yet: 'sandbox volume rm %s' tries again: %w", name, name, err)
	}
	m.record(work, sandbox.Event{Type: "volume.removed", Actor: actor, Data: map[string]string{"volume": name}})
	return nil
}

// forgetVolume removes a volume that no sandbox can have. Repeating it is
// safe.
func (m *Manager) forgetVolume(ctx context.Context, name string) error {
	if err := m.roots.DiscardVolume(name); err != nil {
		return err
	}
	return m.state.DeleteVolume(ctx, name)
}

func volumeLimits(v sandbox.Volume) rootfs.VolumeLimits {
	return rootfs.VolumeLimits{Bytes: v.SizeBytes, Inodes: v.Inodes}
}

// checkMounts refuses a sandbox whose mounts would fail, or that its maker may
// not have. CreateSandbox looks at the volumes again, in its transaction.
func (m *Manager) checkMounts(ctx context.Context, mounts []sandbox.VolumeMount, actor string) error {
	for _, v := range mounts {
		if v.Volume != "" {
			if _, err := m.state.Volume(ctx, v.Volume); err != nil {
				return err
			}
			continue
		}
		if actor != admin {
			return sandbox.Errorf(sandbox.ErrForbidden, "bind_denied", "host path %s: only root may hand directories of the host to sandboxes: ask root, or use a volume", v.HostPath)
		}
		if err := m.roots.CheckBind(rootfs.BindSpec{HostPath: v.HostPath, Writable: v.Writable}); err != nil {
			return err
		}
	}
	return nil
}

// mountVolumes mounts what a spec names besides the root, in the order in
// which PID 1 must attach it.
func (m *Manager) mountVolumes(b *box, sb sandbox.Sandbox) (extra []rootfs.Extra, err error) {
	userns, base := b.present().UserNS, m.uidBase(sb.Slot)
	for _, v := range attachOrder(sb.Spec.Volumes) {
		var tree *os.File
		if v.Volume != "" {
			tree, err = m.roots.MountVolume(v.Volume, userns, v.ReadOnly)
		} else {
			tree, err = m.roots.MountBind(rootfs.BindSpec{HostPath: v.HostPath, Writable: v.Writable, UIDBase: base})
		}
		if err != nil {
			for _, e := range extra {
				_ = e.File.Close() // detached: they go with it
			}
			return nil, err
		}
		extra = append(extra, rootfs.Extra{File: tree, Path: v.Path})
	}
	return extra, nil
}

// attachOrder puts what lies beneath another mount after that.
func attachOrder(mounts []sandbox.VolumeMount) []sandbox.VolumeMount {
	sorted := slices.Clone(mounts)
	slices.SortStableFunc(sorted, func(a, b sandbox.VolumeMount) int {
		if d := strings.Count(a.Path, "/") - strings.Count(b.Path, "/"); d != 0 {
			return d
		}
		return strings.Compare(a.Path, b.Path)
	})
	return sorted
}

// volumeFate is what becomes of a volume found at the start.
type volumeFate int

const (
	volumeKeep   volumeFate = iota + 1 // its limits are set again
	volumeForget                       // made or removed half-way
	volumeLost                         // its files are gone; somebody must decide
	volumeAdopt                        // its row is gone, as after an older database was put back
)

// judgeVolumes compares rows with directories.
func judgeVolumes(rows []sandbox.Volume, dirs []string) map[string]volumeFate {
	fates := map[string]volumeFate{}
	for _, name := range dirs {
		fates[name] = volumeAdopt
	}
	for _, v := range rows {
		_, there := fates[v.Name]
		switch {
		case v.Status != sandbox.VolumeReady:
			fates[v.Name] = volumeForget
		case there:
			fates[v.Name] = volumeKeep
		default:
			fates[v.Name] = volumeLost
		}
	}
	return fates
}

// recoverVolumes brings rows and directories of volumes together. No file of a
// volume that was ready is ever removed here.
func (m *Manager) recoverVolumes(ctx context.Context) error {
	rows, err := m.state.Volumes(ctx)
	if err != nil {
		return err
	}
	dirs, err := m.roots.NamedVolumes()
	if err != nil {
		return err
	}
	var errs []error
	for name, fate := range judgeVolumes(rows, dirs) {
		var err error
		switch fate {
		case volumeKeep:
			i := slices.IndexFunc(rows, func(v sandbox.Volume) bool { return v.Name == name })
			err = m.roots.LimitVolume(name, volumeLimits(rows[i]))
		case volumeForget:
			m.log.WarnContext(ctx, "removing a volume that was made or removed half-way", "volume", name)
			err = m.forgetVolume(ctx, name)
		case volumeLost:
			m.log.ErrorContext(ctx, "the files of a volume are not there: put them back, or remove the volume", "volume", name)
		case volumeAdopt:
			m.log.WarnContext(ctx, "taking up a volume the database does not know", "volume", name)
			err = m.adoptVolume(ctx, name)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("volume %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// adoptVolume writes down a volume that has files and no row, with the limits
// that are in force.
func (m *Manager) adoptVolume(ctx context.Context, name string) error {
	l, err := m.roots.LimitsOfVolume(name)
	if err != nil {
		return err
	}
	if err := m.roots.CreateVolume(name, l); err != nil { // whatever a crash left out
		return err
	}
	return m.state.AddVolume(ctx, sandbox.Volume{
		Name: name, Owner: "daemon", Status: sandbox.VolumeReady, CreatedAt: time.Now().UTC(), SizeBytes: l.Bytes, Inodes: l.Inodes,
	})
}
