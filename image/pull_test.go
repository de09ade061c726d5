package image

import (
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestPull(t *testing.T) {
	g := newRegistry(t)
	m := makeImage(t, 4, 50_000)
	digest := g.put("team/app", "1", m)
	s, v := library(t, nil)
	var steps []sandbox.ImageProgress
	img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.host() + "/team/app:1"}, func(p sandbox.ImageProgress) { steps = append(steps, p) })
	if err != nil {
		t.Fatal(err)
	}
	if img.Digest != digest || img.Name != g.host()+"/team/app:1" || img.Kind != sandbox.ImageOCI || img.Platform != "linux/amd64" || !slices.Equal(img.Layers, m.diffIDs) {
		t.Errorf("%+v", img)
	}
	want := sandbox.ImageConfig{
		Env: []string{"A=1", "PATH=/bin"}, User: "65534", WorkDir: "/srv", Entrypoint: []string{"/bin/x"}, Cmd: []string{"y"},
		StopSignal: "SIGINT", ExposedPorts: []string{"80/tcp"}, Labels: map[string]string{"l": "v"}, History: []sandbox.ImageHistory{{CreatedBy: "made"}},
	}
	if diff := cmp.Diff(want, img.Config); diff != "" {
		t.Error(diff)
	}
	if len(v.layers) != 4 || len(left(t, s, partialDir)) != 0 {
		t.Errorf("%d layers, partial %v", len(v.layers), left(t, s, partialDir))
	}
	for _, d := range m.layers {
		if !slices.ContainsFunc(steps, func(p sandbox.ImageProgress) bool { return p.Layer == d.Digest && p.Status == sandbox.StepDone }) {
			t.Errorf("no word that %s is done", d.Digest)
		}
	}
	// Once more, under another name and by digest: nothing is fetched but
	// manifest and configuration.
	before := len(g.seen("/blobs/"))
	again, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.host() + "/team/app@" + digest, Name: "local"}, nil)
	if err != nil || again.Digest != digest || again.Name != "local" {
		t.Fatalf("%+v %v", again, err)
	}
	if n := len(g.seen("/blobs/")) - before; n != 1 {
		t.Errorf("%d blobs were fetched again", n)
	}
}

func TestPullConcurrently(t *testing.T) {
	g := newRegistry(t)
	g.put("app", "latest", makeImage(t, 6, 20_000))
	s, v := library(t, nil)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.host() + "/app"}, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if v.imports != 6 || len(s.locks) != 0 {
		t.Errorf("%d layers were unpacked, want 6; %d locks are left", v.imports, len(s.locks))
	}
}

func TestPullIndex(t *testing.T) {
	g := newRegistry(t)
	amd, arm := makeImage(t, 1, 100), makeImage(t, 2, 100)
	arm.seal(t, func(cfg, _ map[string]any) { cfg["architecture"], cfg["variant"] = "arm64", "v8" })
	g.put("app", "amd", amd)
	g.put("app", "arm", arm)
	index := mustJSON(t, map[string]any{"schemaVersion": 2, "mediaType": typeDockerList, "manifests": []descriptor{
		{MediaType: typeOCIManifest, Digest: digestOf(arm.manifest), Size: int64(len(arm.manifest)), Platform: &platform{"linux", "arm64", "v8"}},
		{MediaType: typeOCIManifest, Digest: digestOf(amd.manifest), Size: int64(len(amd.manifest)), Platform: &platform{"unknown", "unknown", ""}},
		{MediaType: typeOCIManifest, Digest: digestOf(amd.manifest), Size: int64(len(amd.manifest)), Platform: &platform{"linux", "amd64", ""}},
	}})
	g.name("app", "many", index, typeDockerList)
	s, _ := library(t, nil)
	for platform, want := range map[string]string{"": digestOf(amd.manifest), "linux/amd64": digestOf(amd.manifest), "linux/arm64": digestOf(arm.manifest), "linux/arm64/v8": digestOf(arm.manifest)} {
		img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.host() + "/app:many", Platform: platform}, nil)
		if err != nil || img.Digest != want || img.IndexDigest != digestOf(index) {
			t.Errorf("%q: %s of index %s, %v", platform, img.Digest, img.IndexDigest, err)
		}
	}
	for platform, ref := range map[string]string{"linux/s390x": "many", "windows/amd64": "many", "linux/arm64/v9": "amd"} {
		if _, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.host() + "/app:" + ref, Platform: platform}, nil); sandbox.CodeOf(err) != "image_no_platform" {
			t.Errorf("%s of %s: %v", platform, ref, err)
		} else if ref == "many" && !strings.Contains(err.Error(), "linux/arm64/v8") {
			t.Errorf("the error does not say what there is: %v", err)
		}
	}
}

func TestPushKeepsTheDigest(t *testing.T) {
	g := newRegistry(t)
	m := makeImage(t, 3, 30_000)
	digest := g.put("team/app", "1", m)
	s, _ := library(t, nil)
	img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.host() + "/team/app:1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	src := sandbox.ImageSource{Image: img, Layers: img.Layers}
	out, err := s.Push(t.Context(), src, sandbox.PushRequest{Reference: g.host() + "/other/name:2"}, nil)
	if err != nil || out.Digest != digest || out.Uploaded != 0 || out.Rebuilt != 0 {
		t.Errorf("same registry: %+v %v", out, err)
	}
	// The control: another registry has nothing, so the layers are made anew.
	h := newRegistry(t)
	out, err = s.Push(t.Context(), src, sandbox.PushRequest{Reference: h.host() + "/app:2"}, nil)
	if err != nil || out.Digest == digest || out.Rebuilt != 3 || out.Uploaded != out.Size || out.Size == 0 {
		t.Errorf("another registry: %+v %v", out, err)
	}
	first := out.Digest
	if out, err = s.Push(t.Context(), src, sandbox.PushRequest{Reference: h.host() + "/app:3"}, nil); err != nil || out.Digest != first || out.Uploaded != 0 {
		t.Errorf("there again: %+v %v", out, err)
	}
	if out, err = s.Push(t.Context(), src, sandbox.PushRequest{Reference: g.host() + "/third:1"}, nil); err != nil || out.Digest != digest || out.Uploaded != 0 {
		t.Errorf("the first registry again: %+v %v", out, err)
	}
	// What went out comes in again.
	s2, v2 := library(t, nil)
	back, err := s2.Pull(t.Context(), sandbox.PullRequest{Reference: h.host() + "/app:3"}, nil)
	if err != nil || len(v2.layers) != 3 {
		t.Fatalf("%+v %v", back, err)
	}
	if diff := cmp.Diff(img.Config.Entrypoint, back.Config.Entrypoint); diff != "" || len(back.Config.History) != 3 {
		t.Errorf("%s %+v", diff, back.Config.History)
	}
	if n := len(left(t, s, spoolDir)); n != 0 {
		t.Errorf("%d spools are left", n)
	}
}
