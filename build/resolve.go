package build

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// resolve chooses and evaluates the stages the target needs, in order. find
// returns the image a FROM on a line names; it is not asked for scratch.
func (d *dockerfile) resolve(given environ, target string, find func(name string, line int) (sandbox.Image, error)) ([]*stage, error) {
	global, used, err := d.globals(given, target)
	if err != nil {
		return nil, err
	}
	all, err := d.choose(target, global)
	if err != nil {
		return nil, err
	}
	byIndex := map[int]*stage{}
	var stages []*stage
	for _, c := range all {
		var base *stage
		var image sandbox.Image
		switch {
		case c.base.stage >= 0:
			base = byIndex[c.base.stage]
		case c.base.image != scratch:
			if image, err = find(c.base.image, lineOf(d.stages[c.index].Location)); err != nil {
				return nil, err
			}
		}
		s, err := d.evaluate(c, base, image, given, global, used)
		if err != nil {
			return nil, err
		}
		byIndex[c.index] = s
		stages = append(stages, s)
	}
	d.unused(given, used)
	return stages, nil
}

// unused notes arguments that were given and that nothing took.
func (d *dockerfile) unused(given environ, used map[string]bool) {
	var names []string
	for _, k := range given.Keys() {
		if !used[k] && !slices.Contains(proxyArgs, k) {
			names = append(names, k)
		}
	}
	if len(names) > 0 {
		d.notes = append(d.notes, note{0, fmt.Sprintf("no ARG takes these build arguments: %s", clip(strings.Join(names, ", "), 300))})
	}
}
