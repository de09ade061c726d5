package access

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Key is an API key. The daemon keeps the SHA-256 of its secret and nothing
// the secret could be found by.
type Key struct {
	ID        string     `json:"id"`
	Owner     string     `json:"owner" doc:"To whom belongs what is made with it."`
	Role      Role       `json:"role" doc:"admin, operator, developer or viewer; the owner's role bounds it."`
	Name      string     `json:"name,omitempty" doc:"For people."`
	Begins    string     `json:"begins" doc:"The first characters of the secret, to tell keys apart."`
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
	UsedAt    *time.Time `json:"used_at,omitempty" doc:"When it was last used, to the minute."`
	RevokedAt *time.Time `json:"revoked_at,omitempty"`
	Secret    string     `json:"secret,omitempty" doc:"Shown by the creation alone: nobody can read it again."`

	Hash [sha256.Size]byte `json:"-"`
}

// String keeps the secret out of whatever prints a key.
func (k Key) String() string { return "key " + k.ID + " of " + k.Owner }

// GoString does what String does for %#v.
func (k Key) GoString() string { return k.String() }

// Owner is somebody to whom objects belong.
type Owner struct {
	Name      string    `json:"name" doc:"A name, or uid:N of a user on the unix socket."`
	Role      Role      `json:"role" doc:"The most its keys may be; of uid:N what that user is."`
	Quota     Quota     `json:"quota"`
	CreatedAt time.Time `json:"created_at"`
	Disabled  bool      `json:"disabled" doc:"None of its keys works, nor its way over the socket."`
}

const (
	secretPrefix = "e2b_"
	secretBytes  = 32
	beginsLength = len(secretPrefix) + 6 // of what is kept of a secret as it is
)

// newSecret draws the secret of a key.
func newSecret() string {
	var b [secretBytes]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return secretPrefix + hex.EncodeToString(b[:])
}

// hashOf is what is kept of a secret. One that is drawn from 256 bits needs
// no slow hash: there is nothing to try.
func hashOf(secret string) [sha256.Size]byte { return sha256.Sum256([]byte(secret)) }

// wellFormed reports whether a text can be a secret of ours.
func wellFormed(secret string) bool {
	hexed, ok := strings.CutPrefix(secret, secretPrefix)
	return ok && len(hexed) == 2*secretBytes && strings.Trim(hexed, "0123456789abcdef") == ""
}

func newKeyID() string { return "key_" + strings.ToLower(rand.Text()[:16]) }

// Valid reports whether there is such a role.
func (r Role) Valid() bool { return slices.Contains(Roles(), r) }

// AtLeast reports whether a role has all the rights of another.
func (r Role) AtLeast(least Role) bool {
	all := Roles()
	mine := slices.Index(all, r)
	return mine >= 0 && mine <= slices.Index(all, least)
}

// lower returns the role with fewer rights.
func lower(a, b Role) Role {
	if a.AtLeast(b) {
		return b
	}
	return a
}

var (
	ownerForm = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
	uidForm   = regexp.MustCompile(`^uid:(0|[1-9][0-9]{0,9})$`)
)

// ValidateOwner checks the name of an owner that may have keys. Class
// ErrInvalid.
func ValidateOwner(name string) error {
	if !ownerForm.MatchString(name) {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_owner", "owner %.80q: use 1 to 63 of a-z, 0-9, '.', '_' and '-', with a letter or digit first", name)
	}
	// Images of uid:1000 are named own/uid-1000/…: nobody else may be called so.
	if strings.HasPrefix(name, "uid-") {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_owner", "owner %.80q: names that begin with uid- are kept for users of this machine, who are written uid:N", name)
	}
	return nil
}

// validateRole checks a role. Class ErrInvalid.
func validateRole(r Role) error {
	if !r.Valid() {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_role", "role %.40q: use admin, operator, developer or viewer", r)
	}
	return nil
}

// Validate checks a quota. Class ErrInvalid.
func (q Quota) Validate() error {
	bad := q.Sandboxes < 0 || q.CPUs < 0 || q.CPUs > 1<<20 || q.MemoryBytes < 0 || q.DiskBytes < 0 || q.PerMinute < 0 || q.Lifetime < 0 || q.Idle < 0
	if bad || q.CPUs != q.CPUs { //nolint:gocritic // NaN
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_quota", "a quota's bounds are not negative; 0 means none")
	}
	return nil
}

// DefaultQuota bounds an owner of a role of whom nothing else was said.
func DefaultQuota(r Role) Quota {
	if r.AtLeast(RoleOperator) {
		return Quota{}
	}
	return DeveloperQuota()
}
