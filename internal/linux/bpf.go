package linux

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// AttachDeviceProgram adds a device program to a cgroup, both given by
// descriptors (bpf(2), BPF_PROG_ATTACH). What is there already stays and must
// agree.
func AttachDeviceProgram(cgroup, program int) error {
	attr := struct{ target, program, kind, flags, replace uint32 }{
		uint32(cgroup), uint32(program), unix.BPF_CGROUP_DEVICE, unix.BPF_F_ALLOW_MULTI, 0,
	}
	_, err := bpf(unix.BPF_PROG_ATTACH, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	return err
}

// DeviceProgram returns a descriptor, closed on exec, of the one device program
// attached to a cgroup, and an error where there are more or none.
func DeviceProgram(cgroup int) (int, error) {
	ids := new([2]uint32)
	// All of it: kernels from 6.17 on write the revision whatever the size given.
	attr := &struct {
		target, kind, query, flags uint32
		ids                        unsafe.Pointer
		count, _                   uint32
		_, _, _, revision          uint64
	}{target: uint32(cgroup), kind: unix.BPF_CGROUP_DEVICE, ids: unsafe.Pointer(ids), count: uint32(len(ids))}
	if _, err := bpf(unix.BPF_PROG_QUERY, unsafe.Pointer(attr), unsafe.Sizeof(*attr)); err != nil {
		return 0, fmt.Errorf("ask for a cgroup's device program: %w", err)
	}
	if attr.count != 1 {
		return 0, fmt.Errorf("the cgroup has %d device programs: %w", attr.count, unix.EINVAL)
	}
	id := struct{ id uint32 }{ids[0]}
	return bpf(unix.BPF_PROG_GET_FD_BY_ID, unsafe.Pointer(&id), unsafe.Sizeof(id))
}

// bpf is bpf(2). Descriptors it makes are closed on exec.
func bpf(cmd uintptr, attr unsafe.Pointer, size uintptr) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_BPF, cmd, uintptr(attr), size)
	if errno != 0 {
		return 0, errno
	}
	return int(r), nil
}
