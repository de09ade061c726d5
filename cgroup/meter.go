package cgroup

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// meterFiles are the files one sandbox is metered by, kept open. A cgroup that
// was removed answers ENODEV, also when another of its name was made since.
type meterFiles struct {
	mu              sync.Mutex
	cpu, memory, io int // -1: this host has none
	closed          bool
}

// maxMeterFile is more than any of the files holds, but for io.stat of a host
// with some fifty disks, of which the rest is left out until the next Usage.
const maxMeterFile = 8 << 10

// Meter is Usage for who asks of many sandboxes and often: processor time,
// memory now and bytes of I/O, and nothing else. ErrNotFound where the sandbox
// has no cgroup, or none with a workload yet.
func (t *Tree) Meter(id sandbox.ID) (sandbox.Usage, error) {
	u, err := t.meter(id)
	if errors.Is(err, unix.ENODEV) { // the one before, or its end
		t.closeMeter(id)
		u, err = t.meter(id)
	}
	if err != nil {
		return sandbox.Usage{}, fmt.Errorf("metering %s: %w", id, notFound(id, err))
	}
	return u, nil
}

func (t *Tree) meter(id sandbox.ID) (u sandbox.Usage, err error) {
	f, err := t.meterFiles(id)
	if err != nil {
		return u, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return u, unix.ENODEV
	}
	var buf [maxMeterFile]byte
	s, err := readAt(f.cpu, buf[:])
	if err != nil {
		return u, err
	}
	u.CPUMicros = flatKey(s, "usage_usec")
	if f.memory >= 0 {
		if s, err = readAt(f.memory, buf[:]); err != nil {
			return u, err
		}
		if u.MemoryBytes, err = strconv.ParseUint(strings.TrimSpace(s), 10, 64); err != nil {
			return u, err
		}
	}
	if f.io >= 0 {
		if s, err = readAt(f.io, buf[:]); err != nil {
			return u, err
		}
		u.IOReadBytes, u.IOWriteBytes = t.disks.add(s)
	}
	return u, nil
}

// meterFiles returns a sandbox's open files, and opens them the first time.
func (t *Tree) meterFiles(id sandbox.ID) (f *meterFiles, err error) {
	t.metersMu.Lock()
	defer t.metersMu.Unlock()
	if f = t.meters[id]; f != nil {
		return f, nil
	}
	dir, err := t.at(id, partID)
	if err != nil {
		return nil, err
	}
	work, err := t.at(id, partWork)
	if err != nil {
		return nil, err
	}
	f = &meterFiles{cpu: -1, memory: -1, io: -1}
	for _, o := range []struct {
		into *int
		path string
		has  bool
	}{
		{&f.cpu, filepath.Join(dir, "cpu.stat"), true},
		{&f.memory, filepath.Join(work, "memory.current"), t.has(ctlMemory)},
		{&f.io, filepath.Join(dir, "io.stat"), t.has(ctlIO)},
	} {
		if !o.has {
			continue
		}
		if *o.into, err = unix.Open(o.path, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			f.close()
			return nil, &os.PathError{Op: "open", Path: o.path, Err: err}
		}
	}
	t.meters[id] = f
	return f, nil
}

// closeMeter closes a sandbox's files. Repeating it does nothing.
func (t *Tree) closeMeter(id sandbox.ID) {
	t.metersMu.Lock()
	f := t.meters[id]
	delete(t.meters, id)
	t.metersMu.Unlock()
	if f != nil {
		f.close()
	}
}

func (f *meterFiles) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	for _, fd := range []*int{&f.cpu, &f.memory, &f.io} {
		if *fd >= 0 {
			_ = unix.Close(*fd) // opened for reading: nothing to lose
			*fd = -1
		}
	}
}

// readAt reads a control file from its beginning.
func readAt(fd int, buf []byte) (string, error) {
	for {
		n, err := unix.Pread(fd, buf, 0)
		if err == nil {
			return string(buf[:n]), nil
		}
		if !errors.Is(err, unix.EINTR) {
			return "", err
		}
	}
}

// disks remembers which devices are stacked on others: see stacked.
type disks struct {
	mu    sync.Mutex
	asked time.Time
	above map[string]bool // by "MAJ:MIN"
}

// disksAfter is how long that is believed.
const disksAfter = time.Minute

// add adds up io.stat over the devices that are not stacked on others.
func (d *disks) add(stat string) (read, written uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now := time.Now(); d.above == nil || now.Sub(d.asked) > disksAfter {
		d.above, d.asked = map[string]bool{}, now
	}
	for line := range strings.Lines(stat) {
		device, rest, ok := strings.Cut(strings.TrimSpace(line), " ")
		major, minor, ok2 := strings.Cut(device, ":")
		if !ok || !ok2 {
			continue
		}
		above, known := d.above[device]
		if !known {
			a, err := strconv.ParseUint(major, 10, 32)
			b, err2 := strconv.ParseUint(minor, 10, 32)
			above = err != nil || err2 != nil || stacked("/sys", a, b)
			d.above[device] = above
		}
		if above {
			continue
		}
		for field := range strings.FieldsSeq(rest) {
			key, value, _ := strings.Cut(field, "=")
			n, err := strconv.ParseUint(value, 10, 63)
			if err != nil {
				continue
			}
			switch key {
			case "rbytes":
				read = min(read+n, math.MaxInt64)
			case "wbytes":
				written = min(written+n, math.MaxInt64)
			}
		}
	}
	return read, written
}
