package ignore

import (
	"io"
	"path"
	"strings"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Rules are the patterns of one ignore file, in order; later ones win. The
// zero value leaves nothing out. One goroutine at a time uses it.
type Rules struct {
	matcher *patternmatcher.PatternMatcher
	seen    map[string]patternmatcher.MatchInfo // of directories
}

// Read reads a .dockerignore file: a pattern a line, # for comments, ! for
// exceptions. ErrInvalid for a pattern that is none.
func Read(r io.Reader) (*Rules, error) {
	patterns, err := ignorefile.ReadAll(r)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_dockerignore", "reading .dockerignore: %w", err)
	}
	return New(patterns)
}

// New makes rules of patterns. ErrInvalid for one that is none.
func New(patterns []string) (*Rules, error) {
	if len(patterns) == 0 {
		return &Rules{}, nil
	}
	clean := make([]string, len(patterns))
	for i, p := range patterns { // anchored or not: both mean the top
		not := ""
		if strings.HasPrefix(p, "!") {
			not, p = "!", strings.TrimSpace(p[1:])
		}
		if p == "" {
			return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_dockerignore", "pattern %.80q names nothing", patterns[i])
		}
		if p = path.Clean(strings.TrimLeft(p, "/")); strings.HasPrefix(p, "../") || p == ".." {
			return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_dockerignore", "pattern %.80q leads out of the directory", patterns[i])
		}
		clean[i] = not + p
	}
	m, err := patternmatcher.New(clean)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_dockerignore", "ignore patterns: %w", err)
	}
	return &Rules{matcher: m, seen: map[string]patternmatcher.MatchInfo{}}, nil
}

// Excludes tells whether a file, named relative to the top with slashes, is
// left out. Directories must be asked about before what is in them.
func (r *Rules) Excludes(name string, dir bool) (bool, error) {
	if r.matcher == nil || name == "." || name == "" {
		return false, nil
	}
	out, info, err := r.matcher.MatchesUsingParentResults(name, r.seen[path.Dir(name)])
	if err != nil {
		return false, sandbox.Errorf(sandbox.ErrInvalid, "invalid_dockerignore", "matching %.200q: %w", name, err)
	}
	if dir {
		r.seen[name] = info
	}
	return out, nil
}

// Skips tells whether nothing beneath an excluded directory can come back by
// an exception, so that a walk need not enter it.
func (r *Rules) Skips(dir string) bool {
	if r.matcher == nil {
		return false
	}
	for _, p := range r.matcher.Patterns() {
		if !p.Exclusion() {
			continue
		}
		pattern := p.String()
		if mayLieBeneath(strings.Split(pattern, "/"), strings.Split(dir, "/")) {
			return false
		}
	}
	return true
}

// mayLieBeneath tells whether a pattern could match something in dir or above
// it, which brings all of it back.
func mayLieBeneath(pattern, dir []string) bool {
	for i := range min(len(pattern), len(dir)) {
		if pattern[i] == "**" {
			return true
		}
		if ok, err := path.Match(pattern[i], dir[i]); err != nil || !ok {
			return err != nil
		}
	}
	return true
}
