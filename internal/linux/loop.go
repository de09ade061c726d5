package linux

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// LoopDevice returns an open loop device over the whole of image, which must
// be open for reading and writing. A device that already has this file behind
// it is reused: two devices over one filesystem image would corrupt it. The
// device frees itself when its last user (a mount, or the returned file) is
// gone. See loop(4).
func LoopDevice(image *os.File) (*os.File, error) {
	for range 64 { // another process may take the free device first
		dev, err := findLoop(image)
		if dev != nil || err != nil {
			return dev, err
		}
		dev, err = newLoop(image)
		if dev != nil || err != nil {
			return dev, err
		}
	}
	return nil, fmt.Errorf("loop device for %s: every free device was taken by others: %w", image.Name(), unix.EBUSY)
}

func findLoop(image *os.File) (*os.File, error) {
	var want unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &want); err != nil {
		return nil, &os.PathError{Op: "fstat", Path: image.Name(), Err: err}
	}
	bound, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return nil, err
	}
	for _, b := range bound {
		dev, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(b)), os.O_RDWR, 0)
		if err != nil {
			continue // freed meanwhile, or not ours to open
		}
		info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
		if err == nil && info.Device == uint64(want.Dev) && info.Inode == want.Ino && info.Offset == 0 && info.Sizelimit == 0 {
			return dev, nil
		}
		_ = dev.Close() // read-only use
	}
	return nil, nil
}

// newLoop returns nil, nil when another process was quicker.
func newLoop(image *os.File) (*os.File, error) {
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("loop device: %w", err)
	}
	defer ctl.Close()
	n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return nil, os.NewSyscallError("LOOP_CTL_GET_FREE", err)
	}
	dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("loop device: %w", err)
	}
	cfg := unix.LoopConfig{Fd: uint32(image.Fd())}
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], image.Name())
	// Direct I/O keeps the image's pages from being cached twice; a backing
	// filesystem that cannot is used without.
	for _, flags := range []uint32{unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO, unix.LO_FLAGS_AUTOCLEAR} {
		cfg.Info.Flags = flags
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &cfg)
		if !errors.Is(err, unix.EINVAL) {
			break
		}
	}
	switch {
	case err == nil:
		return dev, nil
	case errors.Is(err, unix.EBUSY):
		return nil, dev.Close()
	}
	_ = dev.Close() // the first error counts
	return nil, os.NewSyscallError("LOOP_CONFIGURE", err)
}
