package sandbox

import (
	"strings"
)

// Bounds of an image's name.
const (
	maxImageName = 512
	maxTag       = 128
	hexDigest    = 64
)

// The parts docker adds to a short name.
const (
	DefaultRegistry = "docker.io"
	defaultPath     = "library/"
	defaultTag      = "latest"
	digestAlgorithm = "sha256:"
)

// ImageRef is an image's name taken apart.
type ImageRef struct {
	Host   string // registry, with its port if that is not the usual one
	Path   string // repository
	Tag    string // empty where there is a digest
	Digest string // sha256:…
}

// Repository names the repository with its registry.
func (r ImageRef) Repository() string { return r.Host + "/" + r.Path }

// String is the full reference.
func (r ImageRef) String() string {
	if r.Digest != "" {
		return r.Repository() + "@" + r.Digest
	}
	return r.Repository() + ":" + r.Tag
}

// NamesRegistry tells whether s says which registry it means: then its first
// part has a dot or a port, or is localhost.
func NamesRegistry(s string) bool {
	host, _, more := strings.Cut(s, "/")
	return more && (strings.ContainsAny(host, ".:") || host == "localhost")
}

// ParseImageRef takes a reference apart as docker does: without a registry
// docker.io is meant, there without a folder library, without tag or digest
// latest. A tag beside a digest is dropped. Its error is of class ErrInvalid.
func ParseImageRef(s string) (ImageRef, error) {
	if err := ValidateImageName(s); err != nil {
		return ImageRef{}, err
	}
	r := ImageRef{Host: DefaultRegistry}
	rest := s
	if NamesRegistry(s) {
		r.Host, rest, _ = strings.Cut(s, "/")
	}
	rest, r.Digest, _ = strings.Cut(rest, "@")
	r.Path, r.Tag, _ = strings.Cut(rest, ":")
	if r.Host == "index.docker.io" || r.Host == "registry-1.docker.io" {
		r.Host = DefaultRegistry
	}
	if r.Host == DefaultRegistry && !strings.Contains(r.Path, "/") {
		r.Path = defaultPath + r.Path
	}
	switch {
	case r.Digest != "":
		r.Tag = ""
	case r.Tag == "":
		r.Tag = defaultTag
	}
	return r, nil
}

// ValidateImageName accepts names as people write them: "host",
// "debian/bookworm:12", "registry.example:5000/team/app@sha256:…", with
// lowercase parts.
func ValidateImageName(s string) error {
	if !imageNameOK(s) {
		return Errorf(ErrInvalid, "invalid_image_name", "image name %.80q: use parts of a-z, 0-9, '.', '_' and '-' with '/' between, before them a registry with its port, after them ':tag' or '@sha256:' and 64 digits", s)
	}
	return nil
}

func imageNameOK(s string) bool {
	if s == "" || len(s) > maxImageName {
		return false
	}
	rest := s
	if NamesRegistry(s) {
		var host string
		host, rest, _ = strings.Cut(s, "/")
		name, port, has := strings.Cut(host, ":")
		if !hostNameForm(name) || has && !portForm(port) {
			return false
		}
	}
	rest, digest, has := strings.Cut(rest, "@")
	if has && !ValidDigest(digest) {
		return false
	}
	rest, tag, has := strings.Cut(rest, ":")
	if has && !tagForm(tag) {
		return false
	}
	for part := range strings.SplitSeq(rest, "/") {
		if !nameForm(part) {
			return false
		}
	}
	return true
}

// ValidDigest tells whether s is sha256: and 64 lowercase hexadecimal digits.
func ValidDigest(s string) bool {
	h, ok := strings.CutPrefix(s, digestAlgorithm)
	return ok && len(h) == hexDigest && strings.Trim(h, "0123456789abcdef") == ""
}

func hostNameForm(s string) bool {
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || strings.HasPrefix(label, "-") || strings.HasSuffix(label, "-") ||
			strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return false
		}
	}
	return len(s) <= 253
}

func portForm(s string) bool {
	return s != "" && len(s) <= 5 && strings.Trim(s, "0123456789") == ""
}

func tagForm(s string) bool {
	for i, c := range []byte(s) {
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_'
		if !alnum && (i == 0 || c != '.' && c != '-') {
			return false
		}
	}
	return s != "" && len(s) <= maxTag
}

// ValidatePlatform accepts os/architecture[/variant], or none.
func ValidatePlatform(s string) error {
	parts := strings.Split(s, "/")
	ok := len(parts) == 2 || len(parts) == 3
	for _, p := range parts {
		ok = ok && nameForm(p)
	}
	if s != "" && !ok {
		return Errorf(ErrInvalid, "invalid_platform", "platform %.40q: use os/architecture or os/architecture/variant, as linux/amd64 or linux/arm64/v8", s)
	}
	return nil
}
