package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/build/ignore"
	"github.com/sandboxd/sandboxd/sandbox"
)

// buildFlags are the flags of image build.
type buildFlags struct {
	file         string
	args         []string
	net          netFlags
	memory, disk sizeFlag
	timeout      time.Duration
	quiet        bool
	req          sandbox.BuildRequest
}

func (c *cli) imageBuildCmd() *cobra.Command {
	var f buildFlags
	cmd := &cobra.Command{
		Use:   "build [flags] CONTEXT",
		Short: "Build an image of a Dockerfile",
		Long: `Build an image of a Dockerfile. CONTEXT is the directory COPY and ADD take files
from, without what its .dockerignore names; it is sent to the daemon.

Every step runs in a sandbox of its own, and what it wrote becomes a layer. Steps
that were done before, with the same files and words, come from the cache. The
network is off unless you open it. docs/BUILD.md tells what of a Dockerfile is
supported; what is not is refused with its line.

Progress goes to standard error; the image's name and digest to standard output.
Interrupting it ends the build and removes its sandboxes.`,
		Example: `  sandbox image build -t app .
  sandbox image build -t app:test --target test --build-arg VERSION=1.2 .
  sandbox image build -t tools --network open -f tools.Dockerfile .
  sandbox image build -t tiny -f - . < Dockerfile
  sandbox image build prune --older-than 240h   # forget steps nobody used`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return c.build(cmd, &f, args[0]) },
	}
	fl := cmd.Flags()
	fl.SortFlags = false
	l := &f.req.Limits
	fl.StringArrayVarP(&f.req.Names, "tag", "t", nil, "name of the image; repeatable")
	fl.StringVarP(&f.file, "file", "f", "", "Dockerfile (CONTEXT/Dockerfile); - for standard input")
	fl.StringArrayVar(&f.args, "build-arg", nil, "value K=V of an ARG, or K to pass on your own; repeatable")
	fl.StringVar(&f.req.Target, "target", "", "stage to build, by name or number; the last if not given")
	fl.BoolVar(&f.req.NoCache, "no-cache", false, "run every step")
	f.net.add(cmd)
	fl.StringVar(&f.net.mode, "network", "", "the same as --net: the network of RUN steps")
	fl.Float64Var(&l.CPUs, "cpu", 0, "CPU cores of each step, as 0.5 or 2")
	fl.Float64Var(&l.CPUs, "cpus", 0, "the same")
	fl.Var(&f.memory, "memory", "memory of each step, as 512m or 2g")
	fl.Var(&f.disk, "disk", "bytes each step may write, as 2g")
	fl.Int64Var(&l.DiskInodes, "inodes", 0, "files each step may make")
	fl.Int64Var(&l.PIDs, "pids", 0, "processes and threads of each step at one time")
	fl.DurationVar(&f.timeout, "timeout", 0, "end the build after this long; the daemon's limit if not given")
	fl.StringVar(&f.req.Platform, "platform", "", "os/arch; only this machine's can be built")
	fl.BoolVarP(&f.quiet, "quiet", "q", false, "print the digest only")
	_ = fl.MarkHidden("cpus") // it exists: Docker's name of --cpu
	cmd.AddCommand(c.buildPruneCmd())
	return cmd
}

func (c *cli) buildPruneCmd() *cobra.Command {
	var older time.Duration
	var keep int
	cmd := &cobra.Command{
		Use: "prune", Short: "Forget steps of builds", Args: cobra.NoArgs,
		Long:    "Forget steps of builds, so that their layers can go: all of them, or as the flags say. Images stay.",
		Example: "  sandbox image build prune --older-than 240h --keep 500",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			gone, err := cl.PruneBuildCache(cmd.Context(), sandbox.BuildCachePrune{OlderThanSeconds: seconds(older), Keep: keep})
			if err != nil {
				return err
			}
			return c.show(gone, func(w printer) error { return line(w, fmt.Sprintf("%d steps forgotten", gone.Steps)) })
		},
	}
	cmd.Flags().DurationVar(&older, "older-than", 0, "only steps not used for this long")
	cmd.Flags().IntVar(&keep, "keep", 0, "of the others keep this many, the last used")
	return cmd
}

// build sends a directory and a Dockerfile and tells how it goes.
func (c *cli) build(cmd *cobra.Command, f *buildFlags, dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return usage("%s is not a directory: CONTEXT is the directory COPY takes files from", dir)
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return err
	}
	if err := f.finish(c, dir); err != nil {
		return err
	}
	rules, err := ignoreRules(f.file, dir)
	if err != nil {
		return err
	}
	cl, err := c.client()
	if err != nil {
		return err
	}
	p := buildProgress{c: c, quiet: f.quiet}
	img, err := cl.Build(cmd.Context(), f.req, func(w io.Writer) error { return writeContext(w, dir, rules) }, p.tell)
	if err != nil {
		return err
	}
	if f.quiet || c.output == "json" { // json has told the image as its last event
		if c.output == "json" && !f.quiet {
			return nil
		}
		return line(c.printer(c.out), img.Digest)
	}
	return c.show(img, func(w printer) error {
		names := f.req.Names
		if len(names) == 0 {
			names = []string{"-"}
		}
		for _, n := range names {
			if err := line(w, n+"  "+img.Digest+"  "+size(img.SizeBytes)); err != nil {
				return err
			}
		}
		return nil
	})
}

// finish makes the flags a request.
func (f *buildFlags) finish(c *cli, dir string) error {
	var text []byte
	var err error
	switch f.file {
	case "-":
		text, err = io.ReadAll(io.LimitReader(c.in, sandbox.MaxDockerfile+1))
	case "":
		f.file = filepath.Join(dir, "Dockerfile")
		fallthrough
	default:
		text, err = os.ReadFile(f.file)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return usage("there is no %s: name the Dockerfile with -f", f.file)
	}
	if err != nil {
		return err
	}
	f.req.Dockerfile = string(text)
	if f.req.Args, err = parseEnv(f.args, c.getenv); err != nil {
		return usage("--build-arg: %w", err)
	}
	if f.req.Network, err = f.net.over(f.req.Network, c.in); err != nil {
		return err
	}
	f.req.Limits.MemoryBytes, f.req.Limits.DiskBytes = int64(f.memory), int64(f.disk)
	f.req.TimeoutSeconds = seconds(f.timeout)
	return f.req.Validate()
}

// ignoreRules reads NAME.dockerignore beside the Dockerfile or, where there is
// none, the context's.
func ignoreRules(dockerfile, dir string) (*ignore.Rules, error) {
	names := []string{filepath.Join(dir, ".dockerignore")}
	if dockerfile != "-" {
		names = append([]string{dockerfile + ".dockerignore"}, names...)
	}
	for _, n := range names {
		f, err := os.Open(n)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		defer func() { _ = f.Close() }() // read only
		return ignore.Read(f)
	}
	return ignore.New(nil)
}

// writeContext archives a directory without what the rules leave out.
func writeContext(w io.Writer, dir string, rules *ignore.Rules) error {
	a := &contextWriter{dir: dir, tw: tar.NewWriter(w), rules: rules, links: map[[2]uint64]string{}, sent: map[string]bool{".": true}}
	err := filepath.WalkDir(dir, a.visit)
	if err != nil {
		return err
	}
	return a.tw.Close()
}

type contextWriter struct {
	dir   string
	tw    *tar.Writer
	rules *ignore.Rules
	links map[[2]uint64]string // names of files with several
	sent  map[string]bool      // directories
}

func (a *contextWriter) visit(p string, d fs.DirEntry, err error) error {
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(a.dir, p)
	if err != nil || rel == "." {
		return err
	}
	name := filepath.ToSlash(rel)
	out, err := a.rules.Excludes(name, d.IsDir())
	switch {
	case err != nil:
		return err
	case out && d.IsDir() && a.rules.Skips(name):
		return fs.SkipDir
	case out:
		return nil
	}
	return a.add(name)
}

// add writes a file after the directories it lies in, which may be left out
// but for it.
func (a *contextWriter) add(name string) error {
	if a.sent[name] {
		return nil
	}
	if err := a.add(path.Dir(name)); err != nil {
		return err
	}
	p := filepath.Join(a.dir, filepath.FromSlash(name))
	info, err := os.Lstat(p)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // deleted while we walk
	}
	if err != nil {
		return err
	}
	if info.IsDir() {
		a.sent[name] = true
	}
	return addFile(a.tw, p, name, info, a.links, &leftOut{})
}

// buildProgress shows the events of a build.
type buildProgress struct {
	c       *cli
	quiet   bool
	partial bool // the last output did not end its line
}

func (p *buildProgress) tell(e sandbox.BuildEvent) error {
	if p.quiet {
		return nil
	}
	if p.c.output == "json" {
		return p.c.showLine(e, "")
	}
	if p.partial && e.Type != sandbox.BuildOutput {
		p.partial = false
		p.c.say("\n")
	}
	w, where := p.c.printer(p.c.err), fmt.Sprintf("[%s %d/%d]", e.Stage, e.Step, e.Steps)
	switch e.Type {
	case sandbox.BuildNote:
		at := ""
		if e.Line > 0 {
			at = fmt.Sprintf("line %d: ", e.Line)
		}
		p.c.say("%s\n", w.paint(yellow, "note: "+at+e.Text))
	case sandbox.BuildStep:
		word := clean("")
		if e.Cached {
			word = w.paint(green, "CACHED ")
		}
		p.c.say("%s %s%s\n", where, word, e.Text)
	case sandbox.BuildOutput:
		text := sandbox.PlainText(strings.ReplaceAll(string(e.Data), "\r\n", "\n"))
		p.c.say("%s", clean(text))
		p.partial = !strings.HasSuffix(text, "\n")
	case sandbox.BuildDone:
		p.c.say("%s %s\n", where, w.paint(grey, fmt.Sprintf("done in %.1fs", e.Seconds)))
	}
	return nil
}
