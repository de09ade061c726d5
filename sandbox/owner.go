package sandbox

import (
	"strconv"
	"strings"
)

// ValidateOwner checks the name of an owner: one that may have keys, or uid:N
// of a user of this machine. Class ErrInvalid, code invalid_owner.
func ValidateOwner(s string) error {
	if digits, ok := strings.CutPrefix(s, "uid:"); ok {
		if n, err := strconv.ParseUint(digits, 10, 32); err == nil && strconv.FormatUint(n, 10) == digits {
			return nil
		}
	}
	if !nameForm(s) || strings.HasPrefix(s, "uid-") { // see access.ValidateOwner
		return Errorf(ErrInvalid, "invalid_owner", "owner %.80q: use 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit and not with uid-, or uid:N for a user of this machine", s)
	}
	return nil
}
