package runtime

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestAnswersOfPID1AreNoEnd: an error that PID 1 told is returned as it is, at
// once. The control broke off, and waits for what may have become of PID 1.
func TestAnswersOfPID1AreNoEnd(t *testing.T) {
	h := openWith(t, newKernel(t), t.TempDir(), perSecond())
	sb, err := h.Create(t.Context(), sandbox.CreateRequest{Actor: "uid:1"})
	if err != nil {
		t.Fatal(err)
	}
	b := h.box(sb.ID)
	took := func(code string) time.Duration {
		begun := time.Now()
		err := sandbox.Errorf(sandbox.ErrUnavailable, code, "reading: %w", io.ErrNoProgress)
		if got := h.fate(b, b.present(), err); !errors.Is(got, err) {
			t.Errorf("%s became %v", code, got)
		}
		return time.Since(begun)
	}
	if told, broke := took("file_failed"), took("sandbox_unreachable"); told > broke/2 {
		t.Errorf("told after %v, broken off after %v", told, broke)
	}
}
