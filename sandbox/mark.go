package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
)

// Names of volumes, secrets and network groups are the daemon's: one means the
// same thing to everybody. So those of a developer are kept as NAME.MARK, with a
// mark of the owner, whom they are shown to without it.

// MarkLength is how long a mark is, with its dot. The bytes of a SHA-256 behind it
// keep owners apart.
const (
	MarkLength = 1 + 2*markBytes
	markBytes  = 5
)

// OwnerMark is what the kept names of an owner's things end with.
func OwnerMark(owner string) string {
	sum := sha256.Sum256([]byte(owner))
	return "." + hex.EncodeToString(sum[:markBytes])
}

// Unmarked is a kept name as its owner says it, whoever that is.
func Unmarked(name string) string {
	at := len(name) - MarkLength
	if at <= 0 || name[at] != '.' || strings.Trim(name[at+1:], "0123456789abcdef") != "" {
		return name
	}
	return name[:at]
}

// Unmarked is a policy as an owner says it. The receiver is not changed.
func (p NetworkPolicy) Unmarked(mark string) NetworkPolicy {
	p = p.Clone()
	p.Group = strings.TrimSuffix(p.Group, mark)
	if p.HTTP != nil {
		for i := range p.HTTP.Inject {
			p.HTTP.Inject[i].Secret = strings.TrimSuffix(p.HTTP.Inject[i].Secret, mark)
		}
	}
	return p
}

// Unmarked is a spec as an owner says it. The receiver is not changed.
func (s Spec) Unmarked(mark string) Spec {
	s.Network, s.Volumes = s.Network.Unmarked(mark), slices.Clone(s.Volumes)
	for i := range s.Volumes {
		s.Volumes[i].Volume = strings.TrimSuffix(s.Volumes[i].Volume, mark)
	}
	return s
}
