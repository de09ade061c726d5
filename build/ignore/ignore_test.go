package ignore

import (
	"path"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// walk asks about a file and, before it, about the directories above, as a
// walk of the tree does; it heeds Skips as one would.
func walk(t *testing.T, r *Rules, name string) bool {
	t.Helper()
	parts := strings.Split(name, "/")
	for i := 1; i < len(parts); i++ {
		dir := path.Join(parts[:i]...)
		out, err := r.Excludes(dir, true)
		if err != nil {
			t.Fatal(err)
		}
		if out && r.Skips(dir) {
			return true
		}
	}
	out, err := r.Excludes(name, false)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestDockerignore(t *testing.T) {
	for _, c := range []struct {
		file     string
		out, ins []string
	}{
		{"", nil, []string{"a", ".git/config"}},
		{"# node_modules\n\n", nil, []string{"node_modules/x"}},
		{"node_modules", []string{"node_modules/x", "node_modules/a/b"}, []string{"web/node_modules/x", "node_modules2"}},
		{"/node_modules/", []string{"node_modules/x"}, []string{"web/node_modules/x"}},
		{"**/node_modules", []string{"node_modules/x", "a/b/node_modules/c/d"}, []string{"a/node_modulesx"}},
		{"*.log", []string{"a.log"}, []string{"dir/a.log", "a.logx"}},
		{"**/*.log", []string{"a.log", "d/e/a.log"}, []string{"d/a.txt"}},
		{"*/temp*", []string{"x/temporary", "x/temp/y"}, []string{"temp", "x/y/temp"}},
		{"*/*/temp*", []string{"x/y/temp.txt"}, []string{"x/temp.txt"}},
		{"temp?", []string{"tempa"}, []string{"temp", "tempab"}},
		{"*.md\n!README.md", []string{"a.md"}, []string{"README.md"}},
		{"*.md\n!README*.md\nREADME-secret.md", []string{"README-secret.md", "x.md"}, []string{"README-a.md"}},
		{"*\n!src", []string{"a", "doc/x"}, []string{"src/a", "src/b/c"}},
		{"*\n!src/keep", []string{"src/other", "src/keep2", "z"}, []string{"src/keep", "src/keep/deep"}},
		{"**\n!**/*.go", []string{"a.txt", "d/b.txt"}, []string{"a.go", "d/e/f.go"}},
		{"dir\n!dir/keep.txt", []string{"dir/x", "dir/sub/keep.txt"}, []string{"dir/keep.txt"}},
		{"dir\n!*/keep.txt", []string{"dir/x"}, []string{"dir/keep.txt"}},
		{"a/../b", []string{"b/x"}, []string{"a/x"}},
		{"./b", []string{"b"}, []string{"a/b"}},
		{"!a\na", []string{"a"}, []string{"b"}},
		{"[ab].txt", []string{"a.txt", "b.txt"}, []string{"c.txt"}},
		{"a b.txt", []string{"a b.txt"}, []string{"a"}},
		{"\ufeffx", []string{"x"}, []string{"y"}},
	} {
		for _, want := range []struct {
			names []string
			out   bool
		}{{c.out, true}, {c.ins, false}} {
			for _, name := range want.names {
				r, err := Read(strings.NewReader(c.file))
				if err != nil {
					t.Fatalf("%q: %v", c.file, err)
				}
				if got := walk(t, r, name); got != want.out {
					t.Errorf("rules %q leave out %q: %v, want %v", c.file, name, got, want.out)
				}
			}
		}
	}
}

func TestBadPatterns(t *testing.T) {
	for _, file := range []string{"[", "!", "a[", "../x", "!../../y"} {
		if _, err := Read(strings.NewReader(file)); sandbox.CodeOf(err) != "invalid_dockerignore" {
			t.Errorf("%q: %v", file, err)
		}
	}
	if _, err := Read(strings.NewReader("..x\na[b]")); err != nil {
		t.Errorf("a file that begins with two dots: %v", err)
	}
}

func FuzzRules(f *testing.F) {
	f.Add("*\n!a/**/b", "a/x/b")
	f.Add("[a-", "a")
	f.Fuzz(func(t *testing.T, file, name string) {
		r, err := Read(strings.NewReader(file))
		if err != nil {
			return
		}
		_, _ = r.Excludes(name, true)
		_ = r.Skips(name)
	})
}
