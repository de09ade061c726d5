package state

import (
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func ready(t *testing.T, d *DB, name string) {
	t.Helper()
	v := sandbox.Volume{Name: name, Owner: "uid:0", Status: sandbox.VolumeReady, SizeBytes: 1 << 30, CreatedAt: time.Now().UTC(), UsedBytes: 7}
	if err := d.AddVolume(t.Context(), v); err != nil {
		t.Fatal(err)
	}
}

// withVolumes are params of a sandbox that mounts volumes.
func withVolumes(name string, volumes ...string) CreateParams {
	p := params(name)
	for _, v := range volumes {
		p.Sandbox.Spec.Volumes = append(p.Sandbox.Spec.Volumes, sandbox.VolumeMount{Volume: v, Path: "/" + v})
	}
	return p
}

func TestVolumesAreKept(t *testing.T) {
	d := open(t)
	ready(t, d, "b")
	ready(t, d, "a")
	v, err := d.Volume(t.Context(), "a")
	if err != nil || v.Owner != "uid:0" || v.SizeBytes != 1<<30 || v.Status != sandbox.VolumeReady || v.UsedBytes != 0 {
		t.Errorf("%+v, %v", v, err)
	}
	all, err := d.Volumes(t.Context())
	if err != nil || len(all) != 2 || all[0].Name != "a" || all[1].Name != "b" {
		t.Errorf("%+v, %v", all, err)
	}
	want(t, d.AddVolume(t.Context(), v), sandbox.ErrConflict, "volume_exists")
	_, err = d.Volume(t.Context(), "c")
	want(t, err, sandbox.ErrNotFound, "volume_not_found")
	v, err = d.ChangeVolume(t.Context(), "a", func(v *sandbox.Volume) error {
		v.Name, v.Inodes = "x", 99
		return nil
	})
	if err != nil || v.Inodes != 99 {
		t.Errorf("changed: %+v, %v", v, err)
	}
	if v, err := d.Volume(t.Context(), "a"); err != nil || v.Inodes != 99 || v.SizeBytes != 1<<30 || v.Name != "a" {
		t.Errorf("after the change: %+v, %v", v, err)
	}
	_, err = d.ChangeVolume(t.Context(), "c", func(*sandbox.Volume) error { return nil })
	want(t, err, sandbox.ErrNotFound, "volume_not_found")
	for range 2 {
		if err := d.DeleteVolume(t.Context(), "a"); err != nil {
			t.Error(err)
		}
	}
}

// TestVolumeInUse removes a volume that sandboxes mount; the control is the
// same removal once they have ended.
func TestVolumeInUse(t *testing.T) {
	d := open(t)
	ready(t, d, "a")
	ready(t, d, "b")
	p := withVolumes("one", "a", "b")
	p.Sandbox.Spec.Volumes = append(p.Sandbox.Spec.Volumes, sandbox.VolumeMount{Volume: "a", Path: "/again"}, sandbox.VolumeMount{HostPath: "/srv", Path: "/srv"})
	one, _, err := d.CreateSandbox(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	two, _, err := d.CreateSandbox(t.Context(), withVolumes("two", "a"))
	if err != nil {
		t.Fatal(err)
	}
	create(t, d, "none")
	users, err := d.VolumeUsers(t.Context())
	if err != nil || !slices.Equal(users["a"], []sandbox.ID{one.ID, two.ID}) || !slices.Equal(users["b"], []sandbox.ID{one.ID}) || len(users) != 2 {
		t.Errorf("users %v, %v", users, err)
	}
	want(t, d.RemoveVolume(t.Context(), "a"), sandbox.ErrConflict, "volume_in_use")
	bring(t, d, one, sandbox.StatusCompleted)
	want(t, d.RemoveVolume(t.Context(), "a"), sandbox.ErrConflict, "volume_in_use")
	bring(t, d, two, sandbox.StatusCompleted)
	for range 2 {
		if err := d.RemoveVolume(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	}
	if v, err := d.Volume(t.Context(), "a"); err != nil || v.Status != sandbox.VolumeRemoving {
		t.Errorf("%+v, %v", v, err)
	}
	want(t, d.RemoveVolume(t.Context(), "c"), sandbox.ErrNotFound, "volume_not_found")
}

// TestNoSandboxWithoutItsVolumes makes sandboxes with volumes that are not
// there, being made or being removed; the control is one that is ready.
func TestNoSandboxWithoutItsVolumes(t *testing.T) {
	d := open(t)
	ready(t, d, "good")
	ready(t, d, "going")
	if err := d.RemoveVolume(t.Context(), "going"); err != nil {
		t.Fatal(err)
	}
	if err := d.AddVolume(t.Context(), sandbox.Volume{Name: "coming", Status: sandbox.VolumeCreating, CreatedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"missing", "going", "coming"} {
		_, _, err := d.CreateSandbox(t.Context(), withVolumes("", "good", name))
		want(t, err, sandbox.ErrNotFound, "volume_not_found")
	}
	if _, _, err := d.CreateSandbox(t.Context(), withVolumes("", "good")); err != nil {
		t.Error(err)
	}
	if n := leases(t, d); n != 1 {
		t.Errorf("%d slots leased, want 1", n)
	}
}
