package imagetest

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/klauspost/compress/gzip"
)

// Media types.
const (
	OCIManifest    = "application/vnd.oci.image.manifest.v1+json"
	OCIIndex       = "application/vnd.oci.image.index.v1+json"
	OCIConfig      = "application/vnd.oci.image.config.v1+json"
	OCILayer       = "application/vnd.oci.image.layer.v1.tar"
	DockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	DockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
	DockerConfig   = "application/vnd.docker.container.image.v1+json"
)

// Descriptor names a blob.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    map[string]string `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Image is an image as a registry has it.
type Image struct {
	Blobs    map[string][]byte // by digest
	Layers   []Descriptor
	DiffIDs  []string
	Kind     string // media type of the manifest
	Manifest []byte
	Config   []byte
}

// DigestOf is the digest of content.
func DigestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Tar is an archive of one file.
func Tar(name string, content []byte) []byte {
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	_ = tw.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o644}) // into memory
	_, _ = tw.Write(content)
	_ = tw.Close()
	return b.Bytes()
}

// Gzip compresses content.
func Gzip(b []byte) []byte {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, _ = z.Write(b) // into memory
	_ = z.Close()
	return out.Bytes()
}

// Noise is content that does not compress; the same seed gives the same.
func Noise(seed, n int) []byte {
	out := make([]byte, 0, n+sha256.Size)
	sum := sha256.Sum256(fmt.Appendf(nil, "%d", seed))
	for len(out) < n {
		sum = sha256.Sum256(sum[:])
		out = append(out, sum[:]...)
	}
	return out[:n]
}

// JSON is v as JSON.
func JSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // values of tests
	}
	return b
}

// New makes an image of layers, each an archive of one file of so many bytes
// of noise. Two of different seeds share no layer.
func New(seed, layers, bytesEach int) *Image {
	m := &Image{Blobs: map[string][]byte{}, Kind: OCIManifest}
	for i := range layers {
		m.AddLayer(Tar(fmt.Sprintf("file%d", i), Noise(seed*1000+i, bytesEach)))
	}
	m.Seal(nil)
	return m
}

// AddLayer adds a layer of an archive; Seal must follow.
func (m *Image) AddLayer(plain []byte) {
	z := Gzip(plain)
	m.DiffIDs = append(m.DiffIDs, DigestOf(plain))
	m.Layers = append(m.Layers, Descriptor{MediaType: OCILayer + "+gzip", Digest: m.Add(z), Size: int64(len(z))})
}

// Add adds a blob.
func (m *Image) Add(b []byte) string {
	d := DigestOf(b)
	m.Blobs[d] = b
	return d
}

// Seal makes configuration and manifest of the layers. change may alter both
// before they are encoded.
func (m *Image) Seal(change func(cfg, manifest map[string]any)) *Image {
	cfg := map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{
			"Env": []string{"A=1", "PATH=/bin"}, "Entrypoint": []string{"/bin/x"}, "Cmd": []string{"y"}, "User": "65534", "WorkingDir": "/srv",
			"ExposedPorts": map[string]any{"80/tcp": map[string]any{}}, "Labels": map[string]string{"l": "v"}, "StopSignal": "SIGINT",
		},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": m.DiffIDs},
		"history": []any{map[string]any{"created_by": "made"}},
	}
	man := map[string]any{"schemaVersion": 2, "mediaType": m.Kind, "layers": m.Layers}
	if change != nil {
		change(cfg, man)
	}
	m.Config = JSON(cfg)
	kind := OCIConfig
	if m.Kind == DockerManifest {
		kind = DockerConfig
	}
	if man["config"] == nil {
		man["config"] = Descriptor{MediaType: kind, Digest: m.Add(m.Config), Size: int64(len(m.Config))}
	}
	m.Manifest = JSON(man)
	return m
}

// Digest is the manifest's.
func (m *Image) Digest() string { return DigestOf(m.Manifest) }

// Descriptor names the manifest in an index.
func (m *Image) Descriptor(os, arch, variant string) Descriptor {
	p := map[string]string{"os": os, "architecture": arch}
	if variant != "" {
		p["variant"] = variant
	}
	return Descriptor{MediaType: m.Kind, Digest: m.Digest(), Size: int64(len(m.Manifest)), Platform: p}
}
