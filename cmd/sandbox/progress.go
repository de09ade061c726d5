package main

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/docker/go-units"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"github.com/sandboxd/sandboxd/sandbox"
)

// dockerAuth returns the credentials that 'docker login' keeps for a registry,
// in a file or with a helper, or nil.
func dockerAuth(c *cli, ref sandbox.ImageRef) (*sandbox.RegistryAuth, error) {
	host := ref.Host
	if host == sandbox.DefaultRegistry {
		host = name.DefaultRegistry
	}
	reg, err := name.NewRegistry(host, name.WeakValidation)
	if err != nil {
		return nil, usage("registry %q: %w", host, err)
	}
	found, err := authn.DefaultKeychain.Resolve(reg)
	if err != nil {
		c.warn("reading the credentials of docker login: %v; going on without", err)
		return nil, nil //nolint:nilnil // none is an answer: the daemon may have some
	}
	a, err := found.Authorization()
	if err != nil {
		c.warn("reading the credentials of docker login: %v; going on without", err)
		return nil, nil //nolint:nilnil // as above
	}
	auth := &sandbox.RegistryAuth{Username: a.Username, Password: a.Password, IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken}
	if auth.Empty() {
		return nil, nil //nolint:nilnil // as above
	}
	return auth, nil
}

// progress shows how far a transfer has come: bars on a terminal, else a line
// for each step.
type progress struct {
	c      *cli
	quiet  bool
	bars   bool
	order  []string // layers as they came
	last   map[string]sandbox.ImageProgress
	drawn  int // lines on the terminal
	closed bool
}

func (c *cli) progress(quiet bool) *progress {
	return &progress{
		c: c, quiet: quiet, last: map[string]sandbox.ImageProgress{},
		bars: !quiet && isTerminal(c.err) && c.getenv("TERM") != "dumb",
	}
}

// show takes one report.
func (p *progress) show(s sandbox.ImageProgress) {
	if p.quiet {
		return
	}
	before, seen := p.last[s.Layer]
	if !seen && s.Layer != "" {
		p.order = append(p.order, s.Layer)
	}
	p.last[s.Layer] = s
	switch {
	case p.bars:
		p.draw()
	case s.Layer == "":
		p.c.say("%s %s %s\n", s.Status, s.Detail, size(s.Total))
	case s.Status == sandbox.StepWaiting, seen && before.Status == s.Status && s.Status != sandbox.StepRetrying:
	default:
		p.c.say("%s\n", strings.TrimRight(fmt.Sprintf("%s %s %s %s", shortDigest(s.Layer), s.Status, size(s.Total), s.Detail), " "))
	}
}

// end leaves the last state standing.
func (p *progress) end() { p.closed = true }

// The most bars drawn, and the width of each.
const (
	mostBars = 12
	barWidth = 24
)

// draw draws a line for each layer that is on its way, over those drawn
// before.
func (p *progress) draw() {
	if p.closed {
		return
	}
	var lines []string
	var done, ready int64
	for _, l := range p.order {
		s := p.last[l]
		switch s.Status {
		case sandbox.StepExists, sandbox.StepDone, sandbox.StepPushed:
			done++
			ready += s.Total
			continue
		}
		if len(lines) < mostBars {
			lines = append(lines, fmt.Sprintf("%s %-11s %s %9s of %s", shortDigest(l), s.Status, bar(s.Current, s.Total), units.BytesSize(float64(s.Current)), size(s.Total)))
		}
	}
	lines = append(lines, fmt.Sprintf("%d of %d layers, %s", done, len(p.order), size(ready)))
	var b strings.Builder
	if p.drawn > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", p.drawn)
	}
	for _, l := range lines {
		b.WriteString("\r\x1b[K" + plain(l) + "\n")
	}
	for range max(0, p.drawn-len(lines)) {
		b.WriteString("\r\x1b[K\n")
	}
	p.drawn = max(p.drawn, len(lines))
	_, _ = io.WriteString(p.c.err, b.String()) // a terminal that is gone
}

func bar(n, of int64) string {
	full := 0
	if of > 0 {
		full = int(min(n, of) * barWidth / of)
	}
	return "[" + strings.Repeat("=", full) + strings.Repeat(" ", barWidth-full) + "]"
}

// shortDigest is enough of a layer's name to tell it from others.
func shortDigest(s string) string {
	_, s, _ = strings.Cut(s, ":")
	return s[:min(len(s), 12)]
}

// packLayout writes the folder of an OCI layout as an archive, its index
// first so that it shows what it is.
func packLayout(dir string, w io.Writer) error {
	tw := tar.NewWriter(w)
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // read only
	add := func(path string) error {
		f, err := root.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }() // read only
		info, err := f.Stat()
		if err != nil || !info.Mode().IsRegular() {
			return err
		}
		if err := tw.WriteHeader(&tar.Header{Name: filepath.ToSlash(path), Mode: 0o644, Size: info.Size(), Typeflag: tar.TypeReg}); err != nil {
			return err
		}
		_, err = io.Copy(tw, f)
		return err
	}
	for _, name := range []string{"oci-layout", "index.json"} {
		if err := add(name); err != nil {
			return err
		}
	}
	err = fs.WalkDir(root.FS(), "blobs", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return add(path)
	})
	if err != nil {
		return err
	}
	return tw.Close()
}
