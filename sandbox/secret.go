package sandbox

import (
	"slices"
	"strconv"
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
	Hosts     []string  `json:"hosts,omitempty" doc:"Where it may be sent: example.com, *.example.com, or example.com:8443; ports 80 and 443 where none is named. Empty: to these ports of whatever host a policy sends it to."`
	CreatedAt time.Time `json:"created_at"`
	UpdatedAt time.Time `json:"updated_at"`
}

// For reports whether the secret may be sent to a port of a host, whose name
// must be normalised. What names no port means the web's own.
func (s Secret) For(host string, port uint16) bool {
	web := port == 80 || port == 443
	return len(s.Hosts) == 0 && web || slices.ContainsFunc(s.Hosts, func(to string) bool {
		h, p, given := strings.Cut(to, ":")
		return MatchesDomain(h, host) && (given && p == strconv.Itoa(int(port)) || !given && web)
	})
}

// checkSecretHost wants a name in lower case or *.name, and a port if any.
func checkSecretHost(to string) bool {
	h, p, given := strings.Cut(to, ":")
	name, err := NormalizeDomain(h)
	if err != nil || name != h || h == "*" || strings.HasSuffix(h, ".") {
		return false
	}
	n, err := strconv.ParseUint(p, 10, 16)
	return !given || err == nil && n > 0 && strconv.FormatUint(n, 10) == p
}

// SecretRequest sets a secret.
type SecretRequest struct {
	Value string   `json:"value" minLength:"1" maxLength:"65536" doc:"Sent as it is; never told again."`
	Hosts []string `json:"hosts,omitempty" maxItems:"32" doc:"Where it may be sent: example.com, *.example.com, or example.com:8443; ports 80 and 443 where none is named. Empty: to these ports of whatever host a policy sends it to."`
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
		if !checkSecretHost(h) {
			return bad("secret %s: host %.80q: use a name in lower case, or *.name, and where it is for another port than 80 and 443 a port, as example.com:8443", r.Name, h)
		}
	}
	return nil
}
