package runtime

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/build"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestBuildWords: package build, which runtime must not import, uses the same.
func TestBuildWords(t *testing.T) {
	if labelBuild != build.LabelBuild || buildActor != build.ActorPrefix {
		t.Errorf("%q %q, and package build has %q %q", labelBuild, buildActor, build.LabelBuild, build.ActorPrefix)
	}
}

// ground is what the builds here begin with.
var ground = sandbox.Image{Kind: sandbox.ImageTar, Layers: []string{"sha256:ground"}}

// step makes a sandbox of a build.
func step(t *testing.T, h *house, base sandbox.Image) sandbox.Sandbox {
	t.Helper()
	sb, err := h.CreateOn(t.Context(), sandbox.CreateRequest{
		Spec: sandbox.Spec{Labels: map[string]string{labelBuild: "b"}}, Actor: buildActor + "uid:0",
	}, base)
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// noSnapshots waits until there is none: they go after their sandbox.
func (h *house) noSnapshots(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; <-time.After(2 * time.Millisecond) {
		snaps, err := h.Snapshots(t.Context(), "")
		if err == nil && len(snaps) == 0 {
			return
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("snapshots are left: %v, %v", snaps, err)
		}
	}
}

// TestBuildStepKeepsItsLayers goes the way of a build: a step on an image, a
// step on that, and each layer as long as something needs it.
func TestBuildStepKeepsItsLayers(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	base := ground
	var err error
	ctx, release := h.HoldLayers(t.Context())
	var made []sandbox.Image
	for i := range 2 {
		sb := step(t, h, base)
		if base, err = h.FreezeStep(ctx, string(sb.ID), base); err != nil {
			t.Fatal(err)
		}
		if len(base.Layers) != i+2 || base.Name != "" {
			t.Errorf("step %d made %v", i, base)
		}
		if err := h.PutBuildStep(t.Context(), fmt.Sprint(i), base); err != nil {
			t.Fatal(err)
		}
		if _, err := h.Remove(t.Context(), string(sb.ID), "test"); err != nil {
			t.Fatal(err)
		}
		made = append(made, base)
	}
	release()
	release() // as often as one likes
	for i, m := range made {
		if got, err := h.BuildStep(t.Context(), fmt.Sprint(i)); err != nil || !slices.Equal(got.Layers, m.Layers) {
			t.Errorf("step %d is remembered as %v, %v; it made %v", i, got.Layers, err, m.Layers)
		}
	}
	h.noSnapshots(t)
	h.layersAgree(t)
	img := made[1]
	img.Name, img.Digest = "built", "sha256:x"
	if err := h.PutBuilt(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	if sb := create(t, h, sandbox.Spec{Image: "built"}); !slices.Equal(h.root(t, sb.ID).Stack, img.Layers) {
		t.Errorf("a sandbox of the image stands on %v", h.root(t, sb.ID).Stack)
	}
	img.Name = HostImage
	if err := h.PutBuilt(t.Context(), img); sandbox.CodeOf(err) != "image_reserved" {
		t.Errorf("an image called host: %v", err)
	}
	// What a build has read is not collected while it is held, and all of it afterwards.
	ctx, release = h.HoldLayers(t.Context())
	if _, err := h.BuildStep(ctx, "1"); err != nil {
		t.Fatal(err)
	}
	gone, err := h.PruneBuildCache(t.Context(), sandbox.BuildCachePrune{})
	if err != nil || gone.Steps != 2 {
		t.Errorf("%d steps forgotten, %v", gone.Steps, err)
	}
	if have, _ := (fakeRoots{h.k}).Layers(); !slices.Contains(have, made[1].Layers[2]) {
		t.Error("a layer that was held is gone")
	}
	release()
	h.layersAgree(t)
}

// TestBuildKilledAnywhere kills the daemon around every step of freezing what
// a build step wrote: afterwards no sandbox of the build is there, no snapshot,
// and no layer that nothing needs. What belongs to others stays.
func TestBuildKilledAnywhere(t *testing.T) {
	for _, at := range []string{"guest.stop", "rootfs.freeze", "rootfs.upper", "rootfs.sync"} {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/after=%v", at, after), func(t *testing.T) {
				k, dir := newKernel(t), t.TempDir()
				h := open(t, k, dir)
				base := ground
				other := create(t, h, sandbox.Spec{Name: "dev", Labels: map[string]string{labelBuild: "mine"}})
				sb := step(t, h, base)
				if at == "guest.stop" { // while the command runs
					h.crash()
				} else {
					k.killAt(at, after)
					killed := h
					go func() { _, _ = killed.FreezeStep(t.Context(), string(sb.ID), base) }()
					k.waitDead(t, at)
					h.crash()
					k.revive()
				}
				h = open(t, k, dir)
				for deadline := time.Now().Add(5 * time.Second); !h.get(t, sb.ID).Status.Terminal(); <-time.After(2 * time.Millisecond) {
					if time.Now().After(deadline) {
						t.Fatalf("the sandbox of the build is %s", h.get(t, sb.ID).Status)
					}
				}
				if got := h.get(t, other.ID); got.Status != sandbox.StatusRunning {
					t.Errorf("another sandbox with the label is %s", got.Status)
				}
				h.noSnapshots(t)
				if _, err := h.BuildStep(t.Context(), "0"); !errors.Is(err, sandbox.ErrNotFound) {
					t.Errorf("a step nobody remembered: %v", err)
				}
				h.agree(t)
				h.layersAgree(t)
			})
		}
	}
}
