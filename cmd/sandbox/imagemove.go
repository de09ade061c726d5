package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The values of --pull.
const (
	pullMissing = "missing"
	pullAlways  = "always"
	pullNever   = "never"
)

// registryFlags say how to reach a registry.
type registryFlags struct {
	user          string
	passwordStdin bool
	plain         []string
	quiet         bool
}

func (f *registryFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.StringVarP(&f.user, "user", "u", "", "user of the registry; without one the credentials 'docker login' keeps are used, if there are any")
	fl.BoolVar(&f.passwordStdin, "password-stdin", false, "read the user's password from standard input")
	fl.StringArrayVar(&f.plain, "plain-http", nil, "speak HTTP, without TLS, with this registry (host and port); repeatable")
	fl.BoolVarP(&f.quiet, "quiet", "q", false, "print only the digest")
}

// auth returns what proves to a registry who asks, or nil.
func (f *registryFlags) auth(c *cli, ref sandbox.ImageRef) (*sandbox.RegistryAuth, error) {
	switch {
	case f.user == "" && f.passwordStdin:
		return nil, usage("--password-stdin needs --user")
	case f.user != "" && !f.passwordStdin:
		return nil, usage("--user needs --password-stdin: pipe the password in, so that no list of processes shows it")
	case f.user == "":
		return dockerAuth(c, ref)
	}
	b, err := io.ReadAll(io.LimitReader(c.in, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("read the password: %w", err)
	}
	return &sandbox.RegistryAuth{Username: f.user, Password: strings.TrimRight(string(b), "\r\n")}, nil
}

func (f *registryFlags) plainWith(ref sandbox.ImageRef) bool {
	return slices.Contains(f.plain, ref.Host)
}

func (c *cli) imagePullCmd() *cobra.Command {
	var f registryFlags
	var name, platform string
	var detach bool
	cmd := &cobra.Command{
		Use:   "pull [flags] REFERENCE",
		Short: "Pull an image from a registry",
		Long: `Pull an image from a registry, verify every byte of it, and keep it under its full
reference, or under --name. What is here already is not fetched again; a pull
that broke off goes on where it was. Ctrl-C ends it.

Credentials: --user, else what 'docker login' keeps in $DOCKER_CONFIG or ~/.docker,
credential helpers too, else those of the daemon's configuration.`,
		Example: `  sandbox image pull alpine:3
  sandbox image pull registry.example:5000/team/app@sha256:…
  sandbox image pull --platform linux/amd64 --name app registry.example/team/app:1.2`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			req := sandbox.PullRequest{Reference: args[0], Name: name, Platform: platform}
			if detach {
				if err := f.complete(c, &req); err != nil {
					return err
				}
				o, err := cl.BeginPull(cmd.Context(), req)
				return c.began(o, err)
			}
			img, err := c.pull(cmd.Context(), cl, req, f)
			if err != nil {
				return err
			}
			return c.show(img, func(w printer) error {
				if f.quiet {
					return line(w, img.Digest)
				}
				return line(w, img.Name+"  "+img.Digest+"  "+size(img.SizeBytes))
			})
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&name, "name", "", "local name in place of the full reference")
	cmd.Flags().StringVar(&platform, "platform", "", "os/architecture[/variant] (default this machine's)")
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "do not wait: print the id of the operation ('sandbox operation')")
	return cmd
}

// complete fills in what the flags say of a pull.
func (f *registryFlags) complete(c *cli, req *sandbox.PullRequest) error {
	ref, err := sandbox.ParseImageRef(req.Reference)
	if err != nil {
		return err
	}
	if req.Auth, err = f.auth(c, ref); err != nil {
		return err
	}
	req.PlainHTTP = f.plainWith(ref)
	return nil
}

// pull pulls an image, showing how far it has come.
func (c *cli) pull(ctx context.Context, cl *client.Client, req sandbox.PullRequest, f registryFlags) (sandbox.Image, error) {
	if err := f.complete(c, &req); err != nil {
		return sandbox.Image{}, err
	}
	p := c.progress(f.quiet)
	defer p.end()
	return cl.PullImage(ctx, req, p.show)
}

// pullFor pulls the image of a sandbox before that is made, where policy, or
// without one the image's name, asks for it.
func (c *cli) pullFor(ctx context.Context, cl *client.Client, name, policy string) error {
	if policy == "" {
		policy = pullNever
		if sandbox.NamesRegistry(name) {
			policy = pullMissing
		}
	}
	if name == "" || policy == pullNever {
		return nil
	}
	if policy == pullMissing {
		_, err := cl.Image(ctx, name)
		if err == nil || !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
	}
	_, err := c.pull(ctx, cl, sandbox.PullRequest{Reference: name}, registryFlags{})
	return err
}

func (c *cli) imagePushCmd() *cobra.Command {
	var f registryFlags
	var detach bool
	cmd := &cobra.Command{
		Use:   "push [flags] SOURCE [REFERENCE]",
		Short: "Push an image, a snapshot or a sandbox's files to a registry",
		Long: `Push an image to a registry, under REFERENCE or its own name. A snapshot (sn…)
or a sandbox (sb…) is pushed as an image made of its files.

Layers the registry has are not sent. An image that is pushed to the registry it
was pulled from keeps its digest; elsewhere its layers are compressed anew, and
the digest is another.`,
		Example: `  sandbox image push app:1.2 registry.example/team/app:1.2
  sandbox image push snabcdefghijkl registry.example/team/state:monday`,
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: c.completeImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := sandbox.PushRequest{Source: args[0]}
			ref, err := sandbox.ParseImageRef(args[len(args)-1])
			if err != nil {
				return err
			}
			if len(args) == 2 {
				req.Reference = args[1]
			}
			if req.Auth, err = f.auth(c, ref); err != nil {
				return err
			}
			req.PlainHTTP = f.plainWith(ref)
			cl, err := c.client()
			if err != nil {
				return err
			}
			if detach {
				o, err := cl.BeginPush(cmd.Context(), req)
				return c.began(o, err)
			}
			p := c.progress(f.quiet)
			defer p.end()
			out, err := cl.PushImage(cmd.Context(), req, p.show)
			if err != nil {
				return err
			}
			p.end()
			return c.show(out, func(w printer) error {
				if f.quiet {
					return line(w, out.Digest)
				}
				return line(w, fmt.Sprintf("%s  %s  %s, %s of it sent", out.Reference, out.Digest, size(out.Size), size(out.Uploaded)))
			})
		},
	}
	f.add(cmd)
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "do not wait: print the id of the operation ('sandbox operation')")
	return cmd
}

func (c *cli) imageImportCmd() *cobra.Command {
	var platform string
	cmd := &cobra.Command{
		Use:   "import [flags] NAME [FILE]",
		Short: "Make an image of an archive or an OCI layout",
		Long: `Make an image of an archive, plain or compressed with gzip or zstd: of a root file
system, of an OCI image layout, or of 'docker save'; which it is shows in it. FILE
may be the folder of an OCI layout; - or none is standard input. An image of the
same name is replaced; sandboxes made of the old one keep it.`,
		Example: `  sandbox image import debian:12 rootfs.tar.zst
  docker save app:1.2 | sandbox image import app:1.2
  sandbox image import app:1.2 ./oci-layout
  debootstrap --variant=minbase bookworm root && tar c -C root . | sandbox image import debian:12`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			src, done, err := c.archiveIn(args[1:])
			if err != nil {
				return err
			}
			defer done()
			cl, err := c.client()
			if err != nil {
				return err
			}
			img, err := cl.ImportImageFor(cmd.Context(), sandbox.ImportRequest{Name: args[0], Platform: platform}, src)
			if err != nil {
				return err
			}
			return c.show(img, func(w printer) error { return line(w, img.Name+"  "+img.Digest+"  "+size(img.SizeBytes)) })
		},
	}
	cmd.Flags().StringVar(&platform, "platform", "", "of an archive for several: os/architecture[/variant] (default this machine's)")
	return cmd
}

// archiveIn opens what an image is imported from.
func (c *cli) archiveIn(args []string) (io.Reader, func(), error) {
	if len(args) == 0 || args[0] == "-" {
		if isTerminal(c.in) {
			return nil, nil, usage("standard input is a terminal: name the archive, or pipe it in")
		}
		return c.in, func() {}, nil
	}
	info, err := os.Stat(args[0])
	if err != nil {
		return nil, nil, err
	}
	if info.IsDir() {
		if _, err := os.Stat(filepath.Join(args[0], "oci-layout")); err != nil {
			return nil, nil, usage("%s is a folder without an oci-layout: pack a root file system with tar c -C %s .", args[0], args[0])
		}
		r, w := io.Pipe()
		go func() { _ = w.CloseWithError(packLayout(args[0], w)) }() // the reader hears of it
		return r, func() { _ = r.Close() }, nil
	}
	f, err := os.Open(args[0])
	if err != nil {
		return nil, nil, err
	}
	return f, func() { _ = f.Close() }, nil // read only
}

func (c *cli) imageExportCmd() *cobra.Command {
	var format, name, out string
	cmd := &cobra.Command{
		Use:   "export [flags] SOURCE",
		Short: "Write an image, a snapshot or a sandbox's files as an archive",
		Long: `Write an image, a snapshot (sn…) or a sandbox's files (sb…) as one archive, to
standard output or a file: oci, an OCI image layout; docker, the same with what
'docker load' reads; tar, the root file system.`,
		Example: `  sandbox image export app:1.2 -f app.tar
  sandbox image export --format docker app:1.2 | docker load
  sandbox image export --format tar snabcdefghijkl | tar t`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			if out == "" && isTerminal(c.out) {
				return usage("standard output is a terminal: name a file with -f, or pipe it on")
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			body, err := cl.ExportImage(cmd.Context(), sandbox.ExportRequest{Source: args[0], Format: sandbox.ImageFormat(format), Name: name})
			if err != nil {
				return err
			}
			defer func() { _ = body.Close() }() // read to its end, or given up
			if out == "" {
				_, err = io.Copy(c.out, body)
				return err
			}
			return writeWhole(out, body)
		},
	}
	cmd.Flags().StringVar(&format, "format", "oci", "oci, docker or tar")
	cmd.Flags().StringVar(&name, "name", "", "name told in the archive (default the source's own)")
	cmd.Flags().StringVarP(&out, "file", "f", "", "file to write (default standard output)")
	return cmd
}

// writeWhole writes a file that is there whole or not at all.
func writeWhole(to string, r io.Reader) (err error) {
	f, err := os.CreateTemp(filepath.Dir(to), ".sandbox-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = io.Copy(f, r)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), to)
}

func (c *cli) imageTagCmd() *cobra.Command {
	return &cobra.Command{
		Use: "tag SOURCE NAME", Short: "Give an image another name too", Example: "  sandbox image tag app registry.example/team/app:1.2", Args: cobra.ExactArgs(2),
		ValidArgsFunction: c.completeImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			img, err := cl.TagImage(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return c.show(img, func(w printer) error { return line(w, img.Name+"  "+img.Digest) })
		},
	}
}

func (c *cli) imagePruneCmd() *cobra.Command {
	var all, dry bool
	var until time.Duration
	cmd := &cobra.Command{
		Use:   "prune [flags]",
		Short: "Remove images that nothing uses",
		Long: `Remove images that no living sandbox and no snapshot was made of: those that can be
pulled again, with --all imported and built ones too. Layers that another image
stands on stay.`,
		Example: `  sandbox image prune
  sandbox image prune --all --until 720h`,
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			out, err := cl.PruneImages(cmd.Context(), sandbox.PruneRequest{All: all, DryRun: dry, Until: seconds(until)})
			if err != nil {
				return err
			}
			return c.show(out, func(w printer) error {
				for _, name := range out.Images {
					if err := line(w, name); err != nil {
						return err
					}
				}
				if dry {
					return line(w, fmt.Sprintf("%d images would be removed", len(out.Images)))
				}
				return line(w, fmt.Sprintf("%d images removed, %s freed", len(out.Images), size(out.FreedBytes)))
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "imported and built images too, which no registry has")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "remove nothing, tell which it would be")
	cmd.Flags().DurationVar(&until, "until", 0, "only images older than this, as 720h")
	return cmd
}
