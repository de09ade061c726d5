package main

import (
	"context"
	"errors"
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
  else the copy gets the destination's name, whose parent must exist.
  SOURCE/. means the content of SOURCE and not SOURCE itself.

Files get the sandbox's user as owner; modes, times and links are kept. On the
way out nothing is written outside the destination, whatever the archive says.`,
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
				return usage("both sides are in sandboxes: copy by way of this machine, as sandbox cp A:/x - | sandbox cp - B:/y")
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
	dest, err := f.Stat(ctx, user, to)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
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
	go func() { pw.CloseWithError(writeTar(pw, from, p.name)) }()
	err = f.TarIn(ctx, user, p.dir, pr)
	_ = pr.Close() // ends writeTar if TarIn gave up
	return err
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
	content := strings.HasSuffix(from, "/.")
	src := path.Clean(from)
	r, err := f.TarOut(ctx, user, src)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // read only
	if to == "-" {
		_, err := io.Copy(c.out, r)
		return err
	}
	info, err := f.Stat(ctx, user, src)
	if err != nil {
		return err
	}
	dest, derr := os.Stat(to)
	base := path.Base(src)
	if content || src == "/" {
		base = "."
	}
	p, err := place(to, derr == nil, derr == nil && dest.IsDir(), base, info.Type == sandbox.FileDir)
	if err != nil {
		return err
	}
	return readTar(r, p.dir, path.Base(src), p.name)
}
