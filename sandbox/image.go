package sandbox

import (
	"fmt"
	"log/slog"
	"slices"
	"time"
)

// Image is a named stack of read-only layers.
type Image struct {
	Name      string      `json:"name" doc:"A local name, or a reference with registry, repository and tag or digest."`
	Digest    string      `json:"digest" doc:"sha256 of the content: of a pulled image its manifest; or 'host'."`
	Kind      ImageKind   `json:"kind" enum:"host,tar,oci,build"`
	Layers    []string    `json:"layers" doc:"Layer names, lowest first. Of a pulled image: the digests of the uncompressed layers, each once."`
	SizeBytes int64       `json:"size_bytes"`
	Files     int64       `json:"files"`
	Config    ImageConfig `json:"config"`
	CreatedAt time.Time   `json:"created_at"`

	Reference   string `json:"reference,omitempty" doc:"Where it was pulled from: registry, repository and tag or digest."`
	IndexDigest string `json:"index_digest,omitempty" doc:"Of the index that named its manifest, where there was one."`
	Platform    string `json:"platform,omitempty" doc:"As linux/amd64; empty where it was not said."`
}

// ImageNotFound is the error where no image has a name.
func ImageNotFound(name string) error {
	return Errorf(ErrNotFound, "image_not_found", "no image %.80q here: 'sandbox image pull' brings one from a registry, 'sandbox image import' makes one of an archive, 'sandbox image ls' shows those there are", name)
}

// ImageKind says where an image came from.
type ImageKind string

// The image kinds.
const (
	ImageHost  ImageKind = "host"  // the host's own /usr
	ImageTar   ImageKind = "tar"   // a tar archive of a root file system
	ImageOCI   ImageKind = "oci"   // a registry, an OCI layout or an archive of docker save
	ImageBuild ImageKind = "build" // built here
)

// ImageConfig is what an image says about running it.
type ImageConfig struct {
	Env          []string          `json:"env,omitempty"`
	User         string            `json:"user,omitempty"`
	WorkDir      string            `json:"workdir,omitempty"`
	Entrypoint   []string          `json:"entrypoint,omitempty"`
	Cmd          []string          `json:"cmd,omitempty"`
	Shell        []string          `json:"shell,omitempty" doc:"Of RUN, CMD and ENTRYPOINT in shell form."`
	StopSignal   string            `json:"stop_signal,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty" doc:"As 80/tcp; said by the image, opened by nobody."`
	Volumes      []string          `json:"volumes,omitempty" doc:"Directories it means for volumes; nothing is mounted there by itself."`
	Labels       map[string]string `json:"labels,omitempty"`
	History      []ImageHistory    `json:"history,omitempty" doc:"How it was made, oldest first."`
}

// ImageHistory is one step of an image's making.
type ImageHistory struct {
	Created   *time.Time `json:"created,omitempty"`
	CreatedBy string     `json:"created_by,omitempty"`
	Comment   string     `json:"comment,omitempty"`
	Empty     bool       `json:"empty,omitempty" doc:"It made no layer."`
}

// Lean is the configuration without what running a sandbox never needs: what
// is kept with each sandbox.
func (c ImageConfig) Lean() ImageConfig {
	c.ExposedPorts, c.Volumes, c.Labels, c.History = nil, nil, nil, nil
	return c
}

// Argv is the command of a process that runs as the image says: the
// entrypoint, then args, or the image's own cmd where there are none. Its
// error is of class ErrInvalid.
func (c ImageConfig) Argv(args []string) ([]string, error) {
	if len(args) == 0 {
		args = c.Cmd
	}
	argv := append(append([]string(nil), c.Entrypoint...), args...)
	if len(argv) == 0 {
		return nil, Errorf(ErrInvalid, "no_command", "no command given, and the image has none of its own: name one, as in sandbox run --rm -- echo hello")
	}
	return argv, nil
}

// RegistryAuth proves to a registry who asks. It never shows its secrets when
// printed or logged.
type RegistryAuth struct {
	Username      string `json:"username,omitempty" maxLength:"1024"`
	Password      string `json:"password,omitempty" maxLength:"65536"`
	IdentityToken string `json:"identity_token,omitempty" maxLength:"65536" doc:"Exchanged for access tokens, in place of a password."`
	RegistryToken string `json:"registry_token,omitempty" maxLength:"65536" doc:"Sent as it is, as a bearer token."`
}

// Empty tells whether there is nothing to prove anything with.
func (a *RegistryAuth) Empty() bool { return a == nil || *a == RegistryAuth{} }

// Format prints nothing secret, whatever the verb.
func (a RegistryAuth) Format(f fmt.State, _ rune) { _, _ = fmt.Fprintf(f, "{%s …}", a.Username) }

// LogValue logs nothing secret.
func (a RegistryAuth) LogValue() slog.Value { return slog.StringValue("{" + a.Username + " …}") }

// PullRequest asks for an image of a registry.
type PullRequest struct {
	Reference string        `json:"reference" minLength:"1" maxLength:"512" doc:"As alpine, registry.example:5000/team/app:1.2 or name@sha256:…; without a registry docker.io is meant, without a tag latest."`
	Name      string        `json:"name,omitempty" maxLength:"512" doc:"Local name; the full reference if empty."`
	Platform  string        `json:"platform,omitempty" maxLength:"64" doc:"As linux/arm64/v8; the host's if empty."`
	PlainHTTP bool          `json:"plain_http,omitempty" doc:"Speak HTTP with this registry, without TLS."`
	Auth      *RegistryAuth `json:"auth,omitempty"`
	Actor     string        `json:"-"`
}

// Validate checks what can be judged without a registry.
func (r PullRequest) Validate() error {
	if _, err := ParseImageRef(r.Reference); err != nil {
		return err
	}
	if r.Name != "" {
		if err := ValidateImageName(r.Name); err != nil {
			return err
		}
	}
	return ValidatePlatform(r.Platform)
}

// PushRequest asks to send an image, a snapshot or a sandbox's files to a
// registry.
type PushRequest struct {
	Source    string        `json:"source" minLength:"1" maxLength:"512" doc:"An image's name, or the id of a snapshot (sn…) or a sandbox (sb…)."`
	Reference string        `json:"reference,omitempty" maxLength:"512" doc:"Where to; an image's own name if empty; needed for others."`
	PlainHTTP bool          `json:"plain_http,omitempty" doc:"Speak HTTP with this registry, without TLS."`
	Auth      *RegistryAuth `json:"auth,omitempty"`
	Actor     string        `json:"-"`
}

// Pushed is the outcome of a push.
type Pushed struct {
	Reference string `json:"reference"`
	Digest    string `json:"digest" doc:"Of the manifest."`
	Size      int64  `json:"size" doc:"Bytes of all layers, compressed."`
	Uploaded  int64  `json:"uploaded" doc:"Bytes of the layers the registry did not have."`
	Rebuilt   int    `json:"rebuilt,omitempty" doc:"Layers that were compressed anew, because neither the registry nor this host had them as they were pulled: the digest is then another than the pulled one."`
}

// ImageFormat is a form of an image as one file.
type ImageFormat string

// The image formats.
const (
	FormatOCI    ImageFormat = "oci"    // an OCI image layout in a tar archive
	FormatDocker ImageFormat = "docker" // the same with what 'docker load' reads
	FormatTar    ImageFormat = "tar"    // the merged root file system
)

// ExportRequest asks for an image, a snapshot or a sandbox's files as a file.
type ExportRequest struct {
	Source string      `json:"source" minLength:"1" maxLength:"512" doc:"An image's name, or the id of a snapshot (sn…) or a sandbox (sb…)."`
	Format ImageFormat `json:"format,omitempty" enum:"oci,docker,tar" doc:"oci if empty."`
	Name   string      `json:"name,omitempty" maxLength:"512" doc:"The name told in the archive; the source's own if empty."`
	Actor  string      `json:"-"`
}

// ImportRequest describes an archive that becomes an image.
type ImportRequest struct {
	Name     string // empty: the one the archive tells
	Platform string // of an archive with images for several; empty: the host's
	Actor    string
}

// ImageSource is what is pushed or exported: an image, or layers on top of it.
type ImageSource struct {
	Image  Image    // its configuration, and its digest where Layers are its own
	Layers []string // all of them, lowest first
}

// Whole tells whether the source is the image itself, with nothing on top.
func (s ImageSource) Whole() bool { return slices.Equal(s.Image.Layers, s.Layers) }

// ImageProgress tells how far a pull or push has come. Of each layer the last
// one counts.
type ImageProgress struct {
	Status  ImageStep `json:"status" enum:"resolved,waiting,downloading,unpacking,exists,done,retrying,packing,uploading,pushed"`
	Layer   string    `json:"layer,omitempty" doc:"Digest of the layer it is about; empty: of the whole."`
	Current int64     `json:"current,omitempty" doc:"Bytes so far."`
	Total   int64     `json:"total,omitempty" doc:"Bytes in all; 0: not known."`
	Detail  string    `json:"detail,omitempty" doc:"For people."`
}

// ImageStep is what is being done with a layer.
type ImageStep string

// The steps of a pull and of a push.
const (
	StepResolved    ImageStep = "resolved" // the manifest is there: Detail is its digest, Total the size
	StepWaiting     ImageStep = "waiting"
	StepDownloading ImageStep = "downloading"
	StepRetrying    ImageStep = "retrying" // after the fault in Detail
	StepUnpacking   ImageStep = "unpacking"
	StepExists      ImageStep = "exists"
	StepDone        ImageStep = "done"
	StepPacking     ImageStep = "packing"
	StepUploading   ImageStep = "uploading"
	StepPushed      ImageStep = "pushed"
)

// PruneRequest asks to remove images that nothing uses.
type PruneRequest struct {
	All    bool  `json:"all,omitempty" doc:"Also images that cannot be pulled again: imported and built ones."`
	DryRun bool  `json:"dry_run,omitempty" doc:"Remove nothing: tell which it would be; freed_bytes is not worked out then."`
	Until  int64 `json:"until_seconds,omitempty" minimum:"0" doc:"Only those that are older than this."`
}

// Pruned is the outcome of removing images.
type Pruned struct {
	Images     []string `json:"images" doc:"Names of the images that went."`
	FreedBytes int64    `json:"freed_bytes" doc:"Bytes of the layers only they used."`
}
