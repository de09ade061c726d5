package sandbox

import (
	"slices"
	"strings"
	"time"
)

// MaxSecretBytes is the size of the longest secret.
const MaxSecretBytes = 64 << 10

// maxSecretHosts bounds the hosts a secret is for.
const maxSecretHosts = 32

// Secret is a value the daemon keeps and adds to requests on their way out of
// sandboxes. The value itself is told to nobody.
type Secret struct {
	Name      string    `json:"name"`
	Owner     string    `json:"owner,omitempty" doc:"Who set it last."`
	Hosts     []string  `json:"hosts,omitempty" doc:"Where it may be sent: example.com, or *.example.com. Empty: wherever a policy sends it."`
	CreatedAt time.Time `json:"created_at"`
	UpdatedAt time.Time `json:"updated_at"`
}

// For reports whether the secret may be sent to a host, whose name must be
// normalised.
func (s Secret) For(host string) bool {
	return len(s.Hosts) == 0 || slices.ContainsFunc(s.Hosts, func(h string) bool { return MatchesDomain(h, host) })
}

// SecretRequest sets a secret.
type SecretRequest struct {
	Value string   `json:"value" minLength:"1" maxLength:"65536" doc:"Sent as it is; never told again."`
	Hosts []string `json:"hosts,omitempty" maxItems:"32" doc:"Where it may be sent: example.com, or *.example.com. Empty: wherever a policy sends it."`
	Name  string   `json:"-"`
	Actor string   `json:"-"`
}

// String keeps the value out of whatever prints a request.
func (r SecretRequest) String() string { return "secret " + r.Name }

// GoString does what String does for %#v.
func (r SecretRequest) GoString() string { return r.String() }

// Validate checks what can be judged without a host. Class ErrInvalid; errors
// never hold the value.
func (r SecretRequest) Validate() error {
	if err := ValidateName(r.Name); err != nil {
		return err
	}
	bad := func(format string, args ...any) error { return Errorf(ErrInvalid, "invalid_secret", format, args...) }
	switch {
	case r.Value == "":
		return bad("secret %s: it is empty", r.Name)
	case len(r.Value) > MaxSecretBytes:
		return bad("secret %s: %d bytes, at most %d", r.Name, len(r.Value), MaxSecretBytes)
	case strings.ContainsFunc(r.Value, func(c rune) bool { return c < 0x20 && c != '\t' || c == 0x7f }):
		return bad("secret %s: it holds line ends or other control characters, which no header may", r.Name)
	case strings.TrimSpace(r.Value) != r.Value:
		return bad("secret %s: it begins or ends with white space, which servers cut off", r.Name)
	case len(r.Hosts) > maxSecretHosts:
		return bad("secret %s: at most %d hosts, %d given", r.Name, maxSecretHosts, len(r.Hosts))
	}
	for _, h := range r.Hosts {
		if name, err := NormalizeDomain(h); err != nil || name != h || h == "*" || strings.HasSuffix(h, ".") {
			return bad("secret %s: host %.80q: use a name in lower case, or *.name", r.Name, h)
		}
	}
	return nil
}
