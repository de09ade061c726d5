package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/bench/report"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	mega      = 1_000_000 // bytes in the MB of a rate
	smallSize = 1 << 10   // bytes of each small file
)

func rate(bytes int64, since time.Time) float64 {
	return float64(bytes) / mega / time.Since(since).Seconds()
}

// stream reads much output of a command.
func stream(ctx context.Context, b *bench, d *daemon, id string) (err error) {
	oci, removePeers, err := b.containers(ctx, "stream")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, removePeers()) }()
	total := b.plan.streamBytes
	talk := []string{"/bin/dd", "if=/dev/zero", "bs=1M", "count=" + strconv.FormatInt(total>>20, 10), "status=none"}
	cs := []contestant{
		{report.Floor, func(ctx context.Context) (float64, error) { return b.listen(b.onHost(ctx, talk...), total) }},
		{report.Us, func(ctx context.Context) (float64, error) {
			start := time.Now()
			p, err := d.Exec(ctx, id, sandbox.ProcessSpec{Argv: talk})
			if err != nil {
				return 0, err
			}
			n, err := drain(p)
			if err != nil || n != total {
				return 0, fmt.Errorf("%d of %d bytes of output: %w", n, total, orShort(err))
			}
			return rate(n, start), nil
		}},
	}
	for _, p := range oci {
		cs = append(cs, contestant{p.Name(), func(ctx context.Context) (float64, error) {
			return b.listen(p.Exec(ctx, "stream", talk...), total)
		}})
	}
	return b.rounds(ctx, setting{
		name: "stream", title: "output of a command", unit: "MB/s", more: true,
		note: "peers pass their caller's pipe on; sandboxd keeps output for those who come back",
	}, b.plan.transfers, 1, b.settled, cs...)
}

// errShort is what came too early.
var errShort = errors.New("the end came too early")

func orShort(err error) error {
	if err != nil {
		return err
	}
	return errShort
}

// listen reads a command's output to its end, through a pipe.
func (b *bench) listen(cmd *exec.Cmd, want int64) (float64, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer r.Close()
	cmd.Stdout = w
	start := time.Now()
	err = cmd.Start()
	w.Close()
	if err != nil {
		return 0, err
	}
	buf := make([]byte, 256<<10)
	n, err := readThrough(r, buf, nil)
	if err := errors.Join(err, cmd.Wait()); err != nil || n != want {
		return 0, fmt.Errorf("%q wrote %d of %d bytes: %w; it says: %s", cmd.Args, n, want, orShort(err), b.peerSaid())
	}
	return rate(n, start), nil
}

// readThrough reads to the end and returns how much there was; where check is
// given it looks at every piece.
func readThrough(r io.Reader, buf []byte, check func(at int64, p []byte) error) (int64, error) {
	var n int64
	for {
		m, err := r.Read(buf)
		if m > 0 && check != nil {
			if err := check(n, buf[:m]); err != nil {
				return n, err
			}
		}
		n += int64(m)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// pattern is a megabyte of noise, which a large file repeats.
type pattern []byte

func newPattern() pattern {
	p := make(pattern, 1<<20)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(p) // never fails
	return p
}

// reader returns total bytes of the pattern.
func (p pattern) reader(total int64) io.Reader { return io.LimitReader(&repeat{p: p}, total) }

type repeat struct {
	p  []byte
	at int
}

func (r *repeat) Read(b []byte) (int, error) {
	n := copy(b, r.p[r.at:])
	r.at = (r.at + n) % len(r.p)
	return n, nil
}

// check tells whether bytes are the pattern's at an offset.
func (p pattern) check(offset int64, b []byte) error {
	for len(b) > 0 {
		want := p[offset%int64(len(p)):]
		n := min(len(want), len(b))
		if !bytes.Equal(want[:n], b[:n]) {
			return fmt.Errorf("near offset %d other bytes came back than were sent", offset)
		}
		b, offset = b[n:], offset+int64(n)
	}
	return nil
}

// files carries one large file and many small ones in and out.
func files(ctx context.Context, b *bench) (err error) {
	d, err := b.ours(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	big := spec()
	big.Limits.DiskBytes = 4 << 30
	sb, err := d.Create(ctx, big, "")
	if err != nil {
		return err
	}
	defer func() {
		_, rerr := d.Remove(context.WithoutCancel(ctx), string(sb.ID))
		err = errors.Join(err, rerr)
	}()
	if err := b.largeFile(ctx, d.Files(string(sb.ID))); err != nil {
		return err
	}
	return b.manyFiles(ctx, d.Files(string(sb.ID)))
}

// largeFile measures both ways in one go, as what goes up comes down.
func (b *bench) largeFile(ctx context.Context, fs sandbox.Files) error {
	total, p, buf := b.plan.fileBytes, newPattern(), make([]byte, 256<<10)
	host := filepath.Join(b.dir, "large")
	size := fmt.Sprintf("%d MiB", total>>20)
	up := setting{
		name: "file-up", title: "file of " + size + " into a sandbox", unit: "MB/s", more: true,
		note: "host: write to a file on the same disk; nobody waits for the disk itself",
	}
	down := setting{name: "file-down", title: "file of " + size + " out of a sandbox", unit: "MB/s", more: true, note: "read back and compared"}
	for _, s := range []setting{up, down} { // taken in one go, shown in this order
		b.rep.Scene(s.name, s.title, s.note)
	}
	written := func() (float64, error) {
		start := time.Now()
		f, err := os.Create(host)
		if err != nil {
			return 0, err
		}
		_, err = io.CopyBuffer(struct{ io.Writer }{f}, p.reader(total), buf)
		err = errors.Join(err, f.Close())
		return rate(total, start), err
	}
	read := func(r io.ReadCloser, start time.Time) (float64, error) {
		defer r.Close()
		n, err := readThrough(r, buf, p.check)
		if err != nil || n != total {
			return 0, fmt.Errorf("%d of %d bytes came back: %w", n, total, orShort(err))
		}
		return rate(n, start), nil
	}
	keep := func(who string, i *int, v float64) {
		if *i++; *i > 1 { // the first is the warm-up
			b.rep.Add(down.name, who, down.unit, true, v)
		}
	}
	var hostRounds, ourRounds int
	return b.rounds(ctx, up, b.plan.transfers, 1, b.settled,
		contestant{report.Floor, func(context.Context) (float64, error) {
			v, err := written()
			if err != nil {
				return 0, err
			}
			defer os.Remove(host) //nolint:errcheck // the scratch directory goes anyway
			start := time.Now()
			f, err := os.Open(host)
			if err != nil {
				return 0, err
			}
			back, err := read(f, start)
			keep(report.Floor, &hostRounds, back)
			return v, err
		}},
		contestant{report.Us, func(ctx context.Context) (float64, error) {
			start := time.Now()
			if _, err := fs.Write(ctx, "", "/root/large", 0o600, p.reader(total)); err != nil {
				return 0, err
			}
			v := rate(total, start)
			start = time.Now()
			_, r, err := fs.Read(ctx, "", "/root/large", 0, -1)
			if err != nil {
				return 0, err
			}
			back, err := read(r, start)
			keep(report.Us, &ourRounds, back)
			return v, errors.Join(err, fs.Remove(ctx, "", "/root/large", false))
		}})
}

// archive is a tar archive of many small files in one directory.
func archive(n int) ([]byte, error) {
	var b bytes.Buffer
	w, content := tar.NewWriter(&b), newPattern()
	for i := range n {
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("small/%05d", i), Mode: 0o600, Size: smallSize}); err != nil {
			return nil, err
		}
		if _, err := w.Write(content[i%1000 : i%1000+smallSize]); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return b.Bytes(), err
}

// unpacked counts the whole small files of an archive.
func unpacked(r io.Reader) (int, error) {
	n := 0
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, r) // the padding after the end
			return n, err
		}
		if err != nil {
			return n, err
		}
		if h.Typeflag == tar.TypeReg && h.Size == smallSize {
			n++
		}
	}
}

// manyFiles carries small files in and out as archives; the samples are
// seconds for all of them.
func (b *bench) manyFiles(ctx context.Context, fs sandbox.Files) error {
	count := b.plan.smallFiles
	packed, err := archive(count)
	if err != nil {
		return err
	}
	back := func(r io.Reader) error {
		n, err := unpacked(r)
		if err != nil || n != count {
			return fmt.Errorf("%d of %d files came back: %w", n, count, orShort(err))
		}
		return nil
	}
	host := filepath.Join(b.dir, "unpacked")
	in := setting{
		name: "tree-up", title: fmt.Sprintf("%d files of 1 KiB into a sandbox", count), unit: "s",
		note: "one tar stream; host: tar on the same disk",
	}
	out := setting{name: "tree-down", title: fmt.Sprintf("%d files of 1 KiB out of a sandbox", count), unit: "s", note: "one tar stream"}
	err = b.rounds(ctx, in, b.plan.transfers, 1, b.settled,
		contestant{report.Floor, func(ctx context.Context) (float64, error) {
			if err := errors.Join(os.RemoveAll(host), os.Mkdir(host, 0o700)); err != nil {
				return 0, err
			}
			cmd := exec.CommandContext(ctx, "tar", "-C", host, "-x")
			cmd.Stdin = bytes.NewReader(packed)
			v, err := b.ran(cmd)
			return v / 1000, err
		}},
		contestant{report.Us, func(ctx context.Context) (float64, error) {
			if err := fs.Remove(ctx, "", "/root/small", true); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
				return 0, err
			}
			start := time.Now()
			err := fs.TarIn(ctx, "", "/root", bytes.NewReader(packed))
			return time.Since(start).Seconds(), err
		}})
	if err != nil {
		return err
	}
	return b.rounds(ctx, out, b.plan.transfers, 1, b.settled,
		contestant{report.Floor, func(ctx context.Context) (float64, error) {
			cmd := exec.CommandContext(ctx, "tar", "-C", host, "-c", "small")
			r, err := cmd.StdoutPipe()
			if err != nil {
				return 0, err
			}
			start := time.Now()
			if err := cmd.Start(); err != nil {
				return 0, err
			}
			err = back(r)
			err = errors.Join(err, cmd.Wait())
			return time.Since(start).Seconds(), err
		}},
		contestant{report.Us, func(ctx context.Context) (float64, error) {
			start := time.Now()
			r, err := fs.TarOut(ctx, "", "/root/small")
			if err != nil {
				return 0, err
			}
			defer r.Close()
			err = back(r)
			return time.Since(start).Seconds(), err
		}})
}
