package build

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"path"

	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The first bytes of compressed files.
var (
	magicGzip  = []byte{0x1f, 0x8b}
	magicBzip2 = []byte("BZh")
	magicXz    = []byte{0xfd, '7', 'z', 'X', 'Z', 0}
	magicZstd  = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

// zstdWindow is the most memory a zstd stream may ask for.
const zstdWindow = 64 << 20

// errXz is the error for what cannot be unpacked here.
var errXz = errors.New("an archive packed with xz cannot be unpacked by ADD: use gzip, bzip2 or zstd, or COPY it and let a RUN unpack it")

// decompressed returns what a file holds when unpacked, or, where it is not
// compressed, the file.
func decompressed(r io.Reader) (io.Reader, func(), error) {
	in := bufio.NewReaderSize(r, 64<<10)
	head, err := in.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	}
	nothing := func() {}
	switch {
	case bytes.HasPrefix(head, magicGzip):
		z, err := gzip.NewReader(in)
		return z, nothing, err
	case bytes.HasPrefix(head, magicBzip2):
		return bzip2.NewReader(in), nothing, nil
	case bytes.HasPrefix(head, magicXz):
		return nil, nil, errXz
	case bytes.HasPrefix(head, magicZstd):
		z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(zstdWindow))
		if err != nil {
			return nil, nil, err
		}
		return z, z.Close, nil
	}
	return in, nothing, nil
}

// packed tells whether a source is an archive for ADD to unpack: by its
// content, as Docker does, and not by its name.
func (t *Tree) packed(s selection) (bool, error) {
	if s.top.kind != file || s.top.inline || s.top.size == 0 {
		return false, nil
	}
	r, done, err := decompressed(t.content(s.top))
	if errors.Is(err, errXz) {
		return false, err
	}
	if err != nil {
		return false, nil // no archive: copied as it is
	}
	defer done()
	_, err = tar.NewReader(r).Next()
	return err == nil, nil
}

// unpack sends the content of an archive into the destination. Names, links
// and types are PID 1's to judge, which keeps all of it beneath that.
func (s *step) unpack(ctx context.Context, f inside, t *Tree, e *entry, as *owner) error {
	dest := path.Clean(s.op.copy.dest)
	anchor, err := f.anchor(ctx, dest)
	if err != nil {
		return err
	}
	if anchor != dest {
		a := &archiver{op: &copyOp{}, anchor: anchor, as: as}
		err := f.send(ctx, anchor, func(w io.Writer) error {
			return a.write(w, []placed{{to: dest, made: true, entry: &entry{kind: dir, mode: 0o755}}})
		})
		if err != nil {
			return err
		}
	}
	return f.send(ctx, dest, func(w io.Writer) error {
		r, done, err := decompressed(t.content(e))
		if err != nil {
			return s.badArchive(e, err)
		}
		defer done()
		return s.repack(w, r, e, as)
	})
}

// repack copies an archive, with other owners if asked for. Devices are left
// out, as they are of any image, and what lies where a sandbox has file
// systems of the kernel's: archives of whole systems are full of both.
func (s *step) repack(w io.Writer, r io.Reader, e *entry, as *owner) error {
	out := bufio.NewWriterSize(w, 256<<10)
	tr, tw := tar.NewReader(r), tar.NewWriter(out)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return errors.Join(tw.Close(), out.Flush())
		}
		if err != nil {
			return s.badArchive(e, err)
		}
		if h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock || kernels(path.Join(s.op.copy.dest, clean(h.Name))) {
			continue
		}
		if as != nil {
			h.Uid, h.Gid, h.Uname, h.Gname = as.uid, as.gid, "", ""
		}
		h.Format = tar.FormatPAX
		if h.Typeflag == tar.TypeGNUSparse { // its content comes out whole
			h.Typeflag = tar.TypeReg
		}
		for k := range h.PAXRecords {
			delete(h.PAXRecords, k)
		}
		if err := tw.WriteHeader(h); err != nil {
			return s.badArchive(e, err)
		}
		if _, err := io.Copy(tw, tr); err != nil {
			if errors.Is(err, io.ErrClosedPipe) {
				return err
			}
			return s.badArchive(e, err)
		}
	}
}

// kernels tells of what lies in a file system of the kernel's.
func kernels(name string) bool {
	for ; name != "/" && name != "."; name = path.Dir(name) {
		if mountPoint(name) {
			return true
		}
	}
	return false
}

func (s *step) badArchive(e *entry, err error) error {
	if errors.Is(err, io.ErrClosedPipe) {
		return err
	}
	return s.x.at(sandbox.ErrInvalid, codeFailed, s.op.line, fmt.Errorf("unpacking %.200q: %w", e.name, err))
}
