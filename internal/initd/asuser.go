package initd

import (
	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// asUser runs f on a thread that has become the user for every file access
// and has given up all capabilities, but for user 0 those of the profile.
// The thread ends with it. A nil profile means none.
func asUser(acc account, profile *sandbox.Capabilities, f func() error) error {
	return linux.OnThread(func() error {
		var caps uint64
		if profile != nil && acc.uid == 0 {
			caps = profiles[*profile]
		}
		if err := become(acc, caps); err != nil {
			return err
		}
		return f()
	})
}

func become(acc account, caps uint64) error {
	if err := linux.SetThreadGroups(acc.groups); err != nil {
		return err
	}
	if err := linux.SetFSIDs(acc.uid, acc.gid); err != nil {
		return err
	}
	return linux.SetCapabilities(caps)
}
