package rootfs

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/docker/go-units"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/semaphore"

	"github.com/sandboxd/sandboxd/internal/tarfile"
	"github.com/sandboxd/sandboxd/sandbox"
)

// ImportTar makes an image of one layer from a tar archive of a whole root
// file system (as docker export or debootstrap give it), plain or compressed
// with gzip or zstd. The same content gives the same digest and is stored
// once. Cut off at any point, by an error or a kill, it leaves no layer.
//
// The archive is hostile input. Refused, with class ErrInvalid or ErrTooLarge:
// names that are absolute, climb out or lead through a symbolic link
// (image_bad_path), device nodes and pipes (image_device_node), ids over 65535
// (image_bad_id), more bytes or files than configured or a wildly compressed
// stream (image_too_large), archives cut short (image_truncated), whatever is
// no tar or a tar of something else (image_bad_format). Dropped: every
// extended attribute, file capabilities among them. Set-id bits stay; see the
// package's doc for why they are inert.
func (s *Store) ImportTar(ctx context.Context, name string, r io.Reader) (sandbox.Image, error) {
	if err := sandbox.ValidateImageName(name); err != nil {
		return sandbox.Image{}, err
	}
	if name == hostImage {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrConflict, "image_name_reserved", "image name %q means this host's own files: choose another", name)
	}
	info, err := s.importTree(ctx, r)
	if err != nil {
		return sandbox.Image{}, err
	}
	return sandbox.Image{
		Name: name, Digest: info.Digest, Kind: sandbox.ImageTar, Layers: []string{info.Digest},
		SizeBytes: info.Size, Files: info.Files, CreatedAt: time.Now().UTC(),
	}, nil
}

func (s *Store) importTree(ctx context.Context, r io.Reader) (LayerInfo, error) {
	return s.stageLayer(ctx, func(root *os.File) (LayerInfo, error) {
		return unpackTar(ctx, root, r, s.importLimits())
	})
}

// stageLayer lets fill write a tree into a fresh directory, and makes it the
// layer fill says it is. After an error nothing is left.
func (s *Store) stageLayer(ctx context.Context, fill func(root *os.File) (LayerInfo, error)) (_ LayerInfo, err error) {
	if err := s.imports.Acquire(ctx, 1); err != nil {
		return LayerInfo{}, fmt.Errorf("rootfs: wait for other imports: %w", err)
	}
	defer s.imports.Release(1)
	dir, err := os.MkdirTemp(s.vol.path(stagingDir), "import")
	if err != nil {
		return LayerInfo{}, spaceError("stage an import", err)
	}
	stage := filepath.Join(stagingDir, filepath.Base(dir))
	defer func() {
		if err != nil {
			err = errors.Join(err, s.trash.add(stage))
		}
	}()
	if err := os.Mkdir(filepath.Join(dir, "root"), 0o755); err != nil {
		return LayerInfo{}, spaceError("stage an import", err)
	}
	root, err := os.Open(filepath.Join(dir, "root"))
	if err != nil {
		return LayerInfo{}, fmt.Errorf("rootfs: stage an import: %w", err)
	}
	defer root.Close()
	info, err := fill(root)
	if err != nil {
		return LayerInfo{}, err
	}
	sandbox.HoldLayers(ctx, info.Digest) // known by now alone, where the archive is a whole root
	return s.commit(stage, info)
}

// importLimits bounds one import.
type importLimits struct {
	bytes, files int64
	room         bool // bytes is what the volume has room for, not volume.import_max
}

// tooLarge is the error for what goes beyond bytes.
func (l importLimits) tooLarge(what string) error {
	most := units.BytesSize(float64(l.bytes))
	if l.room {
		return sandbox.Errorf(sandbox.ErrExhausted, "volume_full", "%s, and the volume has room for %s of an image: remove sandboxes, images or volumes, or make it larger", what, most)
	}
	return sandbox.Errorf(sandbox.ErrTooLarge, "image_too_large", "%s, over the %s of volume.import_max: make it smaller, or raise that", what, most)
}

func (s *Store) importLimits() importLimits {
	lim := importLimits{bytes: s.cfg.ImportMaxBytes, files: s.cfg.ImportMaxFiles}
	if now, err := s.Space(); err == nil { // the last of it is not for images
		if room := int64(now.Free - min(now.Free, now.Low())); room < lim.bytes {
			lim.bytes, lim.room = room, true
		}
	}
	return lim
}

const (
	// What a file may cost in headers, on top of its content.
	headerAllowance = 4096
	// Beyond ratioFrom bytes out, more than ratioMax times what went in is
	// no file system. Deflate cannot go past 1032; zstd can.
	ratioMax  = 1000
	ratioFrom = 256 << 20
	// The largest window a zstd stream may ask memory for: that of zstd
	// --long, the most its own tool takes unasked. Of streams over
	// manyWindow, one is read at a time.
	zstdWindow = 128 << 20
	manyWindow = 32 << 20
)

// openArchive finds out how r is compressed and returns the plain stream.
func openArchive(ctx context.Context, r io.Reader, lim importLimits) (*countReader, func(), error) {
	raw := &countReader{ctx: ctx, r: r, max: 1<<63 - 1}
	plain, closeStream, err := decompress(ctx, raw)
	if err != nil {
		return nil, nil, err
	}
	return &countReader{ctx: ctx, r: plain, max: lim.bytes + headerAllowance*lim.files, lim: lim, in: raw}, closeStream, nil
}

// unpackTar unpacks an archive of unknown compression into the empty
// directory root and describes the result.
func unpackTar(ctx context.Context, root *os.File, r io.Reader, lim importLimits) (LayerInfo, error) {
	stream, closeStream, err := openArchive(ctx, r, lim)
	if err != nil {
		return LayerInfo{}, err
	}
	defer closeStream()
	u := newUnpacker(root, lim)
	defer u.close()
	if err := u.unpack(stream); err != nil {
		return LayerInfo{}, tarError(err)
	}
	digest, err := u.finish()
	if err != nil {
		return LayerInfo{}, tarError(err)
	}
	return LayerInfo{Digest: digest, Size: u.size, Files: u.kept, Created: time.Now().UTC()}, nil
}

// unpack reads the whole stream.
func (u *unpacker) unpack(stream *countReader) error {
	tr := tarfile.NewReader(stream)
	next := tr.Next
	if u.layer != nil { // its digest tells whether it is whole
		next = tr.Reader.Next
	}
	// The holes of a sparse entry are read from nowhere: that must end, too.
	content := &countReader{ctx: stream.ctx, r: tr, max: 1<<63 - 1}
	for {
		hdr, err := next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if err := u.entry(hdr, content); err != nil {
			return err
		}
	}
	return tarfile.Drain(stream)
}

// largeWindow is held by whoever reads a stream of a large window: such take
// most of the memory that imports may.
var largeWindow = semaphore.NewWeighted(1)

// decompress looks at the first bytes of a stream.
func decompress(ctx context.Context, r io.Reader) (io.Reader, func(), error) {
	br := bufio.NewReaderSize(r, 64<<10)
	magic, err := br.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, tarError(err)
	}
	has := func(m string) bool { return bytes.HasPrefix(magic, []byte(m)) }
	switch {
	case len(magic) == 0:
		return nil, nil, sandbox.Errorf(sandbox.ErrInvalid, "image_truncated", "the archive is empty")
	case has("\x1f\x8b"):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, nil, tarError(err)
		}
		return z, func() { _ = z.Close() }, nil // frees memory, nothing to lose
	case has("\x28\xb5\x2f\xfd"):
		return unzstd(ctx, br)
	case has("\xfd7zXZ\x00"), has("BZh"), has("PK\x03\x04"), has("LZIP"):
		return nil, nil, sandbox.Errorf(sandbox.ErrInvalid, "image_bad_format", "the archive is compressed in a way not supported here: send plain tar, gzip or zstd")
	}
	return br, func() {}, nil
}

func unzstd(ctx context.Context, br *bufio.Reader) (io.Reader, func(), error) {
	head, err := br.Peek(zstd.HeaderMaxSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, tarError(err)
	}
	var first zstd.Header
	release, window := func() {}, uint64(manyWindow)
	// A head that is unsound, the reader finds so, too.
	if first.Decode(head) == nil && first.WindowSize > manyWindow {
		if err := largeWindow.Acquire(ctx, 1); err != nil {
			return nil, nil, fmt.Errorf("rootfs: wait for another import: %w", err)
		}
		release = func() {
			debug.FreeOSMemory() // the window, before the next one is made
			largeWindow.Release(1)
		}
		window = zstdWindow
	}
	z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window))
	if err != nil {
		release()
		return nil, nil, tarError(err)
	}
	return z, func() {
		z.Close()
		z = nil // holds the window
		release()
	}, nil
}

// countReader counts, bounds and can be cancelled.
type countReader struct {
	ctx context.Context //nolint:containedctx // lives as long as one call
	r   io.Reader
	n   int64
	max int64
	lim importLimits // that max is of
	in  *countReader // what r decompresses, if it does
	sum hash.Hash    // of what was read, if anybody asks
}

func (c *countReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.r.Read(p)
	c.n += int64(n)
	if c.sum != nil {
		c.sum.Write(p[:n])
	}
	if c.n > c.max {
		return n, c.lim.tooLarge(fmt.Sprintf("the archive is larger than %s unpacked", units.BytesSize(float64(c.max))))
	}
	if c.in != nil && c.n > ratioFrom && c.n/ratioMax > c.in.n {
		return n, sandbox.Errorf(sandbox.ErrTooLarge, "image_too_large", "the archive unpacks to over %d times its size: no file system does", ratioMax)
	}
	return n, err
}

// tarError gives an error met while reading an archive its class and code.
func tarError(err error) error {
	if _, ok := errors.AsType[*sandbox.Error](err); ok {
		return err
	}
	var (
		perr *os.PathError
		serr *os.SyscallError
	)
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("rootfs: import: %w", err)
	case errors.Is(err, tarfile.ErrCut):
		return sandbox.Errorf(sandbox.ErrInvalid, "image_truncated", "%w", err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return sandbox.Errorf(sandbox.ErrInvalid, "image_truncated", "the archive was cut short; send it again: %w", err)
	case errors.Is(err, tar.ErrHeader), errors.Is(err, tar.ErrFieldTooLong),
		errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum):
		return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_format", "this is no sound tar archive: %w", err)
	case errors.Is(err, zstd.ErrWindowSizeExceeded), errors.Is(err, zstd.ErrDecoderSizeExceeded):
		return sandbox.Errorf(sandbox.ErrTooLarge, "image_too_large", "the zstd stream asks for too large a window (over %s at its begin, or over %s later): compress it without --long: %w", units.BytesSize(zstdWindow), units.BytesSize(manyWindow), err)
	case errors.As(err, &perr), errors.As(err, &serr):
		return spaceError("unpack an archive", err)
	}
	return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_format", "reading the archive: %w", err)
}
