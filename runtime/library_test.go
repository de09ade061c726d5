package runtime

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// fakeLibrary has every image of registry.test, each of one layer.
type fakeLibrary struct {
	err error
	src sandbox.ImageSource

	mu   sync.Mutex
	kept []string // names Keep was last called with
}

func (f *fakeLibrary) Pull(ctx context.Context, req sandbox.PullRequest, report func(sandbox.ImageProgress)) (sandbox.Image, error) {
	ref, err := sandbox.ParseImageRef(req.Reference)
	if err = errors.Join(err, f.err); err != nil {
		return sandbox.Image{}, err
	}
	if report != nil {
		report(sandbox.ImageProgress{Status: sandbox.StepDone})
	}
	sandbox.HoldLayers(ctx, "layer of "+ref.String())
	sandbox.HoldAll(ctx)
	sum := "sha256:" + strings.Repeat("ab", 32)
	return sandbox.Image{
		Name: first(req.Name, ref.String()), Reference: ref.String(), Digest: sum, IndexDigest: "sha256:" + strings.Repeat("cd", 32), Kind: sandbox.ImageOCI,
		Layers: []string{"layer of " + ref.String()}, CreatedAt: time.Now(), Config: sandbox.ImageConfig{Entrypoint: []string{"e"}, Labels: map[string]string{"l": "v"}},
	}, nil
}

func (f *fakeLibrary) Push(_ context.Context, src sandbox.ImageSource, req sandbox.PushRequest, _ func(sandbox.ImageProgress)) (sandbox.Pushed, error) {
	f.src = src
	return sandbox.Pushed{Reference: req.Reference, Digest: "d"}, f.err
}

func (f *fakeLibrary) Import(context.Context, sandbox.ImportRequest, io.Reader) (sandbox.Image, error) {
	return sandbox.Image{}, f.err
}

func (f *fakeLibrary) Export(_ context.Context, src sandbox.ImageSource, _ sandbox.ExportRequest, w io.Writer) error {
	f.src = src
	_, err := io.WriteString(w, "arch")
	if err == nil {
		_, err = io.WriteString(w, "ive") // when the reader has had the first part
	}
	return errors.Join(err, f.err)
}

func (f *fakeLibrary) Keep(images []sandbox.Image, _ []string) error {
	var names []string
	for _, i := range images {
		names = append(names, i.Name)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kept = names
	return nil
}

func (f *fakeLibrary) lastKept() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kept
}

// openWithLibrary opens a house that can pull.
func openWithLibrary(t *testing.T) (*house, *fakeLibrary) {
	t.Helper()
	h := open(t, newKernel(t), t.TempDir())
	f := &fakeLibrary{}
	h.cfg.Library = f
	return h, f
}

func pulled(t *testing.T, h *house, ref string) sandbox.Image {
	t.Helper()
	img, err := h.PullImage(t.Context(), sandbox.PullRequest{Reference: ref}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func TestImageNames(t *testing.T) {
	h, _ := openWithLibrary(t)
	alpine := pulled(t, h, "alpine:3")
	latest := pulled(t, h, "registry.test/app")
	for name, want := range map[string]sandbox.Image{
		"docker.io/library/alpine:3": alpine, "alpine:3": alpine, "library/alpine:3": alpine, "docker.io/alpine:3": alpine,
		"registry.test/app": latest, "registry.test/app:latest": latest,
		"alpine@" + alpine.Digest: alpine, "alpine@" + alpine.IndexDigest: alpine, "registry.test/app@" + latest.Digest: latest,
	} {
		if img, err := h.Image(t.Context(), name); err != nil || img.Name != want.Name {
			t.Errorf("%s: %s %v", name, img.Name, err)
		}
	}
	for _, name := range []string{"alpine", "alpine:4", "app", "registry.test/app:1", "other@" + alpine.Digest, "registry.test/app@sha256:" + strings.Repeat("00", 32)} {
		if img, err := h.Image(t.Context(), name); sandbox.CodeOf(err) != "image_not_found" || !strings.Contains(err.Error(), "image pull") {
			t.Errorf("%s: %s %v", name, img.Name, err)
		}
	}
	// A local name goes before what docker would make of it.
	local, err := h.TagImage(t.Context(), "registry.test/app", "alpine:3", "uid:0")
	if err != nil || local.Name != "alpine:3" {
		t.Fatal(err)
	}
	if img, err := h.Image(t.Context(), "alpine:3"); err != nil || img.Reference != latest.Reference {
		t.Errorf("%+v %v", img, err)
	}
	sb, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Image: "docker.io/alpine:3"}, Actor: "uid:0"})
	if err != nil || sb.Spec.Image != alpine.Name {
		t.Errorf("%s %v", sb.Spec.Image, err)
	}
	if err := h.RemoveImage(t.Context(), "docker.io/alpine:3"); sandbox.CodeOf(err) != "image_in_use" {
		t.Errorf("removed under a sandbox: %v", err)
	}
	if img, err := h.db.ImageOf(t.Context(), sb.ID); err != nil || img.Config.Labels != nil || !slices.Equal(img.Config.Entrypoint, []string{"e"}) {
		t.Errorf("kept with the sandbox: %+v %v", img.Config, err)
	}
}

func TestPullRefuses(t *testing.T) {
	h, f := openWithLibrary(t)
	for name, req := range map[string]sandbox.PullRequest{
		"no name":     {},
		"a bad name":  {Reference: "A"},
		"reserved":    {Reference: "alpine", Name: "host"},
		"no platform": {Reference: "alpine", Platform: "x"},
	} {
		if _, err := h.PullImage(t.Context(), req, nil); sandbox.ClassOf(err) == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	f.err = sandbox.Errorf(sandbox.ErrUnavailable, "registry_unreachable", "no")
	if _, err := h.PullImage(t.Context(), sandbox.PullRequest{Reference: "alpine"}, nil); sandbox.CodeOf(err) != "registry_unreachable" {
		t.Error(err)
	}
	if all, err := h.Images(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("%+v %v", all, err)
	}
	h.cfg.Library = nil
	if _, err := h.PullImage(t.Context(), sandbox.PullRequest{Reference: "alpine"}, nil); sandbox.CodeOf(err) != "no_library" {
		t.Error(err)
	}
}

func TestPruneImages(t *testing.T) {
	h, f := openWithLibrary(t)
	pulled(t, h, "unused")
	used, snapped := pulled(t, h, "used"), pulled(t, h, "snapped")
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Image: used.Name}, Actor: "uid:0"}); err != nil {
		t.Fatal(err)
	}
	sb, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Image: snapped.Name}, Actor: "uid:0"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Snapshot(t.Context(), string(sb.ID), sandbox.SnapshotRequest{Kind: sandbox.SnapshotManual, Actor: "uid:0"}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Remove(t.Context(), string(sb.ID), "uid:0"); err != nil {
		t.Fatal(err)
	}
	if err := h.db.PutImage(t.Context(), sandbox.Image{Name: "imported", Kind: sandbox.ImageTar, Layers: []string{"x"}, CreatedAt: time.Now().Add(-time.Hour)}); err != nil {
		t.Fatal(err)
	}
	// Built on the host's files: an image like others, unlike the host's own.
	if err := h.db.PutImage(t.Context(), sandbox.Image{Name: "built", Kind: sandbox.ImageHost, Layers: []string{"y"}, CreatedAt: time.Now().Add(-3 * time.Hour)}); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		req  sandbox.PruneRequest
		want []string
	}{
		{sandbox.PruneRequest{Until: 600}, []string{}},
		{sandbox.PruneRequest{}, []string{"docker.io/library/unused:latest"}},
		{sandbox.PruneRequest{}, []string{}},
		{sandbox.PruneRequest{All: true, Until: 14400}, []string{}},
		{sandbox.PruneRequest{All: true, Until: 7200}, []string{"built"}},
		{sandbox.PruneRequest{All: true, Until: 600}, []string{"imported"}},
	} {
		out, err := h.PruneImages(t.Context(), tc.req, "uid:0")
		if err != nil || !slices.Equal(out.Images, tc.want) || (out.FreedBytes > 0) != (len(tc.want) > 0) {
			t.Errorf("%+v: %+v %v, want %v", tc.req, out, err, tc.want)
		}
	}
	if !testenv.Within(10*time.Second, func() bool {
		names := f.lastKept()
		return slices.Equal(names, []string{snapped.Name, used.Name, "host"})
	}) {
		t.Errorf("what is kept beside is of %v", f.lastKept())
	}
}

func TestImageSources(t *testing.T) {
	h, f := openWithLibrary(t)
	img := pulled(t, h, "app")
	sb, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Image: "app"}, Actor: "uid:0"})
	if err != nil {
		t.Fatal(err)
	}
	snap, err := h.Snapshot(t.Context(), string(sb.ID), sandbox.SnapshotRequest{Kind: sandbox.SnapshotManual, Actor: "uid:0"})
	if err != nil {
		t.Fatal(err)
	}
	for source, layers := range map[string]int{"app": 1, string(snap.ID): len(snap.Layers)} {
		out, err := h.PushImage(t.Context(), sandbox.PushRequest{Source: source, Reference: "registry.test/x"}, nil)
		if err != nil || out.Digest != "d" || len(f.src.Layers) != layers || f.src.Image.Digest != img.Digest {
			t.Errorf("%s: %+v %v of %+v", source, out, err, f.src)
		}
	}
	if _, err := h.PushImage(t.Context(), sandbox.PushRequest{Source: string(snap.ID)}, nil); sandbox.CodeOf(err) != "reference_missing" {
		t.Errorf("a snapshot in place of its image: %v", err)
	}
	if out, err := h.PushImage(t.Context(), sandbox.PushRequest{Source: "app"}, nil); err != nil || out.Reference != img.Name {
		t.Errorf("an image under its own name: %+v %v", out, err)
	}
	before, err := h.Snapshots(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	r, err := h.ExportImage(t.Context(), sandbox.ExportRequest{Source: string(sb.ID)})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || string(b) != "archive" || len(f.src.Layers) < 2 {
		t.Errorf("%q %v of %+v", b, err, f.src)
	}
	if !testenv.Within(10*time.Second, func() bool {
		now, err := h.Snapshots(t.Context(), "")
		return err == nil && len(now) == len(before)
	}) {
		t.Error("the snapshot an export was made of stays")
	}
	for source, code := range map[string]string{"host": "image_unsupported", "absent": "image_not_found", "sbaaaaaaaaaaaa": "", "snaaaaaaaaaaaa": ""} {
		if _, err := h.PushImage(t.Context(), sandbox.PushRequest{Source: source, Reference: "registry.test/x"}, nil); err == nil || code != "" && sandbox.CodeOf(err) != code || sandbox.ClassOf(err) == nil {
			t.Errorf("%s: %v", source, err)
		}
	}
	f.err = errors.New("broken")
	if r, err = h.ExportImage(t.Context(), sandbox.ExportRequest{Source: "app"}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r); err == nil {
		t.Error("an export that failed ended like a whole one")
	}
}
