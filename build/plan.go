package build

import (
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ref is where files come from: a stage, or else an image; or the context.
type ref struct {
	stage int    // of the Dockerfile; -1: none
	image string // if stage is -1; empty: the context
}

// scratch is the name that stands for no image.
const scratch = "scratch"

// chosen is one stage that is built.
type chosen struct {
	index int
	name  string // for people: its name, or else its number
	base  ref
}

// choose returns the stages the target needs, in the order of the file, the
// target last. args expand the names after FROM.
func (d *dockerfile) choose(target string, args environ) ([]chosen, error) {
	last, err := d.target(target)
	if err != nil {
		return nil, err
	}
	bases := make([]ref, len(d.stages))
	needed := map[int]bool{last: true}
	for i := last; i >= 0; i-- { // stages need only earlier ones
		if !needed[i] {
			continue
		}
		if bases[i], err = d.base(i, args); err != nil {
			return nil, err
		}
		if bases[i].stage >= 0 {
			needed[bases[i].stage] = true
		}
		for _, c := range d.stages[i].Commands {
			if why := refused(c); why != "" {
				return nil, d.unsupported(lineOf(c.Location()), "%s", why)
			}
			if copy, ok := c.(*instructions.CopyCommand); ok && copy.From != "" {
				from, err := d.from(i, copy)
				if err != nil {
					return nil, err
				}
				if from.stage >= 0 {
					needed[from.stage] = true
				}
			}
		}
	}
	var all []chosen
	for i := range d.stages {
		if needed[i] {
			all = append(all, chosen{index: i, name: d.stageName(i), base: bases[i]})
		}
	}
	return all, nil
}

func (d *dockerfile) stageName(i int) string {
	if n := d.stages[i].Name; n != "" {
		return n
	}
	return strconv.Itoa(i)
}

// target finds the stage to build.
func (d *dockerfile) target(name string) (int, error) {
	if name == "" {
		return len(d.stages) - 1, nil
	}
	if i, ok := d.stage(name, len(d.stages)); ok {
		return i, nil
	}
	var names []string
	for i := range d.stages {
		names = append(names, d.stageName(i))
	}
	return 0, sandbox.Errorf(sandbox.ErrInvalid, "build_no_stage", "no stage %.80q in the Dockerfile: it has %s", name, strings.Join(names, ", "))
}

// stage finds a stage by name or number among the first n.
func (d *dockerfile) stage(name string, n int) (int, bool) {
	for i := n - 1; i >= 0; i-- { // of two of a name, the later counts
		if d.stages[i].Name != "" && strings.EqualFold(d.stages[i].Name, name) {
			return i, true
		}
	}
	if i, err := strconv.Atoi(name); err == nil && i >= 0 && i < n {
		return i, true
	}
	return 0, false
}

// base is what a stage begins with.
func (d *dockerfile) base(i int, args environ) (ref, error) {
	s := d.stages[i]
	line := lineOf(s.Location)
	x := expander{escape: d.escape}
	name, err := x.word(s.BaseName, args)
	if err != nil {
		return ref{}, d.invalid(line, "%w", err)
	}
	if name == "" {
		return ref{}, d.invalid(line, "FROM %s names nothing: give the ARG a default, or a --build-arg", clip(s.BaseName, 80))
	}
	if s.Platform != "" {
		p, err := x.word(s.Platform, args)
		if err != nil {
			return ref{}, d.invalid(line, "%w", err)
		}
		if !samePlatform(p) {
			return ref{}, d.unsupported(line, "FROM --platform=%.40s: only %s can be built here", p, hostPlatform())
		}
	}
	if n, ok := d.stage(name, i); ok && !isNumber(name) {
		return ref{stage: n}, nil
	}
	if name == scratch {
		return ref{stage: -1, image: scratch}, nil
	}
	if err := sandbox.ValidateImageName(name); err != nil {
		return ref{}, d.invalid(line, "%w", err)
	}
	return ref{stage: -1, image: name}, nil
}

// isNumber: FROM 0 names an image, unlike COPY --from=0.
func isNumber(s string) bool { _, err := strconv.Atoi(s); return err == nil }

// from is the source of a COPY --from.
func (d *dockerfile) from(i int, c *instructions.CopyCommand) (ref, error) {
	line := lineOf(c.Location())
	if n, ok := d.stage(c.From, i); ok {
		return ref{stage: n}, nil
	}
	if n, ok := d.stage(c.From, len(d.stages)); ok {
		return ref{}, d.invalid(line, "COPY --from=%s: stage %s comes later, or is this one: it must stand before", clip(c.From, 80), d.stageName(n))
	}
	if isNumber(c.From) {
		return ref{}, d.invalid(line, "COPY --from=%s: there is no such stage", clip(c.From, 80))
	}
	if strings.ContainsRune(c.From, '$') {
		return ref{}, d.unsupported(line, "COPY --from=%s: variables are not expanded there; make it a stage with FROM", clip(c.From, 80))
	}
	if c.From == scratch {
		return ref{}, d.invalid(line, "COPY --from=scratch: there is nothing in it")
	}
	if err := sandbox.ValidateImageName(c.From); err != nil {
		return ref{}, d.invalid(line, "COPY --from: %w", err)
	}
	return ref{stage: -1, image: c.From}, nil
}
