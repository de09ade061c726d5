package initd

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

const sysctlDir = "/proc/sys/"

// ipcSysctls belong to the ipc namespace: its root may write them without any
// capability (ipc/ipc_sysctl.c, ipc/mq_sysctl.c). Where a kernel lacks one,
// there is nothing to restore.
var ipcSysctls = []string{
	"kernel/auto_msgmni", "kernel/msgmax", "kernel/msgmnb", "kernel/msgmni", "kernel/sem", "kernel/shm_rmid_forced",
	"kernel/shmall", "kernel/shmmax", "kernel/shmmni", "kernel/msg_next_id", "kernel/sem_next_id", "kernel/shm_next_id",
	"fs/mqueue/msg_default", "fs/mqueue/msg_max", "fs/mqueue/msgsize_default", "fs/mqueue/msgsize_max", "fs/mqueue/queues_max",
}

// SettingsEnv names the variable of PID 1's environment with what Settings
// found in a new ipc namespace of the same kernel.
const SettingsEnv = "SANDBOX_SETTINGS"

// Settings describes the settings of the calling thread's ipc namespace, which
// must be a new one. A daemon asks once and tells each PID 1, which may make
// no such namespace: to read them in each sandbox costs it the time.
func Settings() (string, error) {
	found, err := readSysctls()
	if err != nil {
		return "", err
	}
	b, err := json.Marshal(found)
	return string(b), err
}

// sysctls are the settings with the values that a new sandbox has.
type sysctls []*sysctl

type sysctl struct {
	name, fresh string
	fd          int // once it was read in this sandbox: to open it takes four times as long as to read it
}

func newSysctls() (sysctls, error) {
	var found map[string]string
	if told := os.Getenv(SettingsEnv); told != "" {
		if err := json.Unmarshal([]byte(told), &found); err != nil {
			return nil, fmt.Errorf("%s: %w", SettingsEnv, err)
		}
	} else {
		var err error
		if found, err = readSysctls(); err != nil {
			return nil, err
		}
	}
	var s sysctls
	for name, fresh := range found {
		s = append(s, &sysctl{name: name, fresh: fresh, fd: -1})
	}
	return s, nil
}

func readSysctls() (map[string]string, error) {
	found := map[string]string{}
	for _, name := range ipcSysctls {
		v, err := os.ReadFile(sysctlDir + name)
		switch {
		case errors.Is(err, os.ErrNotExist):
		case err != nil:
			return nil, err
		default:
			found[name] = strings.TrimSpace(string(v))
		}
	}
	return found, nil
}

// restore gives the settings that a workload may change their values back: on
// a thread that is the namespaces' root, as they ask for it by its id.
func (s sysctls) restore() error {
	var changed sysctls
	for _, v := range s {
		now, err := v.read()
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err == nil && now != v.fresh {
			changed = append(changed, v)
		}
	}
	if len(changed) == 0 {
		return nil
	}
	return linux.OnThread(func() error {
		if err := linux.SetThreadEUID(0); err != nil {
			return err
		}
		for _, v := range changed {
			if err := os.WriteFile(sysctlDir+v.name, []byte(v.fresh), 0); err != nil {
				return err
			}
		}
		return nil
	})
}

func (v *sysctl) read() (string, error) {
	path := sysctlDir + v.name
	if v.fd < 0 {
		var err error
		if v.fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return "", &os.PathError{Op: "open", Path: path, Err: err}
		}
	}
	var buf [128]byte // the longest are four numbers of 32 bits
	n, err := unix.Pread(v.fd, buf[:], 0)
	if err != nil {
		return "", &os.PathError{Op: "read", Path: path, Err: err}
	}
	return strings.TrimSpace(string(buf[:n])), nil
}
