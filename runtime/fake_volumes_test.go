package runtime

import (
	"maps"
	"os"
	"slices"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (f fakeRoots) CreateVolume(name string, l rootfs.VolumeLimits) error {
	return f.step("volume.create", func() { f.volumes[name] = l })
}

func (f fakeRoots) LimitVolume(name string, l rootfs.VolumeLimits) error {
	return f.step("volume.limit", func() { f.volumes[name] = l })
}

func (f fakeRoots) LimitsOfVolume(name string) (l rootfs.VolumeLimits, err error) {
	err = f.step("volume.limits", func() { l = f.volumes[name] })
	return l, err
}

func (f fakeRoots) VolumeUsage(name string) (bytes, inodes uint64, known bool, err error) {
	err = f.step("volume.usage", func() { _, known = f.volumes[name] })
	return 4096, 1, known, err
}

func (f fakeRoots) VolumeEnforcement(rootfs.VolumeLimits) []sandbox.Enforcement { return nil }

func (f fakeRoots) MountVolume(name string, _ *os.File, _ bool) (*os.File, error) {
	there := false
	if err := f.step("volume.mount", func() { _, there = f.volumes[name] }); err != nil {
		return nil, err
	}
	if !there {
		return nil, sandbox.Errorf(sandbox.ErrNotFound, "volume_gone", "no files of volume %s", name)
	}
	return os.Open("/")
}

func (f fakeRoots) DiscardVolume(name string) error {
	return f.step("volume.discard", func() { delete(f.volumes, name) })
}

func (f fakeRoots) NamedVolumes() (names []string, err error) {
	err = f.step("volume.list", func() { names = slices.Sorted(maps.Keys(f.volumes)) })
	return names, err
}

func (f fakeRoots) CheckBind(rootfs.BindSpec) error { return f.step("bind.check", nil) }

func (f fakeRoots) MountBind(rootfs.BindSpec) (*os.File, error) {
	if err := f.step("bind.mount", nil); err != nil {
		return nil, err
	}
	return os.Open("/")
}
