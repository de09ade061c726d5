package image

import (
	"archive/tar"
	"bytes"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/image/imagetest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// file is one entry of an archive.
type file struct {
	name, body string
	link       string // a symbolic one
}

func pack(files ...file) []byte {
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.body)), Typeflag: tar.TypeReg}
		switch {
		case f.link != "":
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.link
		case strings.HasSuffix(f.name, "/"):
			h.Typeflag = tar.TypeDir
		}
		_ = tw.WriteHeader(h) // into memory
		_, _ = io.WriteString(tw, f.body)
	}
	_ = tw.Close()
	return b.Bytes()
}

// ociFiles is an image as the files of an OCI layout.
func ociFiles(m *imagetest.Image, names ...string) []file {
	files := []file{{name: "oci-layout", body: `{"imageLayoutVersion":"1.0.0"}`}}
	var manifests []imagetest.Descriptor
	for _, n := range names {
		d := m.Descriptor("linux", "amd64", "")
		d.Platform, d.Annotations = nil, map[string]string{annotationRef: n}
		manifests = append(manifests, d)
	}
	for d, b := range m.Blobs {
		files = append(files, file{name: blobPath(d), body: string(b)})
	}
	return append(files, file{name: blobPath(m.Digest()), body: string(m.Manifest)},
		file{name: "index.json", body: string(imagetest.JSON(map[string]any{"schemaVersion": 2, "manifests": manifests}))})
}

// oldDocker is an image as docker save wrote it before version 25: layers
// plain, one a link to another.
func oldDocker(m *imagetest.Image, plain [][]byte, tags ...string) []file {
	config := strings.TrimPrefix(imagetest.DigestOf(m.Config), "sha256:") + ".json"
	files := []file{{name: config, body: string(m.Config)}}
	var layers []string
	for i, b := range plain {
		id := strings.Repeat(string(rune('a'+i)), 64)
		files = append(files, file{name: id + "/"}, file{name: id + "/VERSION", body: "1.0"}, file{name: id + "/layer.tar", body: string(b)})
		layers = append(layers, id+"/layer.tar")
	}
	entry := []map[string]any{{"Config": config, "RepoTags": tags, "Layers": layers}}
	return append(files, file{name: "manifest.json", body: string(imagetest.JSON(entry))}, file{name: "repositories", body: "{}"})
}

// dockerArchive is an image as skopeo and podman write it (sha256 empty), or as
// kaniko does: the manifest last, and before it files named by digests.
func dockerArchive(m *imagetest.Image, layers [][]byte, prefix, ext string, layersFirst bool) []file {
	config := file{name: strings.TrimPrefix(digestOf(m.Config), "sha256:") + ".json", body: string(m.Config)}
	if prefix != "" {
		config.name = digestOf(m.Config)
	}
	var files []file
	var names []string
	for _, b := range layers {
		name := prefix + strings.TrimPrefix(digestOf(b), "sha256:") + ext
		files, names = append(files, file{name: name, body: string(b)}), append(names, name)
	}
	if layersFirst {
		files = append(files, config)
	} else {
		files = append([]file{config}, files...)
	}
	entry := []map[string]any{{"Config": config.name, "RepoTags": []string{"app:7"}, "Layers": names}}
	return append(files, file{name: "manifest.json", body: string(imagetest.JSON(entry))})
}

// plainLayers are the layers of imagetest.New uncompressed.
func plainLayers(t *testing.T, m *imagetest.Image) (all [][]byte) {
	t.Helper()
	for _, l := range m.Layers {
		r, end, err := decompress(bytes.NewReader(m.Blobs[l.Digest]))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		end()
		all = append(all, b)
	}
	return all
}

func zstded(b []byte) []byte {
	var out bytes.Buffer
	z, _ := zstd.NewWriter(&out)
	_, _ = z.Write(b) // into memory
	_ = z.Close()
	return out.Bytes()
}

func TestImportForms(t *testing.T) {
	m := imagetest.New(1, 3, 5000)
	old := oldDocker(m, plainLayers(t, m), "app:7")
	linked := slices.Clone(old)
	for i, f := range linked {
		if f.name == strings.Repeat("b", 64)+"/layer.tar" { // one layer's file is a link to where it lies
			linked[i] = file{name: f.name, link: "../elsewhere/layer.tar"}
			linked = append(linked, file{name: "elsewhere/layer.tar", body: f.body})
			break
		}
	}
	plain := plainLayers(t, m)
	var zipped [][]byte
	for _, b := range plain {
		zipped = append(zipped, imagetest.Gzip(b))
	}
	for name, tc := range map[string]struct {
		archive []byte
		as      string // name given
		want    string
		digest  string
	}{
		"OCI layout":              {pack(ociFiles(m, "1")...), "app", "app", m.Digest()},
		"the same, compressed":    {imagetest.Gzip(pack(ociFiles(m, "1")...)), "app", "app", m.Digest()},
		"the same, by zstd":       {zstded(pack(ociFiles(m, "1")...)), "app", "app", m.Digest()},
		"the same, in its folder": {pack(append([]file{{name: "./"}}, ociFiles(m, "1")...)...), "app", "app", m.Digest()},
		"named by the archive":    {pack(ociFiles(m, "team/app:2")...), "", "team/app:2", m.Digest()},
		"one image, two names":    {pack(ociFiles(m, "a:1", "b:1")...), "x", "x", m.Digest()},
		"old docker save":         {pack(old...), "", "app:7", ""},
		"old docker save, linked": {pack(linked...), "x", "x", ""},
		"skopeo, podman":          {pack(dockerArchive(m, plain, "", ".tar", true)...), "", "app:7", ""},
		"the same, in a folder":   {imagetest.Gzip(pack(append([]file{{name: "./"}}, dockerArchive(m, plain, "", ".tar", true)...)...)), "x", "x", ""},
		"kaniko":                  {pack(dockerArchive(m, zipped, "sha256:", "", false)...), "", "app:7", ""},
		"layers zipped":           {pack(dockerArchive(m, zipped, "", ".tar.gz", true)...), "x", "x", ""},
		"named sha256:, first":    {pack(dockerArchive(m, zipped, "sha256:", ".tar.gz", true)...), "x", "x", ""},
		"new docker save":         {pack(append(ociFiles(m, "app:7"), old[0], old[len(old)-2])...), "", "app:7", m.Digest()},
	} {
		s, v := library(t, nil)
		img, err := s.Import(t.Context(), sandbox.ImportRequest{Name: tc.as}, bytes.NewReader(tc.archive))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if img.Name != tc.want || img.Kind != sandbox.ImageOCI || !slices.Equal(img.Layers, m.DiffIDs) || tc.digest != "" && img.Digest != tc.digest || img.Config.User != "65534" {
			t.Errorf("%s: %+v", name, img)
		}
		if len(v.layers) != 3 || len(left(t, s, spoolDir)) != 0 {
			t.Errorf("%s: %d layers, %d spools", name, len(v.layers), len(left(t, s, spoolDir)))
		}
	}
}

func TestImportOfATree(t *testing.T) {
	s, _ := library(t, nil)
	for name, files := range map[string][]file{
		"plain":              {{name: "bin/"}, {name: "bin/sh", body: "x"}},
		"with the folder":    {{name: "./"}, {name: "./etc/"}},
		"a blobs of its own": {{name: "blobs/x", body: "y"}},
		"an index folder":    {{name: "index.json/"}, {name: "index.json/x", body: "y"}},
	} {
		b := pack(files...)
		img, err := s.Import(t.Context(), sandbox.ImportRequest{Name: "tree"}, bytes.NewReader(b))
		if err != nil || img.Kind != sandbox.ImageTar || img.Digest != digestOf(b) {
			t.Errorf("%s: %+v %v", name, img, err)
		}
	}
	if _, err := s.Import(t.Context(), sandbox.ImportRequest{}, bytes.NewReader(pack(file{name: "bin/"}))); sandbox.CodeOf(err) != "image_name_missing" {
		t.Errorf("without a name: %v", err)
	}
}

func TestImportRefuses(t *testing.T) {
	m := imagetest.New(1, 2, 5000)
	good := ociFiles(m, "1")
	with := func(change func(*file)) []byte {
		files := slices.Clone(good)
		for i := range files {
			change(&files[i])
		}
		return pack(files...)
	}
	replace := func(name, body string) []byte {
		return with(func(f *file) {
			if f.name == name {
				f.body = body
			}
		})
	}
	other := imagetest.New(2, 1, 100)
	two := append(slices.Clone(good), ociFiles(other, "2")[1:]...)
	two = slices.DeleteFunc(two, func(f file) bool { return f.name == "index.json" })
	d1, d2 := m.Descriptor("linux", "amd64", ""), other.Descriptor("linux", "amd64", "")
	d1.Platform, d2.Platform = nil, nil
	d1.Annotations, d2.Annotations = map[string]string{annotationRef: "one"}, map[string]string{annotationRef: "two"}
	two = append(two, file{name: "index.json", body: string(imagetest.JSON(map[string]any{"schemaVersion": 2, "manifests": []imagetest.Descriptor{d1, d2}}))})
	for name, tc := range map[string]struct {
		archive []byte
		code    string
	}{
		"nothing":               {nil, "image_truncated"},
		"no entry":              {make([]byte, 1<<20), "image_truncated"},
		"no entry, compressed":  {imagetest.Gzip(make([]byte, 1<<20)), "image_truncated"},
		"a layer alone":         {pack(file{name: strings.Repeat("a", 64) + ".tar", body: "x"}), "image_bad_format"},
		"nothing named":         {replace("index.json", `{"schemaVersion":2,"manifests":[]}`), "image_bad_format"},
		"no index":              {replace("index.json", string(m.Manifest)), "image_bad_format"},
		"a damaged layer":       {replace(blobPath(m.Layers[0].Digest), "damaged"), "image_digest_mismatch"},
		"a damaged config":      {replace(blobPath(digestOf(m.Config)), "{}"), "image_digest_mismatch"},
		"a missing layer":       {with(func(f *file) { f.name = strings.Replace(f.name, blobPath(m.Layers[1].Digest), "gone", 1) }), "image_bad_format"},
		"cut short":             {pack(good...)[:3000], "image_bad_format"},
		"two, and no name":      {pack(two...), "image_ambiguous"},
		"another platform":      {pack(ociFiles(imagetest.New(1, 1, 10).Seal(func(c, _ map[string]any) { c["architecture"] = "s390x" }), "1")...), "image_no_platform"},
		"a link in circles":     {pack(file{name: "manifest.json", body: `[{"Config":"a","Layers":[]}]`}, file{name: "a", link: "b"}, file{name: "b", link: "a"}), "image_bad_format"},
		"a link that leads out": {pack(file{name: "manifest.json", body: `[{"Config":"a","Layers":[]}]`}, file{name: "a", link: "../../../../etc/passwd"}), "image_bad_format"},
		"no JSON":               {pack(file{name: "manifest.json", body: `nope`}), "image_bad_format"},
		"names no image":        {pack(file{name: "manifest.json", body: `[]`}), "image_bad_format"},
	} {
		s, v := library(t, nil)
		_, err := s.Import(t.Context(), sandbox.ImportRequest{Name: "app"}, bytes.NewReader(tc.archive))
		if sandbox.CodeOf(err) != tc.code {
			t.Errorf("%s: %v; want %s", name, err, tc.code)
		}
		if n := len(left(t, s, manifestsDir)) + len(left(t, s, spoolDir)); n != 0 || len(v.layers) > 1 {
			t.Errorf("%s: %d files and %d layers are left", name, n, len(v.layers))
		}
	}
	s, _ := library(t, nil) // the control: with a name it can be told which
	if img, err := s.Import(t.Context(), sandbox.ImportRequest{Name: "two"}, bytes.NewReader(pack(two...))); err != nil || img.Digest != other.Digest() {
		t.Errorf("two, and a name: %+v %v", img, err)
	}
	s, _ = library(t, func(c *Config) { c.MaxBytes = 4000 })
	if _, err := s.Import(t.Context(), sandbox.ImportRequest{Name: "app"}, bytes.NewReader(pack(good...))); sandbox.CodeOf(err) != "image_too_large" {
		t.Errorf("too much: %v", err)
	}
}

func TestExportComesBack(t *testing.T) {
	m := imagetest.New(1, 3, 5000)
	s, _ := library(t, nil)
	img, err := s.Import(t.Context(), sandbox.ImportRequest{Name: "app:1"}, bytes.NewReader(pack(ociFiles(m, "1")...)))
	if err != nil {
		t.Fatal(err)
	}
	src := sandbox.ImageSource{Image: img, Layers: img.Layers}
	for _, format := range []sandbox.ImageFormat{sandbox.FormatOCI, sandbox.FormatDocker} {
		var a, b bytes.Buffer
		for _, w := range []*bytes.Buffer{&a, &b} {
			if err := s.Export(t.Context(), src, sandbox.ExportRequest{Format: format}, w); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(a.Bytes(), b.Bytes()) {
			t.Errorf("%s: twice the same image gives other bytes", format)
		}
		s2, v2 := library(t, nil)
		back, err := s2.Import(t.Context(), sandbox.ImportRequest{}, &a)
		if err != nil || len(v2.layers) != 3 || back.Name != "docker.io/library/app:1" {
			t.Errorf("%s: %+v %v", format, back, err)
		}
		img.Config.History, back.Config.History = nil, nil
		if diff := cmp.Diff(img.Config, back.Config); diff != "" {
			t.Errorf("%s: %s", format, diff)
		}
	}
	var tree bytes.Buffer
	if err := s.Export(t.Context(), src, sandbox.ExportRequest{Format: sandbox.FormatTar}, &tree); err != nil || !strings.HasPrefix(tree.String(), "tree of "+m.DiffIDs[0]) {
		t.Errorf("%q %v", tree.String(), err)
	}
	if n := len(left(t, s, spoolDir)); n != 0 {
		t.Errorf("%d spools are left", n)
	}
}

// TestKeep drops what no image names and keeps the rest.
func TestKeep(t *testing.T) {
	g := imagetest.Start(t)
	s, _ := library(t, nil)
	var images []sandbox.Image
	for i := range 2 {
		g.Put("app", string(rune('a'+i)), imagetest.New(i+1, 2, 1000).Seal(func(c, _ map[string]any) { c["created"] = []string{"2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"}[i] }))
		img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/app:" + string(rune('a'+i))}, nil)
		if err != nil {
			t.Fatal(err)
		}
		images = append(images, img)
	}
	if err := s.Keep(images[:1], images[0].Layers); err != nil {
		t.Fatal(err)
	}
	if len(left(t, s, manifestsDir)) != 1 || len(left(t, s, configsDir)) != 1 || len(left(t, s, blobsDir)) != 2 {
		t.Errorf("%v %v %v", left(t, s, manifestsDir), left(t, s, configsDir), left(t, s, blobsDir))
	}
	if _, err := s.manifest(images[0].Digest); err != nil {
		t.Error(err)
	}
	if err := s.Keep(nil, nil); err != nil || len(left(t, s, manifestsDir))+len(left(t, s, configsDir))+len(left(t, s, blobsDir)) != 0 {
		t.Errorf("not empty: %v", err)
	}
}

// TestKeepBesideAPull: a pull holds its layers before it looks for them, and at
// its end all; what is tidied before that takes nothing from it.
func TestKeepBesideAPull(t *testing.T) {
	g := imagetest.Start(t)
	g.Put("app", "latest", imagetest.New(1, 5, 20_000))
	s, v := library(t, func(c *Config) { c.CacheBytes = 1 })
	var held []string
	ended := false
	ctx := sandbox.WithHold(t.Context(), func(layers []string) {
		ended = ended || len(layers) == 0
		for _, l := range layers {
			if _, err := v.Layer(l); err == nil {
				t.Errorf("layer %s came before it was held", l)
			}
		}
		held = append(held, layers...)
		if n := len(left(t, s, manifestsDir)) + len(left(t, s, configsDir)); n != 0 {
			t.Errorf("%d files of the image came before all was held", n)
		}
	})
	img, err := s.Pull(ctx, sandbox.PullRequest{Reference: g.Host() + "/app"}, func(sandbox.ImageProgress) {
		if err := s.Keep(nil, held); err != nil {
			t.Error(err)
		}
	})
	if err != nil || !ended || !slices.Equal(held, img.Layers) {
		t.Errorf("held %v, all at the end: %v; %v", held, ended, err)
	}
	if n := len(left(t, s, blobsDir)); n != len(img.Layers) {
		t.Errorf("%d of %d layers are remembered", n, len(img.Layers))
	}
	if _, err := s.manifest(img.Digest); err != nil {
		t.Error(err)
	}
}

func FuzzManifest(f *testing.F) {
	m := imagetest.New(1, 2, 10)
	f.Add(m.Manifest, m.Config)
	f.Add(imagetest.JSON(map[string]any{"schemaVersion": 2, "manifests": []imagetest.Descriptor{m.Descriptor("linux", "amd64", "v1")}}), []byte("{}"))
	f.Add([]byte(`{"schemaVersion":1,"fsLayers":[]}`), []byte(`{"config":{"Cmd":"x","Entrypoint":["y"]}}`))
	f.Fuzz(func(t *testing.T, raw, cfg []byte) {
		man, err := parseManifest(raw, typeOCIManifest)
		if err != nil {
			if sandbox.ClassOf(err) == nil {
				t.Errorf("no class: %v", err)
			}
			return
		}
		if man.isIndex() {
			_, _ = man.choose("linux/arm/v7") // must not panic
			return
		}
		c, err := parseConfig(cfg, len(man.Layers))
		if err != nil {
			return
		}
		if r, err := c.record(); err == nil && (total(r.Env) > keptEnv || len(r.History) > keptHistory) {
			t.Errorf("kept too much: %d", total(r.Env))
		}
	})
}
