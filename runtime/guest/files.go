package guest

import (
	"context"
	"errors"
	"io"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

var _ sandbox.Agents = (*Guest)(nil)

// files is file work inside: with an owner, that of an agent for this user.
type files struct {
	g     *Guest
	owner string
}

// Agent returns the file work of an agent that works for a user.
func (f files) Agent(owner string) sandbox.AgentFiles { return files{g: f.g, owner: owner} }

// SetAttrs adds extended attributes to a regular file.
func (f files) SetAttrs(ctx context.Context, path string, attrs map[string]string) error {
	return f.g.do(ctx, initproto.OpSetAttrs, initproto.File{Owner: f.owner, Path: path, Attrs: attrs}, nil)
}

func (f files) fileInfo(ctx context.Context, op string, a initproto.File) (sandbox.FileInfo, error) {
	var info sandbox.FileInfo
	err := f.g.do(ctx, op, a, &info)
	return info, err
}

// Stat describes what stands at a path; of a link the link itself.
func (f files) Stat(ctx context.Context, user, path string) (sandbox.FileInfo, error) {
	return f.fileInfo(ctx, initproto.OpStat, initproto.File{User: user, Owner: f.owner, Path: path})
}

// List returns the entries beneath a directory, depth first by name; more
// than 100,000 are ErrTooLarge.
func (f files) List(ctx context.Context, user, path string, depth int) ([]sandbox.FileInfo, error) {
	return gather(ctx, func(g func(sandbox.FileInfo, int) error) error { return f.list(ctx, user, path, depth, g) })
}

// Each hands the same entries on one at a time.
func (f files) Each(ctx context.Context, user, path string, depth int, g func(sandbox.FileInfo) error) error {
	return f.list(ctx, user, path, depth, func(info sandbox.FileInfo, _ int) error { return g(info) })
}

func (f files) list(ctx context.Context, user, path string, depth int, g func(sandbox.FileInfo, int) error) error {
	t := tabOf(ctx)
	if err := t.take(ctx, listCharge); err != nil {
		return err
	}
	defer t.give(listCharge)
	c, err := f.g.call(ctx, initproto.OpList, initproto.File{User: user, Owner: f.owner, Path: path, Depth: depth}, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	return each(c, f.g.patience(initproto.OpList), maxEntries, g)
}

// Mkdir makes a directory and its missing parents.
func (f files) Mkdir(ctx context.Context, user, path string, mode uint32) (sandbox.FileInfo, error) {
	return f.fileInfo(ctx, initproto.OpMkdir, initproto.File{User: user, Owner: f.owner, Path: path, Mode: mode})
}

// Move renames, as rename(2) does: a file at the new name is replaced.
func (f files) Move(ctx context.Context, user, from, to string) error {
	return f.g.do(ctx, initproto.OpMove, initproto.File{User: user, Owner: f.owner, Path: from, To: to}, nil)
}

// Remove deletes a file or an empty directory, with recursive a tree.
func (f files) Remove(ctx context.Context, user, path string, recursive bool) error {
	return f.g.do(ctx, initproto.OpRemove, initproto.File{User: user, Owner: f.owner, Path: path, Recursive: recursive}, nil)
}

// Chmod sets the permission bits.
func (f files) Chmod(ctx context.Context, user, path string, mode uint32) error {
	return f.g.do(ctx, initproto.OpChmod, initproto.File{User: user, Owner: f.owner, Path: path, Mode: mode}, nil)
}

// Read streams a regular file; the reader fails where the stream breaks off.
func (f files) Read(ctx context.Context, user, path string, offset, limit int64) (sandbox.FileInfo, io.ReadCloser, error) {
	var info sandbox.FileInfo
	c, err := f.g.open(ctx, initproto.OpRead, initproto.File{User: user, Owner: f.owner, Path: path, Offset: offset, Limit: limit}, &info)
	if err != nil {
		return info, nil, err
	}
	return info, &download{c: c}, nil
}

// TarOut streams a tree as a tar archive.
func (f files) TarOut(ctx context.Context, user, path string) (io.ReadCloser, error) {
	c, err := f.g.open(ctx, initproto.OpTarOut, initproto.File{User: user, Owner: f.owner, Path: path}, nil)
	if err != nil {
		return nil, err
	}
	return &download{c: c}, nil
}

// Write replaces a file by what r yields, atomically at r's end.
func (f files) Write(ctx context.Context, user, path string, mode uint32, r io.Reader) (sandbox.FileInfo, error) {
	var info sandbox.FileInfo
	err := f.upload(ctx, initproto.OpWrite, initproto.File{User: user, Owner: f.owner, Path: path, Mode: mode}, r, &info)
	return info, err
}

// TarIn unpacks an archive. An error may leave a part of it unpacked.
func (f files) TarIn(ctx context.Context, user, path string, r io.Reader) error {
	return f.upload(ctx, initproto.OpTarIn, initproto.File{User: user, Owner: f.owner, Path: path}, r, nil)
}

// Reset replaces what is at a path, through no link and across no mount, by what
// a tar shows under the path's last name: as root of the sandbox, and processes
// go on. Without r it only tells whether that may be.
func (g *Guest) Reset(ctx context.Context, path string, r io.Reader) error {
	a := initproto.File{User: "0", Path: path, Check: r == nil}
	if a.Check {
		return g.do(ctx, initproto.OpReset, a, nil)
	}
	return g.upload(ctx, initproto.OpReset, a, r, nil)
}

// upload sends r after PID 1 has agreed, and takes the verdict. A failure of
// r hangs up, which PID 1 takes for a broken stream.
func (f files) upload(ctx context.Context, op string, a initproto.File, r io.Reader, reply any) error {
	c, err := f.g.open(ctx, op, a, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	buf := make([]byte, initproto.MaxData)
	for {
		n, rerr := fill(r, buf)
		if n > 0 {
			if err := c.send(initproto.FrameUpload, buf[:n]); err != nil {
				return c.verdict(err)
			}
		}
		if errors.Is(rerr, io.EOF) {
			break
		}
		if errors.Is(rerr, io.ErrUnexpectedEOF) {
			return sandbox.Errorf(sandbox.ErrInvalid, "upload_broken", "the upload broke off before its end: send it again: %w", rerr)
		}
		if rerr != nil {
			return rerr
		}
	}
	c.within(f.g.patience(op))
	if err := c.send(initproto.FrameUploadEnd, nil); err != nil {
		return c.verdict(err)
	}
	return c.reply(reply)
}

// fill reads until buf is full or r ends. Unlike io.ReadFull it passes r's
// own error on: io.ErrUnexpectedEOF is how a request body tells that it broke
// off, and must not pass for the end.
func fill(r io.Reader, buf []byte) (n int, err error) {
	for n < len(buf) && err == nil {
		var k int
		k, err = r.Read(buf[n:])
		n += k
	}
	return n, err
}

// verdict prefers the reason PID 1 gave for hanging up to the hang-up itself.
func (c *conn) verdict(err error) error {
	if fr, rerr := c.next(nil); rerr != nil && sandbox.CodeOf(rerr) != "sandbox_unreachable" {
		return rerr
	} else if rerr == nil {
		return unexpected(fr.Type)
	}
	return err
}

// download reads Data frames up to End, right into its reader's buffer.
type download struct {
	c    *conn
	left int // of the present frame
	err  error
}

func (d *download) Read(p []byte) (int, error) {
	for d.left == 0 || len(p) == 0 {
		if d.err != nil || len(p) == 0 {
			return 0, d.err
		}
		var t initproto.FrameType
		t, d.left, d.err = d.c.head()
		switch {
		case d.err != nil:
		case t == initproto.FrameEnd:
			d.err = io.EOF
		case t != initproto.FrameData:
			d.left, d.err = 0, unexpected(t)
		}
	}
	n, err := d.c.in.Read(p[:min(len(p), d.left)])
	if d.left -= n; err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		d.left, d.err = 0, d.c.fail(err)
	}
	if n > 0 {
		return n, nil
	}
	return 0, d.err
}

func (d *download) Close() error { return d.c.Close() }

// Watch follows the changes in a directory.
func (f files) Watch(ctx context.Context, user, path string, recursive bool) (sandbox.FileWatch, error) {
	c, err := f.g.open(ctx, initproto.OpWatch, initproto.File{User: user, Owner: f.owner, Path: path, Recursive: recursive}, nil)
	if err != nil {
		return nil, err
	}
	return &watch{c}, nil
}

type watch struct{ c *conn }

func (w *watch) Next() (sandbox.FileEvent, error) {
	fr, err := w.c.next(nil)
	if err != nil {
		return sandbox.FileEvent{}, err
	}
	switch fr.Type {
	case initproto.FrameEnd:
		return sandbox.FileEvent{}, io.EOF
	case initproto.FrameItem:
		var e sandbox.FileEvent
		err := decode(fr.Payload, &e)
		return e, err
	}
	return sandbox.FileEvent{}, unexpected(fr.Type)
}

func (w *watch) Close() error { return w.c.Close() }
