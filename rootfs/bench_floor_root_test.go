//go:build root

package rootfs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// BenchmarkCopyFloor puts a first copy of 1 GiB in 10,000 files, all on disk,
// beside cp -a and beside the least that such a copy needs of the kernel: the
// names known beforehand, and for each file open, create, FICLONE, utimensat
// and two times close, on 1, 2 and 4 threads. All take turns. Of each it tells
// the least wall time, and the least processor time.
func BenchmarkCopyFloor(b *testing.B) {
	s := openXFS(b, 6<<30)
	id := create(b, s)
	upper := fillUpper(b, s, id, benchFiles, benchSize)
	ways := []floorWay{
		{"ours", func() error {
			_, err := s.CopyUpper(b.Context(), id, NewUpperLayer())
			return err
		}},
		{"cp", func() error { return cpTo(b, s, "auto", upper) }},
	}
	for _, threads := range []int{1, 2, 4} {
		ways = append(ways, floorWay{fmt.Sprintf("floor-%d", threads), func() error {
			return copyFloor(s, upper, threads)
		}})
	}
	wall, cpu := map[string][]time.Duration{}, map[string][]time.Duration{}
	for b.Loop() {
		for _, w := range ways {
			if err := s.Sync(); err != nil {
				b.Fatal(err)
			}
			begin, used := time.Now(), processorTime(b)
			if err := w.copy(); err != nil {
				b.Fatal(err)
			}
			cpu[w.name] = append(cpu[w.name], processorTime(b)-used)
			wall[w.name] = append(wall[w.name], time.Since(begin))
			if err := s.forget(id); err != nil {
				b.Fatal(err)
			}
			clearVolume(b, s, id, false)
		}
	}
	for _, w := range ways {
		slices.Sort(wall[w.name])
		b.ReportMetric(float64(wall[w.name][0].Microseconds())/1000, w.name+"-ms")
		b.ReportMetric(float64(slices.Min(cpu[w.name]).Microseconds())/1000, w.name+"-cpu-ms")
	}
}

type floorWay struct {
	name string
	copy func() error
}

// processorTime is what this process and its children used.
func processorTime(b *testing.B) (sum time.Duration) {
	b.Helper()
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var ru unix.Rusage
		if err := unix.Getrusage(who, &ru); err != nil {
			b.Fatal(err)
		}
		sum += time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	}
	return sum
}

func cpTo(b *testing.B, s *Store, reflink, upper string) error {
	b.Helper()
	to := s.vol.path(stagingDir, fmt.Sprint(time.Now().UnixNano()))
	out, err := exec.CommandContext(b.Context(), "cp", "-a", "--reflink="+reflink, upper, to).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return err
}

// copyFloor clones what fillUpper made.
func copyFloor(s *Store, upper string, threads int) error {
	to := s.vol.path(stagingDir, fmt.Sprint(time.Now().UnixNano()))
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	var next atomic.Int64
	var all sync.WaitGroup
	errs := make([]error, threads)
	for t := range threads {
		all.Go(func() {
			errs[t] = linux.OnThread(func() error {
				for {
					d := int(next.Add(1)) - 1
					if d >= benchFiles/100 {
						return nil
					}
					dir := fmt.Sprintf("d%d", d)
					if err := floorDir(filepath.Join(upper, dir), filepath.Join(to, dir), d*100); err != nil {
						return err
					}
				}
			})
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// floorDir clones 100 files without a word to Go's scheduler.
func floorDir(from, to string, first int) error {
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	src, err := unix.Open(from, openDirFlags, 0)
	if err != nil {
		return err
	}
	defer unix.Close(src)
	dst, err := unix.Open(to, openDirFlags, 0)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	when := [2]unix.Timespec{{Sec: 1, Nsec: 2}, {Sec: 3, Nsec: 4}}
	for i := first; i < first+100; i++ {
		name, err := unix.BytePtrFromString(fmt.Sprintf("f%d", i))
		if err != nil {
			return err
		}
		path := uintptr(unsafe.Pointer(name))
		in, _, e1 := unix.RawSyscall6(unix.SYS_OPENAT, uintptr(src), path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NOATIME|unix.O_CLOEXEC, 0, 0, 0)
		out, _, e2 := unix.RawSyscall6(unix.SYS_OPENAT, uintptr(dst), uintptr(unsafe.Pointer(name)), unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o644, 0, 0)
		_, _, e3 := unix.RawSyscall(unix.SYS_IOCTL, out, unix.FICLONE, in)
		_, _, e4 := unix.RawSyscall6(unix.SYS_UTIMENSAT, out, 0, uintptr(unsafe.Pointer(&when)), 0, 0, 0)
		_, _, e5 := unix.RawSyscall(unix.SYS_CLOSE, in, 0, 0)
		_, _, e6 := unix.RawSyscall(unix.SYS_CLOSE, out, 0, 0)
		for _, e := range []unix.Errno{e1, e2, e3, e4, e5, e6} {
			if e != 0 {
				return e
			}
		}
	}
	return nil
}
