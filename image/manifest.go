package image

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The media types of manifests (OCI image spec 1.1, Docker's schema 2).
const (
	typeOCIManifest    = "application/vnd.oci.image.manifest.v1+json"
	typeOCIIndex       = "application/vnd.oci.image.index.v1+json"
	typeOCIConfig      = "application/vnd.oci.image.config.v1+json"
	typeOCILayer       = "application/vnd.oci.image.layer.v1.tar"
	typeDockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	typeDockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
	typeDockerConfig   = "application/vnd.docker.container.image.v1+json"
	typeDockerLayer    = "application/vnd.docker.image.rootfs.diff.tar"
	typeSchema1        = "application/vnd.docker.distribution.manifest.v1+json"
	typeSchema1Signed  = "application/vnd.docker.distribution.manifest.v1+prettyjws"
)

// accepted lists the manifests asked for. Schema 1 is asked for too, so that
// a registry that has nothing else lets us say so by name.
var accepted = []string{
	typeOCIIndex, typeOCIManifest, typeDockerList, typeDockerManifest, typeSchema1Signed + ";q=0.1", typeSchema1 + ";q=0.1",
}

// Bounds of what a registry may send. The distribution spec asks registries
// for manifests of up to 4 MiB.
const (
	maxManifest = 4 << 20
	maxConfig   = 4 << 20
	// maxLayers is below the kernel's 500 layers of an overlay
	// (OVL_MAX_STACK), which a sandbox's own and ours come on top of.
	maxLayers  = 400
	maxEntries = 1024 // of an index
	maxNesting = 2    // of an index in an index
)

// descriptor names a blob.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Variant      string `json:"variant,omitempty"`
}

func (p platform) String() string {
	return strings.TrimSuffix(p.OS+"/"+p.Architecture+"/"+p.Variant, "/")
}

// manifest is an image manifest or an index of them.
type manifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType,omitempty"`
	Config        descriptor        `json:"config"`
	Layers        []descriptor      `json:"layers"`
	Annotations   map[string]string `json:"annotations,omitempty"`

	Manifests []descriptor `json:"-"`
	ArtType   string       `json:"-"`
	raw       []byte       // as it came
	digest    string       // of raw
}

// isIndex tells an index from a manifest.
func (m *manifest) isIndex() bool { return m.Manifests != nil }

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func hexOf(digest string) string { return strings.TrimPrefix(digest, "sha256:") }

func unsupported(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrUnsupported, "image_unsupported", format, args...)
}

func badImage(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_manifest", format, args...)
}

func mismatch(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrInvalid, "image_digest_mismatch", format, args...)
}

func tooLarge(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrTooLarge, "image_too_large", format, args...)
}

// parseManifest reads and checks a manifest or index. contentType is what the
// registry called it, used where the document does not say.
func parseManifest(b []byte, contentType string) (*manifest, error) {
	if len(b) > maxManifest {
		return nil, tooLarge("the manifest is over %d bytes", maxManifest)
	}
	var doc struct {
		manifest
		Manifests    *[]descriptor     `json:"manifests"`
		LayerList    *[]descriptor     `json:"layers"`
		FSLayers     []json.RawMessage `json:"fsLayers"`
		ArtifactType string            `json:"artifactType"`
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		return nil, badImage("the manifest is no JSON that makes sense: %w", err)
	}
	m := doc.manifest
	m.raw, m.digest, m.ArtType = b, digestOf(b), doc.ArtifactType
	kind := cmp.Or(m.MediaType, strings.TrimSpace(strings.Split(contentType, ";")[0]))
	switch {
	case m.SchemaVersion == 1 || doc.FSLayers != nil || kind == typeSchema1 || kind == typeSchema1Signed:
		return nil, unsupported("the image is in Docker's schema 1, which has no digests of its content: push it again with a present-day tool, then pull that")
	case m.SchemaVersion != 2:
		return nil, badImage("the manifest has schemaVersion %d: only 2 is known", m.SchemaVersion)
	case doc.Manifests != nil && doc.LayerList != nil:
		return nil, badImage("the manifest claims to be an index and an image at once")
	case doc.Manifests != nil:
		m.Manifests = slices.Concat([]descriptor{}, *doc.Manifests)
		m.MediaType = cmp.Or(m.MediaType, typeOCIIndex)
		return &m, m.checkIndex()
	case doc.LayerList == nil:
		return nil, badImage("the manifest has neither layers nor manifests (%.80q)", kind)
	}
	m.Layers = *doc.LayerList
	if m.MediaType == "" {
		m.MediaType = typeOCIManifest
		if kind == typeDockerManifest {
			m.MediaType = kind
		}
	}
	return &m, m.check()
}

func (m *manifest) checkIndex() error {
	if len(m.Manifests) > maxEntries {
		return tooLarge("the index has %d entries: at most %d", len(m.Manifests), maxEntries)
	}
	for _, d := range m.Manifests {
		if err := d.check(maxManifest); err != nil {
			return err
		}
	}
	return nil
}

// check refuses what is no image of a kind we can run.
func (m *manifest) check() error {
	switch m.Config.MediaType {
	case typeOCIConfig, typeDockerConfig:
	default:
		return unsupported("this is no image of a file system but something of type %.100q: it cannot be run", cmp.Or(m.ArtType, m.Config.MediaType))
	}
	if len(m.Layers) > maxLayers {
		return tooLarge("the image has %d layers: at most %d can be stacked", len(m.Layers), maxLayers)
	}
	if err := m.Config.check(maxConfig); err != nil {
		return err
	}
	for _, d := range m.Layers {
		if err := d.check(1 << 50); err != nil {
			return err
		}
		if err := layerType(d.MediaType); err != nil {
			return err
		}
	}
	return nil
}

func (d descriptor) check(most int64) error {
	switch {
	case strings.HasPrefix(d.Digest, "sha512:"):
		return unsupported("the image names its parts by SHA-512: only SHA-256 is known")
	case !sandbox.ValidDigest(d.Digest):
		return badImage("the manifest has the digest %.80q: want sha256: and 64 digits", d.Digest)
	case d.Size < 0:
		return badImage("the manifest says that %s has %d bytes", d.Digest, d.Size)
	case d.Size > most:
		return tooLarge("the manifest says that %s has %d bytes: at most %d", d.Digest, d.Size, most)
	}
	return nil
}

// layerType refuses layers that cannot be unpacked. How they are compressed
// shows in their first bytes.
func layerType(t string) error {
	for _, base := range []string{typeOCILayer, "application/vnd.oci.image.layer.nondistributable.v1.tar", typeDockerLayer} {
		for _, form := range []string{"", "+gzip", "+zstd", ".gzip", ".zstd"} {
			if t == base+form {
				return nil
			}
		}
	}
	if strings.Contains(t, "foreign") {
		return unsupported("a layer of the image lies outside of registries (%.100q), as those of Windows do: it cannot be pulled", t)
	}
	if strings.Contains(t, "encrypted") {
		return unsupported("a layer of the image is encrypted (%.100q): pull a plain one", t)
	}
	return unsupported("a layer of the image is of the unknown type %.100q", t)
}

// choose picks the entry of an index for a platform.
func (m *manifest) choose(want string) (descriptor, error) {
	p := parsePlatform(want)
	best, rank := -1, 0
	var there []string
	for i, d := range m.Manifests {
		if d.Platform == nil || d.Platform.OS == "unknown" {
			continue // attestations and the like
		}
		there = append(there, d.Platform.String())
		if r := p.rank(*d.Platform); r > rank {
			best, rank = i, r
		}
	}
	if best >= 0 {
		return m.Manifests[best], nil
	}
	if len(m.Manifests) == 1 && m.Manifests[0].Platform == nil {
		return m.Manifests[0], nil // an OCI layout of one image; its configuration is asked next
	}
	slices.Sort(there)
	return descriptor{}, sandbox.Errorf(sandbox.ErrNotFound, "image_no_platform",
		"the image is not there for %s but for %.300s: name one of those with --platform, if this machine can run it", want, strings.Join(slices.Compact(there), ", "))
}

func parsePlatform(s string) platform {
	parts := append(strings.Split(s, "/"), "", "")
	p := platform{OS: parts[0], Architecture: parts[1], Variant: parts[2]}
	switch p.Architecture { // as people say
	case "x86_64":
		p.Architecture = "amd64"
	case "aarch64":
		p.Architecture = "arm64"
	}
	return p
}

// rank tells how well another platform serves one who wants p: 0 not at all.
func (p platform) rank(o platform) int {
	switch {
	case p.OS != o.OS || p.Architecture != o.Architecture:
		return 0
	case p.Variant == o.Variant:
		return 100
	case p.Variant == "" && (o.Variant == "v8" || p.Architecture == "arm" && o.Variant == "v7"):
		return 99
	case p.Variant == "":
		return 50
	case o.Variant == "":
		return 40
	case p.Architecture == "arm" && o.Variant < p.Variant: // v6 runs on v7
		return int(o.Variant[len(o.Variant)-1] - '0')
	}
	return 0
}

// words is a list of words that old images give as one.
type words []string

// UnmarshalJSON takes a list or one string.
func (w *words) UnmarshalJSON(b []byte) error {
	if bytes.HasPrefix(bytes.TrimSpace(b), []byte{'"'}) {
		var one string
		if err := json.Unmarshal(b, &one); err != nil {
			return err
		}
		*w = words{one}
		return nil
	}
	return json.Unmarshal(b, (*[]string)(w))
}

// configFile is an image's configuration (OCI image spec, config.md).
type configFile struct {
	platform
	Created *time.Time `json:"created,omitempty"`
	Config  struct {
		Env          []string            `json:"Env,omitempty"`
		User         string              `json:"User,omitempty"`
		WorkingDir   string              `json:"WorkingDir,omitempty"`
		Entrypoint   words               `json:"Entrypoint,omitempty"`
		Cmd          words               `json:"Cmd,omitempty"`
		Shell        words               `json:"Shell,omitempty"`
		StopSignal   string              `json:"StopSignal,omitempty"`
		ExposedPorts map[string]struct{} `json:"ExposedPorts,omitempty"`
		Volumes      map[string]struct{} `json:"Volumes,omitempty"`
		Labels       map[string]string   `json:"Labels,omitempty"`
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
	History []historyEntry `json:"history,omitempty"`
}

type historyEntry struct {
	Created    *time.Time `json:"created,omitempty"`
	CreatedBy  string     `json:"created_by,omitempty"`
	Comment    string     `json:"comment,omitempty"`
	EmptyLayer bool       `json:"empty_layer,omitempty"`
}

// parseConfig reads an image's configuration, which must fit its manifest.
func parseConfig(b []byte, layers int) (*configFile, error) {
	var c configFile
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, badImage("the image's configuration is no JSON that makes sense: %w", err)
	}
	if n := len(c.RootFS.DiffIDs); n != layers {
		return nil, badImage("the image's configuration tells of %d layers, its manifest of %d: push it again", n, layers)
	}
	for _, d := range c.RootFS.DiffIDs {
		if !sandbox.ValidDigest(d) {
			return nil, badImage("the image's configuration has the layer digest %.80q: want sha256: and 64 digits", d)
		}
	}
	return &c, nil
}

// Bounds of what of a configuration is kept in the image's record.
const (
	keptEnv     = 64 << 10 // bytes
	keptArgv    = 64 << 10
	keptLabels  = 32 << 10
	keptHistory = 128 // entries
	keptText    = 400 // bytes of each
	keptNames   = 128 // ports, volumes
)

// record is the configuration as an image's record keeps it. What running it
// needs is kept whole or refused; what only tells of it is clipped.
func (c *configFile) record() (sandbox.ImageConfig, error) {
	var none sandbox.ImageConfig
	if n := total(c.Config.Env); n > keptEnv {
		return none, tooLarge("the image's environment has %d bytes: at most %d", n, keptEnv)
	}
	if n := total(c.Config.Entrypoint) + total(c.Config.Cmd) + total(c.Config.Shell); n > keptArgv {
		return none, tooLarge("the image's commands have %d bytes: at most %d", n, keptArgv)
	}
	env := make([]string, 0, len(c.Config.Env))
	for _, kv := range c.Config.Env {
		if k, _, ok := strings.Cut(kv, "="); ok && k != "" && !strings.ContainsRune(kv, 0) {
			env = append(env, kv)
		}
	}
	dir := c.Config.WorkingDir
	if dir != "" && !strings.HasPrefix(dir, "/") {
		dir = "/" + dir // as docker does
	}
	if err := sandbox.ValidateWorkDir(dir); err != nil {
		return none, badImage("the image's configuration: %w", err)
	}
	if err := sandbox.ValidateUser(c.Config.User); err != nil {
		return none, badImage("the image's configuration: %w", err)
	}
	out := sandbox.ImageConfig{
		Env: env, User: c.Config.User, WorkDir: dir,
		Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Shell: c.Config.Shell, StopSignal: clip(c.Config.StopSignal, 32),
		ExposedPorts: keys(c.Config.ExposedPorts), Volumes: keys(c.Config.Volumes), Labels: fewLabels(c.Config.Labels),
	}
	history := c.History[max(0, len(c.History)-keptHistory):]
	for _, h := range history {
		out.History = append(out.History, sandbox.ImageHistory{
			Created: h.Created, CreatedBy: clip(h.CreatedBy, keptText), Comment: clip(h.Comment, keptText), Empty: h.EmptyLayer,
		})
	}
	return out, nil
}

func total(list []string) int {
	n := 0
	for _, s := range list {
		n += len(s) + 1
	}
	return n
}

// fewLabels keeps labels, in the order of their names, while they fit.
func fewLabels(all map[string]string) map[string]string {
	kept := map[string]string{}
	room := keptLabels
	names := make([]string, 0, len(all))
	for k := range all {
		names = append(names, k)
	}
	slices.Sort(names)
	for _, k := range names {
		if room -= len(k) + len(all[k]); room < 0 {
			break
		}
		kept[k] = all[k]
	}
	if len(kept) == 0 {
		return nil
	}
	return kept
}

func keys(set map[string]struct{}) []string {
	var names []string
	for k := range set {
		names = append(names, clip(k, keptText))
	}
	slices.Sort(names)
	return names[:min(len(names), keptNames)]
}

func clip(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}

// stack is the layers of an image, each once. A layer that comes twice counts
// where it comes last: there it has the last word on all it holds, so what it
// did before makes no difference.
func stack(diffIDs []string) []string {
	var out []string
	for i, d := range diffIDs {
		if !slices.Contains(diffIDs[i+1:], d) {
			out = append(out, d)
		}
	}
	return out
}

// manifest reads the kept manifest of an image.
func (s *Store) manifest(digest string) (*manifest, error) {
	if !sandbox.ValidDigest(digest) {
		return nil, os.ErrNotExist
	}
	b, err := os.ReadFile(s.path(manifestsDir, hexOf(digest)))
	if err != nil {
		return nil, err
	}
	if digestOf(b) != digest {
		return nil, fmt.Errorf("image: the kept manifest %s is damaged", digest)
	}
	m, err := parseManifest(b, "")
	if err == nil && m.isIndex() {
		err = fmt.Errorf("image: the kept manifest %s is an index", digest)
	}
	return m, err
}

// config reads the kept configuration of a kept manifest.
func (s *Store) config(m *manifest) ([]byte, *configFile, error) {
	b, err := os.ReadFile(s.path(configsDir, hexOf(m.Config.Digest)))
	if err != nil {
		return nil, nil, err
	}
	if digestOf(b) != m.Config.Digest {
		return nil, nil, fmt.Errorf("image: the kept configuration %s is damaged", m.Config.Digest)
	}
	c, err := parseConfig(b, len(m.Layers))
	return b, c, err
}
