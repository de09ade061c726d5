//go:build root

package linux

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestClone3ByToken calls clone3 with arguments the kernel refuses, on a thread
// whose filter allows everything but that.
func TestClone3ByToken(t *testing.T) {
	token := ForkToken{0x0123456789abcdef, 0xfedcba9876543210}
	allow := []byte{unix.BPF_RET | unix.BPF_K, 0, 0, 0, 0, 0, 0xff, 0x7f}
	clone3 := func(token ForkToken) error {
		_, _, e := unix.RawSyscall6(unix.SYS_CLONE3, 0, 0, 0, uintptr(token[0]), uintptr(token[1]), 0)
		return e
	}
	err := OnThread(func() error {
		if err := errors.Join(SetNoNewPrivs(), SetSeccomp(AllowClone3(allow, token))); err != nil {
			return err
		}
		if err := clone3(token); !errors.Is(err, unix.EINVAL) {
			t.Errorf("with the token: %v, want the kernel's EINVAL", err)
		}
		for bit := range 128 {
			wrong := token
			wrong[bit/64] ^= 1 << (bit % 64)
			if err := clone3(wrong); !errors.Is(err, unix.ENOSYS) {
				t.Errorf("with bit %d wrong: %v", bit, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := clone3(ForkToken{}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("without a filter: %v", err)
	}
}
