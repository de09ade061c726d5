//go:build root

package rootfs

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// maxWeight is what a process may weigh whatever it imports.
const maxWeight = 256 << 20

// heavy layers, by name: each is written twice, to know its digest and to be
// imported. n is how many entries it has, where that matters.
var heavy = map[string]struct {
	write func(w io.Writer, n int) error
	pack  func(w io.Writer) io.WriteCloser // how it is compressed; nil: not
	code  string                           // it is refused with, if it is
}{
	"files":       {write: entries(func(i int) tarEntry { return tarEntry{name: fmt.Sprintf("d%d/%0200d", i%8, i)} })},
	"directories": {write: entries(func(i int) tarEntry { return tarEntry{name: fmt.Sprintf("d%d/%d/", i%256, i)} })},
	"deep": {write: func(w io.Writer, n int) error {
		return entries(func(i int) tarEntry {
			return tarEntry{name: strings.Repeat("d/", i%200) + fmt.Sprintf("%0200d", i)}
		})(w, n/2)
	}},
	"deletions": {write: entries(func(i int) tarEntry { return tarEntry{name: fmt.Sprintf("d%d/.wh.%0200d", i%8, i)} })},
	"one name":  {write: entries(func(int) tarEntry { return tarEntry{name: "x", data: "x"} })},
	"big pax headers": {write: func(w io.Writer, n int) error {
		return entries(func(i int) tarEntry {
			return tarEntry{name: fmt.Sprint(i), pax: map[string]string{"COMMENT.x": strings.Repeat("x", 1<<20-100)}}
		})(w, max(n/4000, 20))
	}},
	"big attributes": {write: func(w io.Writer, n int) error {
		return entries(func(i int) tarEntry {
			return tarEntry{name: fmt.Sprint(i), pax: xattrs("trusted.x", strings.Repeat("x", 1<<19), "security.y", strings.Repeat("y", 1<<18))}
		})(w, max(n/4000, 20))
	}},
	"holes":          {write: func(w io.Writer, _ int) error { return writeSparse(w, 2<<30) }},
	"gzip of zeroes": {write: zeroTail(64 << 20), pack: func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) }},
	"zstd of zeroes": {write: zeroTail(64 << 20), pack: zstdWith(8 << 20)},
	"zstd, a large window": {write: func(w io.Writer, n int) error {
		rnd := rand.NewChaCha8([32]byte{1})
		return entries(func(i int) tarEntry {
			b := make([]byte, 1<<20)
			_, _ = rnd.Read(b)
			return tarEntry{name: fmt.Sprint(i), data: string(b)}
		})(w, max(n/6000, 40)) // MiB; in the long run, more than the window
	}, pack: zstdWith(zstdWindow)},
	"zstd, too large a window": {write: zeroTail(1 << 20), pack: zstdWith(2 * zstdWindow), code: "image_too_large"},
}

func entries(entry func(i int) tarEntry) func(io.Writer, int) error {
	return func(w io.Writer, n int) error {
		tw := tar.NewWriter(w)
		for i := range n {
			e := entry(i)
			if err := tw.WriteHeader(e.header()); err != nil {
				return err
			}
			if _, err := io.WriteString(tw, e.data); err != nil {
				return err
			}
		}
		return tw.Close()
	}
}

// zeroTail is an archive of one file with so much padding behind.
func zeroTail(n int64) func(io.Writer, int) error {
	return func(w io.Writer, _ int) error {
		if err := entries(func(int) tarEntry { return tarEntry{name: "f", data: "x"} })(w, 1); err != nil {
			return err
		}
		_, err := io.CopyN(w, zeroes{}, n)
		return err
	}
}

func zstdWith(window int) func(io.Writer) io.WriteCloser {
	return func(w io.Writer) io.WriteCloser {
		z, err := zstd.NewWriter(w, zstd.WithWindowSize(window), zstd.WithSingleSegment(false), zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
		if err != nil {
			panic(err)
		}
		return z
	}
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// weighImports imports layers at once, as many as a daemon does, and says
// what the process has weighed at most.
func weighImports(arg string) int {
	var ask weighRequest
	fail := func(err error) int {
		_ = json.NewEncoder(os.Stdout).Encode(weighAnswer{Err: err.Error()})
		return 1
	}
	if err := json.Unmarshal([]byte(arg), &ask); err != nil {
		return fail(err)
	}
	// In memory, for speed: what the kernel holds is not weighed.
	if err := unix.Mount("tmpfs", ask.Dir, "tmpfs", 0, "mode=0700"); err != nil {
		return fail(err)
	}
	if err := os.MkdirAll(filepath.Join(ask.Dir, "volume", layersDir), 0o700); err != nil {
		return fail(err)
	}
	s, err := Open(context.Background(), Config{Dir: ask.Dir, BestEffort: true})
	if err != nil {
		return fail(err)
	}
	codes := make(chan string, ask.Parallel)
	for range ask.Parallel {
		go func() {
			r, err := os.Open(ask.File)
			if err == nil {
				defer r.Close()
				_, err = s.ImportLayer(context.Background(), ask.DiffID, r)
			}
			var code string
			if err != nil {
				if code = sandbox.CodeOf(err); code == "internal" {
					code = err.Error()
				}
			}
			codes <- code
		}()
	}
	var ans weighAnswer
	for range ask.Parallel {
		ans.Codes = append(ans.Codes, <-codes)
	}
	if info, err := s.Layer(ask.DiffID); err == nil {
		ans.Files = info.Files
		if ask.Export {
			if _, err := s.ExportLayer(context.Background(), []string{ask.DiffID}, 0, io.Discard); err != nil {
				return fail(err)
			}
		}
	}
	ans.Peak = peak()
	if err := json.NewEncoder(os.Stdout).Encode(ans); err != nil {
		return 1
	}
	return 0
}

type weighRequest struct {
	Dir, File, DiffID string
	Parallel          int
	Export            bool
}

type weighAnswer struct {
	Peak, Files int64
	Codes       []string
	Err         string
}

// peak is the largest resident set this process ever had.
func peak() int64 {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 1 << 62
	}
	for line := range strings.Lines(string(b)) {
		var kb int64
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kb); n == 1 {
			return kb << 10
		}
	}
	return 1 << 62
}

// TestWeight imports layers made to be heavy, each twice at once in a process
// of its own. The long run (make soak) has a million entries.
func TestWeight(t *testing.T) {
	testenv.Need(t, testenv.Root)
	n := 10_000
	if os.Getenv("SANDBOXD_SOAK") != "" {
		n = 1_000_000
	}
	for name, h := range heavy {
		t.Run(name, func(t *testing.T) {
			file, err := os.CreateTemp(t.TempDir(), "layer")
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			sum := sha256.New()
			var packed io.WriteCloser = nopCloser{file}
			if h.pack != nil {
				packed = h.pack(file)
			}
			if err := h.write(io.MultiWriter(packed, sum), n); err != nil {
				t.Fatal(err)
			}
			if err := packed.Close(); err != nil {
				t.Fatal(err)
			}
			ask, err := json.Marshal(weighRequest{
				Dir: t.TempDir(), File: file.Name(), DiffID: digestPrefix + hex.EncodeToString(sum.Sum(nil)),
				Parallel: parallelImports, Export: name != "holes",
			})
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), envWeigh+"="+string(ask))
			cmd.Stderr = os.Stderr
			cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
			out, err := cmd.Output()
			var ans weighAnswer
			if jerr := json.Unmarshal(out, &ans); err != nil || jerr != nil || ans.Err != "" {
				t.Fatalf("%v %v %s", err, jerr, out)
			}
			for _, c := range ans.Codes {
				if c != h.code {
					t.Errorf("ended with %q, want %q", c, h.code)
				}
			}
			t.Logf("%d files, at most %d MiB", ans.Files, ans.Peak>>20)
			if ans.Peak > maxWeight {
				t.Errorf("the process weighed %d MiB, at most %d are allowed", ans.Peak>>20, maxWeight>>20)
			}
		})
	}
}

// writeSparse writes an archive with one file of size bytes, all a hole but
// for the last block, in the old GNU way, which archive/tar reads but does
// not write.
func writeSparse(w io.Writer, size int64) error {
	return writeSparseAs(w, size, [][2]int64{{size - 512, 512}}, 512)
}

// writeSparseAs writes a sparse entry with the map given, true or not.
func writeSparseAs(w io.Writer, size int64, regions [][2]int64, stored int64) error {
	h := make([]byte, 512)
	number := func(at, n int, v int64) { // octal, or base 256 where that does not fit
		if v >= 0 && v < 1<<33 {
			copy(h[at:], fmt.Sprintf("%0*o", n-1, v))
			return
		}
		for i := at + n - 1; i >= at; i-- {
			h[i], v = byte(v), v>>8
		}
		h[at] |= 0x80
	}
	copy(h, "hole")
	number(100, 8, 0o644)
	number(108, 8, 0)
	number(116, 8, 0)
	number(124, 12, stored)
	number(136, 12, 1e9)
	h[156] = tar.TypeGNUSparse
	copy(h[257:], "ustar  \x00")
	for i, r := range regions {
		number(386+24*i, 12, r[0])
		number(398+24*i, 12, r[1])
	}
	number(483, 12, size)
	copy(h[148:], "        ")
	var sum int64
	for _, b := range h {
		sum += int64(b)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	if _, err := w.Write(h); err != nil {
		return err
	}
	if _, err := w.Write(make([]byte, (stored+511)/512*512+1024)); err != nil {
		return err
	}
	return nil
}
