package runtime

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

func newVolume(t *testing.T, h *house, name string) {
	t.Helper()
	if _, err := h.CreateVolume(t.Context(), sandbox.VolumeRequest{Name: name, SizeBytes: 1 << 30, Actor: "uid:7"}); err != nil {
		t.Fatal(err)
	}
}

// volumesAgree compares rows with the model's directories.
func (h *house) volumesAgree(t *testing.T, want ...string) {
	t.Helper()
	rows, err := h.Volumes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, v := range rows {
		names = append(names, v.Name)
		if v.Status != sandbox.VolumeReady {
			t.Errorf("volume %s is left %s", v.Name, v.Status)
		}
	}
	h.k.mu.Lock()
	defer h.k.mu.Unlock()
	if dirs := slices.Sorted(maps.Keys(h.k.volumes)); !slices.Equal(dirs, want) || !slices.Equal(names, want) {
		t.Errorf("rows %q, directories %q, want %q", names, dirs, want)
	}
}

func withMounts(mounts ...sandbox.VolumeMount) sandbox.Spec { return sandbox.Spec{Volumes: mounts} }

func TestVolumeLife(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	newVolume(t, h, "a")
	if v, err := h.Volume(t.Context(), "a"); err != nil || v.Owner != "uid:7" || v.Status != sandbox.VolumeReady || v.UsedBytes != 4096 || v.Uncounted {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := h.CreateVolume(t.Context(), sandbox.VolumeRequest{Name: "a"}); sandbox.CodeOf(err) != "volume_exists" {
		t.Errorf("again: %v", err)
	}
	size := int64(5 << 20)
	if v, err := h.ChangeVolume(t.Context(), "a", sandbox.VolumeChange{SizeBytes: &size}); err != nil || v.SizeBytes != size || h.k.volumes["a"].Bytes != size {
		t.Errorf("changed: %+v, %v", v, err)
	}
	sb := create(t, h, withMounts(sandbox.VolumeMount{Volume: "a", Path: "/x/y"}, sandbox.VolumeMount{Volume: "a", Path: "/x"}))
	if err := h.RemoveVolume(t.Context(), "a", ""); sandbox.CodeOf(err) != "volume_in_use" {
		t.Errorf("removed while used: %v", err)
	}
	if v, err := h.Volume(t.Context(), "a"); err != nil || !slices.Equal(v.UsedBy, []sandbox.ID{sb.ID}) {
		t.Errorf("used by %v, %v", v.UsedBy, err)
	}
	// Every root of the sandbox gets them, the outer one first.
	attached := func(when string) {
		t.Helper()
		h.k.mu.Lock()
		defer h.k.mu.Unlock()
		var paths []string
		for _, e := range h.k.configured[sb.ID].Root.Extra {
			paths = append(paths, e.Path)
		}
		if !slices.Equal(paths, []string{"/x", "/x/y"}) {
			t.Errorf("%s it has %q", when, paths)
		}
		delete(h.k.configured, sb.ID)
	}
	attached("created")
	if _, err := h.Reset(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	attached("reset")
	if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	attached("started")
	if _, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	if err := h.RemoveVolume(t.Context(), "a", ""); err != nil {
		t.Error(err)
	}
	if err := h.RemoveVolume(t.Context(), "a", ""); sandbox.CodeOf(err) != "volume_not_found" {
		t.Errorf("again: %v", err)
	}
	h.volumesAgree(t)
	h.agree(t)
}

// TestVolumeFromThePool mounts volumes in shells that stood ready.
func TestVolumeFromThePool(t *testing.T) {
	h := openPool(t, newKernel(t), t.TempDir(), 8, PoolConfig{Size: 1, CPUShare: 1})
	newVolume(t, h, "a")
	for deadline := time.Now().Add(10 * time.Second); h.Pool().Ready == 0; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no shell gets ready")
		}
	}
	sb := create(t, h, withMounts(sandbox.VolumeMount{Volume: "a", Path: "/x"}))
	h.k.mu.Lock()
	n := len(h.k.configured[sb.ID].Root.Extra)
	h.k.mu.Unlock()
	if n != 1 || h.Pool().Hits != 1 {
		t.Errorf("%d mounts, %+v", n, h.Pool())
	}
}

func TestVolumeStepsFail(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	k.setFail("volume.create", true)
	if _, err := h.CreateVolume(t.Context(), sandbox.VolumeRequest{Name: "a"}); !errors.Is(err, errInjected) {
		t.Fatalf("create: %v", err)
	}
	k.setFail("volume.create", false)
	h.volumesAgree(t)
	newVolume(t, h, "a")
	k.setFail("volume.mount", true)
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: withMounts(sandbox.VolumeMount{Volume: "a", Path: "/x"})}); !errors.Is(err, errInjected) {
		t.Fatalf("mount: %v", err)
	}
	k.setFail("volume.mount", false)
	h.agree(t)
	// A change that the kernel did not hear of is made up for.
	k.setFail("volume.limit", true)
	size := int64(7 << 20)
	if _, err := h.ChangeVolume(t.Context(), "a", sandbox.VolumeChange{SizeBytes: &size}); !errors.Is(err, errInjected) {
		t.Fatalf("change: %v", err)
	}
	k.setFail("volume.limit", false)
	h.crash()
	h = open(t, k, dir)
	if k.volumes["a"].Bytes != size {
		t.Errorf("limits after a restart %+v", k.volumes["a"])
	}
	// A removal that fails is seen, bars new users, and can be repeated.
	k.setFail("volume.discard", true)
	if err := h.RemoveVolume(t.Context(), "a", ""); sandbox.CodeOf(err) != "removal_incomplete" {
		t.Fatalf("remove: %v", err)
	}
	if v, err := h.Volume(t.Context(), "a"); err != nil || v.Status != sandbox.VolumeRemoving {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: withMounts(sandbox.VolumeMount{Volume: "a", Path: "/x"})}); sandbox.CodeOf(err) != "volume_not_found" {
		t.Errorf("create with it: %v", err)
	}
	if _, err := h.ChangeVolume(t.Context(), "a", sandbox.VolumeChange{SizeBytes: &size}); sandbox.CodeOf(err) != "volume_not_ready" {
		t.Errorf("change it: %v", err)
	}
	k.setFail("volume.discard", false)
	if err := h.RemoveVolume(t.Context(), "a", ""); err != nil {
		t.Error(err)
	}
	h.volumesAgree(t)
}

// TestVolumeCrashes ends the daemon between any two steps: after the restart
// there is a whole volume, or nothing of it.
func TestVolumeCrashes(t *testing.T) {
	for name, tc := range map[string]struct {
		row  sandbox.VolumeStatus // none: no row
		dir  bool
		want []string
	}{
		"row, then crash":          {sandbox.VolumeCreating, false, nil},
		"row, directory":           {sandbox.VolumeCreating, true, nil},
		"ready":                    {sandbox.VolumeReady, true, []string{"v"}},
		"removing":                 {sandbox.VolumeRemoving, true, nil},
		"removing, directory gone": {sandbox.VolumeRemoving, false, nil},
		"row lost":                 {"", true, []string{"v"}},
		"nothing, as the control":  {"", false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			k, dir := newKernel(t), t.TempDir()
			h := open(t, k, dir)
			if tc.row != "" {
				if err := h.db.AddVolume(t.Context(), sandbox.Volume{Name: "v", Status: tc.row, CreatedAt: time.Now()}); err != nil {
					t.Fatal(err)
				}
			}
			h.crash()
			if tc.dir {
				k.volumes["v"] = rootfs.VolumeLimits{Bytes: 9 << 20}
			}
			for range 2 { // a second recovery changes nothing
				h = open(t, k, dir)
				h.volumesAgree(t, tc.want...)
				h.crash()
			}
		})
	}
}

// TestVolumeFilesLost keeps the row of a volume whose directory is gone: it is
// somebody's to put back or remove.
func TestVolumeFilesLost(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	newVolume(t, h, "v")
	h.crash()
	delete(k.volumes, "v")
	h = open(t, k, dir)
	v, err := h.Volume(t.Context(), "v")
	if err != nil || !v.Uncounted || v.Status != sandbox.VolumeReady {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: withMounts(sandbox.VolumeMount{Volume: "v", Path: "/x"})}); sandbox.CodeOf(err) != "volume_gone" {
		t.Errorf("mounting it: %v", err)
	}
	if err := h.RemoveVolume(t.Context(), "v", ""); err != nil {
		t.Error(err)
	}
	h.volumesAgree(t)
}

// TestBindNeedsRoot asks for a directory of the host as several callers.
func TestBindNeedsRoot(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	spec := withMounts(sandbox.VolumeMount{HostPath: "/srv/x", Path: "/x"})
	for _, actor := range []string{"", "uid:1000", "uid:", "uid:00", "addr:127.0.0.1:1", "daemon", "unknown"} {
		if _, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: spec, Actor: actor}); sandbox.CodeOf(err) != "bind_denied" || !errors.Is(err, sandbox.ErrForbidden) {
			t.Errorf("as %q: %v", actor, err)
		}
	}
	sb := create(t, h, spec) // as uid:0
	// What root made, others may start again; a fork is a new sandbox.
	if _, err := h.Stop(t.Context(), string(sb.ID), "uid:1000"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Start(t.Context(), string(sb.ID), "uid:1000"); err != nil {
		t.Error(err)
	}
	for actor, code := range map[string]string{"uid:1000": "bind_denied", "uid:0": ""} {
		out, err := h.Fork(t.Context(), string(sb.ID), sandbox.ForkRequest{Actor: actor})
		if code == "" && (err != nil || out[0].Sandbox == nil) || code != "" && sandbox.CodeOf(err) != code {
			t.Errorf("fork as %s: %+v, %v", actor, out, err)
		}
	}
	h.k.setFail("bind.check", true)
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: spec, Actor: "uid:0"}); !errors.Is(err, errInjected) {
		t.Errorf("a directory the roots refuse: %v", err)
	}
	h.agree(t)
}

func TestAttachOrder(t *testing.T) {
	in := []sandbox.VolumeMount{{Path: "/b/c/d"}, {Path: "/b"}, {Path: "/a-b/c"}, {Path: "/a"}, {Path: "/b/c"}}
	var got []string
	for _, m := range attachOrder(in) {
		got = append(got, m.Path)
	}
	if want := []string{"/a", "/b", "/a-b/c", "/b/c", "/b/c/d"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if in[0].Path != "/b/c/d" {
		t.Error("the spec's own order was changed")
	}
}
