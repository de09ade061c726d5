package sandbox

import (
	"crypto/rand"
	"encoding/base32"
	"strings"
)

// ID names one sandbox: "sb" and 12 lowercase base32 characters (60 random
// bits). It has no dash, so that host names of the form <port>-<id> parse one
// way only, and with a one-letter prefix it fits a 15-byte link name. Every
// kernel object of a sandbox (cgroup, link, directory) is named after its ID.
type ID string

const (
	idPrefix = "sb"
	idRandom = 12
)

var base32lower = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// NewID returns a fresh random ID.
func NewID() ID { return ID(idPrefix + randomName()) }

// randomName returns lowercase base32 characters from the system's random
// source, which since Go 1.24 never fails.
func randomName() string {
	b := make([]byte, (idRandom*5+7)/8)
	_, _ = rand.Read(b)
	return base32lower.EncodeToString(b)[:idRandom]
}

// ParseID returns s as an ID, or an error of class ErrInvalid.
func ParseID(s string) (ID, error) {
	if len(s) != len(idPrefix)+idRandom || !strings.HasPrefix(s, idPrefix) || !isBase32Lower(s[len(idPrefix):]) {
		return "", Errorf(ErrInvalid, "invalid_id", "%.40q is not a sandbox id: want %q and %d characters of a-z and 2-7", s, idPrefix, idRandom)
	}
	return ID(s), nil
}

// IsIDPrefix reports whether s could be the beginning of an ID, so that a
// look-up by unique prefix makes sense.
func IsIDPrefix(s string) bool {
	if len(s) <= len(idPrefix) || len(s) > len(idPrefix)+idRandom {
		return false
	}
	return strings.HasPrefix(s, idPrefix) && isBase32Lower(s[len(idPrefix):])
}

func isBase32Lower(s string) bool {
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return false
		}
	}
	return true
}

// ProcessID names one process of one sandbox: "p" and a decimal number that
// counts up from 1 and is not used again after a stop and start.
type ProcessID string

// nameForm reports whether s has the form of a name. Written by hand: a
// compiled pattern would cost every PID 1 some 50 KiB.
func nameForm(s string) bool {
	for i, c := range []byte(s) {
		alnum := c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || c != '.' && c != '_' && c != '-') {
			return false
		}
	}
	return s != "" && len(s) <= 63
}

// ValidateName checks a name given by a person to a sandbox or an image.
// Names that look like ids are refused, or a name could shadow a sandbox.
func ValidateName(s string) error {
	if !nameForm(s) {
		return Errorf(ErrInvalid, "invalid_name", "name %.70q: use 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit", s)
	}
	if _, err := ParseID(s); err == nil {
		return Errorf(ErrInvalid, "invalid_name", "name %q has the form of a sandbox id: choose another", s)
	}
	return nil
}
