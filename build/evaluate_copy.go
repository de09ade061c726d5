package build

import (
	"path"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	"github.com/sandboxd/sandboxd/build/ignore"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (e *evaluation) copy(c *instructions.CopyCommand) error {
	o, err := e.copyOp("COPY", c.SourcesAndDest, c.Chown, c.Chmod, c.ExcludePatterns)
	if err != nil {
		return err
	}
	if c.From != "" {
		if o.from, err = e.file.from(e.stage.index, c); err != nil {
			return err
		}
		if len(o.inlines) > 0 {
			return e.invalid("COPY --from with a heredoc: the heredoc is the file itself, leave --from out")
		}
	}
	if c.Link {
		e.note("--link is ignored: every step is a layer of its own here")
	}
	e.add(op{copy: o})
	return nil
}

func (e *evaluation) addFiles(c *instructions.AddCommand) error {
	o, err := e.copyOp("ADD", c.SourcesAndDest, c.Chown, c.Chmod, c.ExcludePatterns)
	if err != nil {
		return err
	}
	for _, s := range o.sources { // the variables are in them now
		if remote(s) {
			return e.unsupported("ADD of a URL or git repository (%.80s) is not supported: fetch it in a RUN step with --network open, or put it into the context", s)
		}
	}
	o.unpack = c.Unpack == nil || *c.Unpack
	if c.Link {
		e.note("--link is ignored: every step is a layer of its own here")
	}
	e.add(op{copy: o})
	return nil
}

// copyOp expands what COPY and ADD have in common.
func (e *evaluation) copyOp(word string, p instructions.SourcesAndDest, chown, chmod string, exclude []string) (*copyOp, error) {
	o := &copyOp{from: ref{stage: -1}}
	sources, err := e.expandAll(p.SourcePaths)
	if err != nil {
		return nil, err
	}
	for _, s := range sources {
		if s == "" {
			return nil, e.invalid("%s: a source is empty", word)
		}
		if !remote(s) {
			s = strings.TrimPrefix(path.Clean("/"+s), "/")
		}
		o.sources = append(o.sources, s)
	}
	for _, c := range p.SourceContents {
		data := c.Data
		if c.Expand {
			x := expander{raw: true}
			if data, err = x.word(data, e.vars()); err != nil {
				return nil, err
			}
		}
		if strings.ContainsAny(c.Path, "/\x00") || c.Path == "." || c.Path == ".." {
			return nil, e.invalid("%s: a heredoc %.40q is no file name", word, c.Path)
		}
		o.inlines = append(o.inlines, inline{name: c.Path, data: data})
	}
	if o.dest, err = e.destination(word, p.DestPath); err != nil {
		return nil, err
	}
	if n := len(o.sources) + len(o.inlines); n == 0 {
		return nil, e.invalid("%s names no source", word)
	} else if n > 1 && !strings.HasSuffix(o.dest, "/") {
		return nil, e.invalid("%s of several sources: the destination must be a directory and end with /", word)
	}
	if o.chown, err = e.expand(chown); err != nil {
		return nil, err
	}
	if err := sandbox.ValidateUser(o.chown); err != nil {
		return nil, e.invalid("%s --chown=%.40q: use user or user:group, by name or number", word, o.chown)
	}
	if o.chmod, err = e.chmod(word, chmod); err != nil {
		return nil, err
	}
	if o.exclude, err = e.expandAll(exclude); err != nil {
		return nil, err
	}
	if _, err := ignore.New(o.exclude); err != nil {
		return nil, e.invalid("%s --exclude: %w", word, err)
	}
	return o, nil
}

// destination is an absolute path, with a slash at the end where it was
// written as a directory.
func (e *evaluation) destination(word, dest string) (string, error) {
	dest, err := e.expand(dest)
	if err != nil {
		return "", err
	}
	if dest == "" || strings.ContainsRune(dest, 0) || len(dest) > 4096 {
		return "", e.invalid("%s: the destination %.40q is no path", word, dest)
	}
	dir := strings.HasSuffix(dest, "/") || dest == "." || dest == ".." || strings.HasSuffix(dest, "/.") || strings.HasSuffix(dest, "/..")
	if !path.IsAbs(dest) {
		dest = path.Join(e.stage.config.WorkDir, dest)
	}
	if dest = path.Clean(dest); dir && dest != "/" {
		dest += "/"
	}
	return dest, nil
}

// chmod reads an octal mode.
func (e *evaluation) chmod(word, mode string) (*uint32, error) {
	mode, err := e.expand(mode)
	if mode == "" || err != nil {
		return nil, err
	}
	n, err := strconv.ParseUint(mode, 8, 32)
	if err != nil || n > 0o7777 {
		if strings.Trim(mode, "0123456789") == "" {
			return nil, e.invalid("%s --chmod=%.20s: use an octal mode, as 0755", word, mode)
		}
		return nil, e.unsupported("%s --chmod=%.20s: only octal modes are supported, as 0755", word, mode)
	}
	m := uint32(n)
	return &m, nil
}
