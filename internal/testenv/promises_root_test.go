//go:build root

package testenv

import "testing"

// TestPromises is the root lanes' own check: each feature the run promised is
// really there, and the log shows what the others are missing.
func TestPromises(t *testing.T) {
	for _, f := range All() {
		t.Run(f.String(), func(t *testing.T) { Need(t, f) })
	}
}
