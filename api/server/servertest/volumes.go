package servertest

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// CreateVolume implements server.Manager.
func (m *Memory) CreateVolume(_ context.Context, req sandbox.VolumeRequest) (sandbox.Volume, error) {
	if err := m.fail("CreateVolume"); err != nil {
		return sandbox.Volume{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.volume(req.Name) != nil {
		return sandbox.Volume{}, sandbox.Errorf(sandbox.ErrConflict, "volume_exists", "there is a volume %s already", req.Name)
	}
	v := sandbox.Volume{
		Name: req.Name, Owner: req.Actor, Status: sandbox.VolumeReady, SizeBytes: req.SizeBytes, Inodes: req.Inodes,
		CreatedAt: time.Now(), Labels: req.Labels,
	}
	m.volumes = append(m.volumes, v)
	slices.SortFunc(m.volumes, func(a, b sandbox.Volume) int { return strings.Compare(a.Name, b.Name) })
	return v, nil
}

// volume finds a volume, with its users; m.mu is held.
func (m *Memory) volume(name string) *sandbox.Volume {
	i := slices.IndexFunc(m.volumes, func(v sandbox.Volume) bool { return v.Name == name })
	if i < 0 {
		return nil
	}
	v := &m.volumes[i]
	v.UsedBy = nil
	for _, b := range m.boxes {
		mounts := func(v sandbox.VolumeMount) bool { return v.Volume == name }
		if !b.sb.Status.Terminal() && slices.ContainsFunc(b.sb.Spec.Volumes, mounts) {
			v.UsedBy = append(v.UsedBy, b.sb.ID)
		}
	}
	return v
}

func (m *Memory) needVolume(name string) (*sandbox.Volume, error) {
	if v := m.volume(name); v != nil {
		return v, nil
	}
	return nil, sandbox.Errorf(sandbox.ErrNotFound, "volume_not_found", "no volume %q: 'sandbox volume create %s' makes it", name, name)
}

// needVolumes refuses mounts of what is not there; m.mu is held.
func (m *Memory) needVolumes(mounts []sandbox.VolumeMount) error {
	for _, v := range mounts {
		if v.HostPath != "" {
			return sandbox.Errorf(sandbox.ErrForbidden, "bind_denied", "host path %s lies beneath no bind root", v.HostPath)
		}
		if _, err := m.needVolume(v.Volume); err != nil {
			return err
		}
	}
	return nil
}

// Volumes implements server.Manager.
func (m *Memory) Volumes(context.Context) ([]sandbox.Volume, error) {
	if err := m.fail("Volumes"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, v := range m.volumes {
		m.volume(v.Name)
	}
	return slices.Clone(m.volumes), nil
}

// Volume implements server.Manager.
func (m *Memory) Volume(_ context.Context, name string) (sandbox.Volume, error) {
	if err := m.fail("Volume"); err != nil {
		return sandbox.Volume{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	v, err := m.needVolume(name)
	if err != nil {
		return sandbox.Volume{}, err
	}
	return *v, nil
}

// ChangeVolume implements server.Manager.
func (m *Memory) ChangeVolume(_ context.Context, name string, ch sandbox.VolumeChange) (sandbox.Volume, error) {
	if err := m.fail("ChangeVolume"); err != nil {
		return sandbox.Volume{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	v, err := m.needVolume(name)
	if err != nil {
		return sandbox.Volume{}, err
	}
	if ch.SizeBytes != nil {
		v.SizeBytes = *ch.SizeBytes
	}
	if ch.Inodes != nil {
		v.Inodes = *ch.Inodes
	}
	return *v, nil
}

// RemoveVolume implements server.Manager.
func (m *Memory) RemoveVolume(_ context.Context, name, _ string) error {
	if err := m.fail("RemoveVolume"); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	v, err := m.needVolume(name)
	if err != nil {
		return err
	}
	if len(v.UsedBy) > 0 {
		return sandbox.Errorf(sandbox.ErrConflict, "volume_in_use", "volume %s is used by sandbox %s: remove that first", name, v.UsedBy[0])
	}
	m.volumes = slices.DeleteFunc(m.volumes, func(v sandbox.Volume) bool { return v.Name == name })
	return nil
}
