package testenv

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

// probeLandlock puts a thread under a ruleset and sees it obeyed.
func probeLandlock() error {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return fmt.Errorf("landlock_create_ruleset: %w", errno)
	}
	if abi < 2 {
		return fmt.Errorf("ABI %d of Landlock; 2 or later is needed", abi)
	}
	dir, err := os.MkdirTemp("", "testenv-landlock-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	return onOwnThread(func() error {
		if err := os.Mkdir(filepath.Join(dir, "before"), 0o700); err != nil {
			return err
		}
		if err := restrictThread(); err != nil {
			return err
		}
		switch err := os.Mkdir(filepath.Join(dir, "after"), 0o700); {
		case err == nil:
			return errors.New("a Landlock ruleset against mkdir let it happen")
		case !errors.Is(err, unix.EACCES):
			return fmt.Errorf("mkdir under a Landlock ruleset against it: %w", err)
		}
		return nil
	})
}

func restrictThread() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	attr := unix.LandlockRulesetAttr{Handled_access_fs: unix.LANDLOCK_ACCESS_FS_MAKE_DIR}
	ruleset, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET,
		uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr.Handled_access_fs), 0) // ABI 2 knows this field alone
	if errno != 0 {
		return fmt.Errorf("landlock_create_ruleset: %w", errno)
	}
	defer func() { _ = unix.Close(int(ruleset)) }()
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0, 0); errno != 0 {
		return fmt.Errorf("landlock_restrict_self: %w", errno)
	}
	return nil
}
