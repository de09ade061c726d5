package image

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/image/imagetest"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestPull(t *testing.T) {
	g := imagetest.Start(t)
	m := imagetest.New(1, 4, 50_000)
	digest := g.Put("team/app", "1", m)
	s, v := library(t, nil)
	var steps []sandbox.ImageProgress
	img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/team/app:1"}, func(p sandbox.ImageProgress) { steps = append(steps, p) })
	if err != nil {
		t.Fatal(err)
	}
	if img.Digest != digest || img.Name != g.Host()+"/team/app:1" || img.Kind != sandbox.ImageOCI || img.Platform != "linux/amd64" || !slices.Equal(img.Layers, m.DiffIDs) {
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
	for _, d := range m.Layers {
		if !slices.ContainsFunc(steps, func(p sandbox.ImageProgress) bool { return p.Layer == d.Digest && p.Status == sandbox.StepDone }) {
			t.Errorf("no word that %s is done", d.Digest)
		}
	}
	// Once more, under another name and by digest: nothing is fetched but
	// manifest and configuration.
	before := len(g.Seen("/blobs/"))
	again, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/team/app@" + digest, Name: "local"}, nil)
	if err != nil || again.Digest != digest || again.Name != "local" {
		t.Fatalf("%+v %v", again, err)
	}
	if n := len(g.Seen("/blobs/")) - before; n != 1 {
		t.Errorf("%d blobs were fetched again", n)
	}
}

func TestPullConcurrently(t *testing.T) {
	g := imagetest.Start(t)
	g.Put("app", "latest", imagetest.New(1, 6, 20_000))
	s, v := library(t, nil)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/app"}, nil); err != nil {
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
	g := imagetest.Start(t)
	amd, arm := imagetest.New(1, 1, 100), imagetest.New(2, 2, 100)
	arm.Seal(func(cfg, _ map[string]any) { cfg["architecture"], cfg["variant"] = "arm64", "v8" })
	g.Put("app", "amd", amd)
	g.Put("app", "arm", arm)
	unknown := amd.Descriptor("unknown", "unknown", "")
	index := imagetest.JSON(map[string]any{"schemaVersion": 2, "mediaType": typeDockerList, "manifests": []imagetest.Descriptor{
		arm.Descriptor("linux", "arm64", "v8"), unknown, amd.Descriptor("linux", "amd64", ""),
	}})
	g.PutManifest("app", "many", typeDockerList, index)
	s, _ := library(t, nil)
	for platform, want := range map[string]string{"": amd.Digest(), "linux/amd64": amd.Digest(), "linux/arm64": arm.Digest(), "linux/arm64/v8": arm.Digest()} {
		img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/app:many", Platform: platform}, nil)
		if err != nil || img.Digest != want || img.IndexDigest != digestOf(index) {
			t.Errorf("%q: %s of index %s, %v", platform, img.Digest, img.IndexDigest, err)
		}
	}
	for platform, ref := range map[string]string{"linux/s390x": "many", "windows/amd64": "many", "linux/arm64/v9": "amd"} {
		if _, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/app:" + ref, Platform: platform}, nil); sandbox.CodeOf(err) != "image_no_platform" {
			t.Errorf("%s of %s: %v", platform, ref, err)
		} else if ref == "many" && !strings.Contains(err.Error(), "linux/arm64/v8") {
			t.Errorf("the error does not say what there is: %v", err)
		}
	}
}

// TestRepeatedLayers has a layer twice, as images converted from old ones do,
// in Docker's own manifest: it is stacked once, where it comes last.
func TestRepeatedLayers(t *testing.T) {
	g := imagetest.Start(t)
	m := imagetest.New(1, 2, 1000)
	m.Kind = imagetest.DockerManifest
	for i := range m.Layers {
		m.Layers[i].MediaType = typeDockerLayer + ".gzip"
	}
	m.Layers, m.DiffIDs = append(m.Layers, m.Layers[0]), append(m.DiffIDs, m.DiffIDs[0])
	digest := g.Put("app", "1", m.Seal(nil))
	s, v := library(t, nil)
	img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/app:1"}, nil)
	if err != nil || !slices.Equal(img.Layers, []string{m.DiffIDs[1], m.DiffIDs[0]}) || v.imports != 2 || img.Digest != digest {
		t.Fatalf("%+v %v after %d imports", img, err, v.imports)
	}
	src := sandbox.ImageSource{Image: img, Layers: img.Layers}
	if out, err := s.Push(t.Context(), src, sandbox.PushRequest{Reference: g.Host() + "/app:2"}, nil); err != nil || out.Digest != digest {
		t.Errorf("%+v %v", out, err)
	}
	if got := g.Manifest("app", "2"); !slices.Equal(got, m.Manifest) {
		t.Errorf("the registry has %s", got)
	}
	h := imagetest.Start(t)
	if _, err := s.Push(t.Context(), src, sandbox.PushRequest{Reference: h.Host() + "/app:2"}, nil); err != nil {
		t.Fatal(err)
	}
	s2, _ := library(t, nil)
	back, err := s2.Pull(t.Context(), sandbox.PullRequest{Reference: h.Host() + "/app:2"}, nil)
	if err != nil || len(back.Layers) != 2 || len(back.Config.History) != 2 {
		t.Errorf("%+v %v", back, err)
	}
}

// TestPushThatFails meets registries that are in trouble while they take.
func TestPushThatFails(t *testing.T) {
	from := imagetest.Start(t)
	from.Put("app", "1", imagetest.New(1, 2, 50_000))
	s, _ := library(t, nil)
	img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: from.Host() + "/app:1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		meddle func(n int, w http.ResponseWriter, r *http.Request) bool
		code   string
	}{
		"no trouble": {func(int, http.ResponseWriter, *http.Request) bool { return false }, ""},
		"500 at first": {func(n int, w http.ResponseWriter, _ *http.Request) bool {
			if n > 3 {
				return false
			}
			w.WriteHeader(http.StatusInternalServerError)
			return true
		}, ""},
		"breaks off uploads at first": {func(n int, _ http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPut && n < 12 {
				_, _ = io.CopyN(io.Discard, r.Body, 1000)
				panic(http.ErrAbortHandler)
			}
			return false
		}, ""},
		"takes nothing": {func(_ int, w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPost {
				w.WriteHeader(http.StatusForbidden)
			}
			return r.Method == http.MethodPost
		}, "image_unauthorized"},
		"says nothing of where to": {func(_ int, w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPost {
				w.WriteHeader(http.StatusAccepted)
			}
			return r.Method == http.MethodPost
		}, "registry_refused"},
		"takes a manifest for another": {func(_ int, w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPut || !strings.Contains(r.URL.Path, "/manifests/") {
				return false
			}
			w.Header().Set("Docker-Content-Digest", imagetest.DigestOf(nil))
			w.WriteHeader(http.StatusCreated)
			return true
		}, "image_digest_mismatch"},
	} {
		to := imagetest.Start(t)
		var n atomic.Int32
		to.Meddle(func(w http.ResponseWriter, r *http.Request) bool { return tc.meddle(int(n.Add(1)), w, r) })
		out, err := s.Push(t.Context(), sandbox.ImageSource{Image: img, Layers: img.Layers}, sandbox.PushRequest{Reference: to.Host() + "/x:1"}, nil)
		if sandbox.CodeOf(err) != tc.code && (err != nil || tc.code != "") {
			t.Errorf("%s: %+v %v", name, out, err)
		}
		if err == nil && imagetest.DigestOf(to.Manifest("x", "1")) != out.Digest {
			t.Errorf("%s: the registry has %s, not %s", name, to.Manifest("x", "1"), out.Digest)
		}
		if len(left(t, s, spoolDir)) != 0 {
			t.Errorf("%s: spools are left", name)
		}
	}
}

func TestPushKeepsTheDigest(t *testing.T) {
	g := imagetest.Start(t)
	m := imagetest.New(1, 3, 30_000)
	digest := g.Put("team/app", "1", m)
	s, _ := library(t, nil)
	img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/team/app:1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	src := sandbox.ImageSource{Image: img, Layers: img.Layers}
	out, err := s.Push(t.Context(), src, sandbox.PushRequest{Reference: g.Host() + "/other/name:2"}, nil)
	if err != nil || out.Digest != digest || out.Uploaded != 0 || out.Rebuilt != 0 {
		t.Errorf("same registry: %+v %v", out, err)
	}
	// The control: another registry has nothing, so the layers are made anew.
	h := imagetest.Start(t)
	out, err = s.Push(t.Context(), src, sandbox.PushRequest{Reference: h.Host() + "/app:2"}, nil)
	if err != nil || out.Digest == digest || out.Rebuilt != 3 || out.Uploaded != out.Size || out.Size == 0 {
		t.Errorf("another registry: %+v %v", out, err)
	}
	first := out.Digest
	if out, err = s.Push(t.Context(), src, sandbox.PushRequest{Reference: h.Host() + "/app:3"}, nil); err != nil || out.Digest != first || out.Uploaded != 0 {
		t.Errorf("there again: %+v %v", out, err)
	}
	if out, err = s.Push(t.Context(), src, sandbox.PushRequest{Reference: g.Host() + "/third:1"}, nil); err != nil || out.Digest != digest || out.Uploaded != 0 {
		t.Errorf("the first registry again: %+v %v", out, err)
	}
	// What went out comes in again.
	s2, v2 := library(t, nil)
	back, err := s2.Pull(t.Context(), sandbox.PullRequest{Reference: h.Host() + "/app:3"}, nil)
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
