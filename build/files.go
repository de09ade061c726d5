package build

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// inside is the file system of one sandbox. All names in it are resolved in
// there, by its own PID 1: what is found is what a process in it would find.
type inside struct{ sandbox.Files }

// asRoot is the user files are looked at and written as.
const asRoot = "0"

func (s *step) inside(ctx context.Context, id sandbox.ID) (inside, error) {
	f, err := s.x.b.cfg.Sandboxes.Files(ctx, string(id))
	return inside{f}, err
}

// isDir tells whether a path leads to a directory, links followed.
func (f inside) isDir(ctx context.Context, name string) (bool, error) {
	info, err := f.Stat(ctx, asRoot, name)
	switch {
	case missing(err):
		return false, nil
	case err != nil:
		return false, err
	case info.Type == sandbox.FileDir:
		return true, nil
	case info.Type != sandbox.FileSymlink:
		return false, nil
	}
	_, err = f.List(ctx, asRoot, name, 1)
	if errors.Is(err, sandbox.ErrTooLarge) {
		return true, nil
	}
	if missing(err) || sandbox.CodeOf(err) == "too_many_links" {
		return false, nil
	}
	return err == nil, err
}

// missing tells of errors that mean that nothing is at a path.
func missing(err error) bool {
	return errors.Is(err, sandbox.ErrNotFound) || sandbox.CodeOf(err) == "not_a_directory"
}

// anchor is the deepest directory of a path that is there.
func (f inside) anchor(ctx context.Context, name string) (string, error) {
	for ; name != "/"; name = path.Dir(name) {
		ok, err := f.isDir(ctx, name)
		if err != nil {
			return "", err
		}
		if ok {
			return name, nil
		}
	}
	return "/", nil
}

// maxAccounts bounds what is read of a passwd or group file.
const maxAccounts = 4 << 20

// owner finds whom user[:group] means in the sandbox. A number alone is both;
// a name alone comes with its group.
func (f inside) owner(ctx context.Context, who string) (*owner, error) {
	if who == "" {
		return nil, nil
	}
	user, group, grouped := strings.Cut(who, ":")
	for _, id := range []string{user, group} {
		if _, err := strconv.ParseUint(id, 10, 16); errors.Is(err, strconv.ErrRange) {
			return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_user", "id %.40q: ids of a sandbox go from 0 to 65535", id)
		}
	}
	var o owner
	if id, err := strconv.ParseUint(user, 10, 16); err == nil {
		o = owner{int(id), int(id)}
	} else {
		fields, err := f.account(ctx, "/etc/passwd", user, 4)
		if err != nil {
			return nil, err
		}
		uid, err1 := strconv.ParseUint(fields[2], 10, 16)
		gid, err2 := strconv.ParseUint(fields[3], 10, 16)
		if err1 != nil || err2 != nil {
			return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_user", "the ids of user %.40q in /etc/passwd are no numbers up to 65535", user)
		}
		o = owner{int(uid), int(gid)}
	}
	if !grouped {
		return &o, nil
	}
	if id, err := strconv.ParseUint(group, 10, 16); err == nil {
		o.gid = int(id)
		return &o, nil
	}
	fields, err := f.account(ctx, "/etc/group", group, 3)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(fields[2], 10, 16)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_user", "the id of group %.40q in /etc/group is no number up to 65535", group)
	}
	o.gid = int(gid)
	return &o, nil
}

// account finds the line of a name in a file as /etc/passwd.
func (f inside) account(ctx context.Context, file, name string, least int) ([]string, error) {
	none := sandbox.Errorf(sandbox.ErrInvalid, "invalid_user", "%.40q is not in the image's %s: make it in a RUN before, or use a number", name, file)
	_, r, err := f.Read(ctx, asRoot, file, 0, maxAccounts)
	if missing(err) {
		return nil, none
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // read only
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if fields := strings.Split(lines.Text(), ":"); len(fields) >= least && fields[0] == name {
			return fields, nil
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading %s in the sandbox: %w", file, err)
	}
	return nil, none
}

// send unpacks an archive beneath a directory, made by write as it goes.
func (f inside) send(ctx context.Context, at string, write func(io.Writer) error) error {
	pr, pw := io.Pipe()
	var failed error
	done := make(chan struct{})
	go func() {
		defer close(done)
		failed = write(pw)
		_ = pw.CloseWithError(failed) // never fails
	}()
	err := f.TarIn(ctx, asRoot, at, pr)
	_ = pr.Close() // ends write if TarIn gave up
	<-done
	if err != nil && failed != nil && !errors.Is(failed, io.ErrClosedPipe) {
		return failed // the cause
	}
	return err
}

// real follows the links of a path to what has none.
func (f inside) real(ctx context.Context, name string) (string, error) {
	at, rest := "/", strings.TrimPrefix(path.Clean("/"+name), "/")
	for links := 0; rest != ""; {
		first, more, _ := strings.Cut(rest, "/")
		next := path.Join(at, first)
		info, err := f.Stat(ctx, asRoot, next)
		if err != nil {
			return "", err
		}
		if info.Type != sandbox.FileSymlink {
			at, rest = next, more
			continue
		}
		if links++; links > maxLinks {
			return "", sandbox.Errorf(sandbox.ErrInvalid, "too_many_links", "the links of %.200q lead in a circle", name)
		}
		target := info.Target
		if !path.IsAbs(target) {
			target = path.Join(at, target)
		}
		at, rest = "/", strings.TrimPrefix(path.Join(target, more), "/")
	}
	return at, nil
}
