package main

import (
	"context"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) cpCmd() *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "cp [flags] SOURCE DESTINATION",
		Short: "Copy files into or out of a running sandbox",
		Long: `Copy files into or out of a running sandbox. One side is SANDBOX:/path, the other
a path on this machine, or - for a tar archive on standard input or output.

  A directory is copied with all that is in it.
  If the destination is a directory, the source lands in it under its own name;
  else the copy gets the destination's name. Its parent must exist on this
  machine; in a sandbox it is made.
  SOURCE/. means the content of SOURCE and not SOURCE itself.
  A SOURCE that is a link means what it leads to on this machine; in a sandbox
  the link itself, unless it is written with a slash or /. at its end.
  A name on this machine with a colon in it is written as ./NAME.

Files get the sandbox's user as owner; modes, times and links are kept, set-user-ID
and set-group-ID only inside. Of a tree, sockets, devices and FIFOs are left out
and told on standard error. An archive on standard input is unpacked as it is,
with its FIFOs, is refused where it has devices, and must be whole. A file is
replaced when all of the new one has arrived. Nothing is written outside the
destination, whatever an archive says: its names are taken as beneath it.`,
		Example: `  sandbox cp ./src dev:/app
  sandbox cp ./src/. dev:/app            # what is in src
  sandbox cp dev:/var/log ./logs
  tar c src | sandbox cp - dev:/app
  sandbox cp dev:/app - | tar t`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			from, fromInside := splitRef(args[0])
			to, toInside := splitRef(args[1])
			cl, err := c.client()
			if err != nil {
				return err
			}
			switch {
			case fromInside && toInside:
				return usage("both sides are in sandboxes: copy by way of this machine, as sandbox cp A:/x - | sandbox cp - B:/y; a name on this machine with a colon in it is written as ./%s", args[0])
			case toInside:
				return c.copyIn(cmd.Context(), cl.Files(to.ref), user, args[0], to.path)
			case fromInside:
				return c.copyOut(cmd.Context(), cl.Files(from.ref), user, from.path, args[1])
			}
			return usage("neither side is in a sandbox: write it as SANDBOX:/path")
		},
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "as whom inside; the sandbox's user if not given")
	return cmd
}

// inside is a path in a sandbox.
type inside struct{ ref, path string }

// splitRef tells SANDBOX:/path from a path here: those with a slash or a dot
// before the colon are paths here.
func splitRef(arg string) (inside, bool) {
	ref, p, ok := strings.Cut(arg, ":")
	if !ok || ref == "" || strings.HasPrefix(arg, ".") || strings.Contains(ref, "/") {
		return inside{}, false
	}
	if !strings.HasPrefix(p, "/") {
		p = "/" + p
	}
	return inside{ref, p}, true
}

// placing says where a copy goes: beneath dir, its top renamed to name; an
// empty name means that only the content is copied.
type placing struct{ dir, name string }

// place decides where a copy lands. to is the destination as written, exists
// and isDir say what it is now, base is the source's name ("." means its
// content), tree whether it is a directory.
func place(to string, exists, isDir bool, base string, tree bool) (placing, error) {
	slash := strings.HasSuffix(to, "/")
	clean := path.Clean(to)
	switch {
	case exists && isDir && base == ".":
		return placing{clean, ""}, nil
	case exists && isDir:
		return placing{clean, base}, nil
	case exists && (tree || slash):
		return placing{}, usage("%s is not a directory", to)
	case !exists && slash && !tree:
		return placing{}, usage("directory %s does not exist: make it first, or leave the last slash out", to)
	}
	return placing{path.Dir(clean), path.Base(clean)}, nil
}

func (c *cli) copyIn(ctx context.Context, f sandbox.Files, user, from, to string) error {
	if from == "-" {
		return f.TarIn(ctx, user, to, c.in)
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if info.Mode()&special != 0 {
		return notCopied(from)
	}
	dest, err := f.Stat(ctx, user, to)
	if err != nil && sandbox.CodeOf(err) != "file_not_found" {
		return err
	}
	exists := err == nil
	isDir := dest.Type == sandbox.FileDir
	if dest.Type == sandbox.FileSymlink { // is it a link to a directory?
		_, lerr := f.List(ctx, user, strings.TrimSuffix(to, "/")+"/.", 1)
		isDir = lerr == nil
	}
	p, err := place(to, exists, isDir, sourceName(from), info.IsDir())
	if err != nil {
		return err
	}
	pr, pw := io.Pipe()
	var left leftOut
	done := make(chan struct{})
	go func() {
		defer close(done)
		pw.CloseWithError(writeTar(pw, from, p.name, &left))
	}()
	err = f.TarIn(ctx, user, p.dir, pr)
	_ = pr.Close() // ends writeTar if TarIn gave up
	<-done
	left.tell(c)
	return err
}

func notCopied(name string) error {
	return sandbox.Errorf(sandbox.ErrInvalid, "not_a_file", "%s is a socket, a device or a FIFO: only files, directories and links are copied", name)
}

// sourceName is the name a source has at its destination; "." for DIR/. .
func sourceName(from string) string {
	if from == "." || strings.HasSuffix(from, "/.") {
		return "."
	}
	if base := filepath.Base(from); base != ".." && base != "/" {
		return base
	}
	if abs, err := filepath.Abs(from); err == nil && filepath.Base(abs) != "/" {
		return filepath.Base(abs)
	}
	return "."
}

func (c *cli) copyOut(ctx context.Context, f sandbox.Files, user, from, to string) error {
	src, follow := path.Clean(from), from
	if !strings.HasSuffix(from, "/") && !strings.HasSuffix(from, "/.") {
		follow = src
	}
	if to == "-" {
		r, err := f.TarOut(ctx, user, follow)
		if err != nil {
			return err
		}
		defer func() { _ = r.Close() }() // read only
		_, err = io.Copy(c.out, r)
		return err
	}
	info, err := f.Stat(ctx, user, src)
	if err != nil {
		return err
	}
	if info.Type == sandbox.FileOther {
		return notCopied(from)
	}
	r, err := f.TarOut(ctx, user, follow)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // read only
	dest, derr := os.Stat(to)
	base := path.Base(src)
	if strings.HasSuffix(from, "/.") || src == "/" {
		base = "."
	}
	p, err := place(to, derr == nil, derr == nil && dest.IsDir(), base, info.Type == sandbox.FileDir || follow != src)
	if err != nil {
		return err
	}
	var left leftOut
	err = readTar(r, p.dir, path.Base(src), p.name, &left)
	left.tell(c)
	return err
}
