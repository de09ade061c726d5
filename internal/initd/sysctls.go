package initd

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

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

// pidMax belongs to the pid namespace from Linux 6.14 on, where a new one has
// the kernel's own bound (PID_MAX_LIMIT); before, only the host may write it.
const (
	pidMax      = "kernel/pid_max"
	pidMaxFresh = "4194304"
)

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

// sysctls holds the values that a new sandbox has, by path below sysctlDir.
type sysctls map[string]string

func newSysctls() (sysctls, error) {
	told := os.Getenv(SettingsEnv)
	if told == "" {
		return readSysctls()
	}
	var s sysctls
	if err := json.Unmarshal([]byte(told), &s); err != nil {
		return nil, fmt.Errorf("%s: %w", SettingsEnv, err)
	}
	return s, nil
}

func readSysctls() (sysctls, error) {
	found := sysctls{}
	for _, name := range ipcSysctls {
		v, err := readSysctl(name)
		switch {
		case errors.Is(err, os.ErrNotExist):
		case err != nil:
			return nil, err
		default:
			found[name] = v
		}
	}
	found[pidMax] = pidMaxFresh
	return found, nil
}

// restore gives the settings that a workload may change their values back: on
// a thread that is the namespaces' root, as they ask for it by its id.
func (s sysctls) restore() error {
	changed := sysctls{}
	for name, want := range s {
		now, err := readSysctl(name)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err == nil && now != want {
			changed[name] = want
		}
	}
	if len(changed) == 0 {
		return nil
	}
	return linux.OnThread(func() error {
		if err := linux.SetThreadEUID(0); err != nil {
			return err
		}
		for name, want := range changed {
			err := os.WriteFile(sysctlDir+name, []byte(want), 0)
			if err != nil && (name != pidMax || !notOurs(err)) {
				return err
			}
		}
		return nil
	})
}

func readSysctl(name string) (string, error) {
	b, err := os.ReadFile(sysctlDir + name)
	return strings.TrimSpace(string(b)), err
}
