package build

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// keysOf are the keys of the operations of a Dockerfile's last stage, each on
// the same base.
func keysOf(t *testing.T, text string, args map[string]string, on sandbox.Image, tr *Tree) []string {
	t.Helper()
	_, stages, err := evaluated(text, args, "")
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, o := range stages[len(stages)-1].ops {
		switch {
		case o.run != nil:
			keys = append(keys, o.run.key(on, sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}))
		case o.dir != nil:
			keys = append(keys, o.dir.key(on))
		case o.copy != nil:
			chosen, err := tr.choose(o.copy)
			if err != nil {
				t.Fatal(err)
			}
			keys = append(keys, o.copy.key(on, chosen))
		}
	}
	return keys
}

func TestCacheKeys(t *testing.T) {
	other := base
	other.Layers = []string{"sha256:base", "upper:x"}
	files := func(change func(map[string]f)) *Tree {
		all := map[string]f{"a": {name: "a", data: "A"}, "d": {name: "d/"}, "d/b": {name: "d/b", data: "B"}, "d/l": {name: "d/l -> b"}, "z": {name: "z", data: "Z"}}
		if change != nil {
			change(all)
		}
		var list []f
		for _, k := range []string{"a", "d", "d/b", "d/l", "z"} {
			if all[k].name != "" {
				list = append(list, all[k])
			}
		}
		return mustTree(t, list...)
	}
	set := func(name string, v f) func(map[string]f) { return func(m map[string]f) { m[name] = v } }
	const run, add = "FROM base\nENV E=1\nARG A=1\nUSER 1\nRUN x", "FROM base\nCOPY d a /w/"
	for _, c := range []struct {
		name       string
		text, then string
		args       map[string]string // of then
		on         sandbox.Image
		tree       *Tree
		same       bool
	}{
		{name: "nothing changed", text: run, same: true},
		{name: "words that change no file", text: run, then: "FROM base\nLABEL x=1\nENV E=1\nCMD y\nEXPOSE 1\nARG A=1\nUSER 1\n\n# c\nRUN x\nENTRYPOINT z", same: true},
		{name: "the command", text: run, then: "FROM base\nENV E=1\nARG A=1\nUSER 1\nRUN y"},
		{name: "an ENV before it", text: run, then: "FROM base\nENV E=2\nARG A=1\nUSER 1\nRUN x"},
		{name: "an ENV after it", text: run, then: "FROM base\nENV E=1\nARG A=1\nUSER 1\nRUN x\nENV E=2", same: true},
		{name: "an ARG's default", text: run, then: "FROM base\nENV E=1\nARG A=2\nUSER 1\nRUN x"},
		{name: "an ARG's value", text: run, args: map[string]string{"A": "2"}},
		{name: "an ARG nobody declares", text: run, args: map[string]string{"B": "2"}, same: true},
		{name: "a proxy", text: run, args: map[string]string{"HTTP_PROXY": "p"}, same: true},
		{name: "a proxy that is declared", text: run, then: "FROM base\nENV E=1\nARG A=1\nARG HTTP_PROXY\nUSER 1\nRUN x", args: map[string]string{"HTTP_PROXY": "p"}},
		{name: "the user", text: run, then: "FROM base\nENV E=1\nARG A=1\nUSER 2\nRUN x"},
		{name: "the shell", text: run, then: "FROM base\nENV E=1\nARG A=1\nUSER 1\nSHELL [\"sh\"]\nRUN x"},
		{name: "the network", text: run, then: "FROM base\nENV E=1\nARG A=1\nUSER 1\nRUN --network=none x"},
		{name: "what it stands on", text: run, on: other},
		{name: "the working directory", text: "FROM base\nWORKDIR /a", then: "FROM base\nWORKDIR /b"},
		{name: "a heredoc", text: "FROM base\nRUN <<A\n#!x\n1\nA", then: "FROM base\nRUN <<A\n#!x\n2\nA"},

		{name: "copy: nothing changed", text: add, same: true},
		{name: "copy: times", text: add, tree: files(set("a", f{name: "a", data: "A", at: time.Unix(99, 5)})), same: true},
		{name: "copy: owners of the context", text: add, tree: files(set("a", f{name: "a", data: "A", uid: 7})), same: true},
		{name: "copy: a file that is not copied", text: add, tree: files(set("z", f{name: "z", data: "!"})), same: true},
		{name: "copy: a content", text: add, tree: files(set("a", f{name: "a", data: "a"}))},
		{name: "copy: a content beneath", text: add, tree: files(set("d/b", f{name: "d/b", data: "b"}))},
		{name: "copy: a mode", text: add, tree: files(set("a", f{name: "a", data: "A", mode: 0o755}))},
		{name: "copy: a link", text: add, tree: files(set("d/l", f{name: "d/l -> c"}))},
		{name: "copy: a file less", text: add, tree: files(set("d/b", f{}))},
		{name: "copy: a name", text: add, tree: files(set("d/b", f{name: "d/c", data: "B"}))},
		{name: "copy: a directory in place of a file", text: add, tree: files(set("d/b", f{name: "d/b/"}))},
		{name: "copy: the order of sources", text: add, then: "FROM base\nCOPY a d /w/"},
		{name: "copy: the destination", text: add, then: "FROM base\nCOPY d a /v/"},
		{name: "copy: the owner", text: add, then: "FROM base\nCOPY --chown=5 d a /w/"},
		{name: "copy: the mode asked for", text: add, then: "FROM base\nCOPY --chmod=755 d a /w/"},
		{name: "copy: what is excluded", text: add, then: "FROM base\nCOPY --exclude=b d a /w/"},
		{name: "copy: written otherwise", text: add, then: "FROM base\nCOPY --link ./d/ /x/../a /w/.", same: true},
		{name: "copy or add", text: add, then: "FROM base\nADD d a /w/"},
		{name: "an inline file", text: "FROM base\nCOPY <<A /x\n1\nA", then: "FROM base\nCOPY <<A /x\n2\nA"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.then == "" {
				c.then = c.text
			}
			if c.on.Layers == nil {
				c.on = base
			}
			if c.tree == nil {
				c.tree = files(nil)
			}
			before := keysOf(t, c.text, nil, base, files(nil))
			after := keysOf(t, c.then, c.args, c.on, c.tree)
			if len(before) != 1 || len(after) != 1 {
				t.Fatalf("%d and %d operations", len(before), len(after))
			}
			if (before[0] == after[0]) != c.same {
				t.Errorf("keys %s and %s: same is to be %v", before[0], after[0], c.same)
			}
		})
	}
}

// TestKeysAreUnambiguous: what ends one part of a key does not begin the next.
func TestKeysAreUnambiguous(t *testing.T) {
	a, b := newHasher(), newHasher()
	a.list([]string{"x", "yz"})
	b.list([]string{"xy", "z"})
	if a.sum() == b.sum() {
		t.Error("two lists have one key")
	}
	o := &copyOp{from: ref{stage: 1}, sources: []string{"x"}, dest: "/y"}
	from := sandbox.Image{Kind: sandbox.ImageBuild, Layers: []string{"sha256:a"}}
	again := sandbox.Image{Kind: sandbox.ImageBuild, Layers: []string{"sha256:b"}}
	if o.linkKey(base, from) == o.linkKey(base, again) {
		t.Error("the key of a copy between stages does not follow the stage's layers")
	}
}
