package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// pkg is what `go list` tells about a package.
type pkg struct {
	Dir, ImportPath, Name, Doc         string
	GoFiles, CgoFiles                  []string
	Imports, TestImports, XTestImports []string
}

// short is the import path below our module.
func (p pkg) short() string { return strings.TrimPrefix(p.ImportPath, module) }

func (p pkg) sources() []string { return slices.Concat(p.GoFiles, p.CgoFiles) }

// packages lists our packages with the root build tag, so that the root tests
// are looked at as well.
var packages = sync.OnceValues(func() ([]pkg, error) {
	out, err := goList("-tags", "root", "-e", "-json=Dir,ImportPath,Name,Doc,GoFiles,CgoFiles,Imports,TestImports,XTestImports", "./...")
	if err != nil {
		return nil, err
	}
	var all []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
})

func goList(args ...string) ([]byte, error) {
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = "../.." // the module's root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, errors.Join(err, errors.New(stderr.String()))
	}
	return out, nil
}

func load(t *testing.T) []pkg {
	t.Helper()
	all, err := packages()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	if len(all) < 10 {
		t.Fatalf("go list found only %d packages", len(all))
	}
	return all
}

// ours returns those of the imports that are our own, in short form.
func ours(imports ...[]string) []string {
	var short []string
	for _, i := range slices.Concat(imports...) {
		if s, ok := strings.CutPrefix(i, module); ok {
			short = append(short, s)
		}
	}
	slices.Sort(short)
	return slices.Compact(short)
}

// forbidden returns the imports that neither rule of allowed permits.
func forbidden(imports []string, allowed ...[]string) []string {
	var bad []string
	for _, i := range imports {
		if a := slices.Concat(allowed...); !slices.Contains(a, i) && !slices.Contains(a, anything[0]) {
			bad = append(bad, i)
		}
	}
	return bad
}

func TestImportsGoDown(t *testing.T) {
	for _, p := range load(t) {
		name := p.short()
		allowed, ok := mayImport[name]
		if !ok {
			t.Errorf("package %s is not in the import table: add it in docs/DESIGN.md and here", name)
			continue
		}
		for _, i := range forbidden(ours(p.Imports), allowed) {
			t.Errorf("%s imports %s; the table lets it import %v", name, i, allowed)
		}
		for _, i := range forbidden(ours(p.TestImports, p.XTestImports), allowed, testsMayImport, testsAlso[name], []string{name}) {
			t.Errorf("a test of %s imports %s; see testsAlso", name, i)
		}
		if slices.Contains(ours(p.Imports), "internal/testenv") && name != "integration/harness" {
			t.Errorf("%s imports internal/testenv outside its tests", name)
		}
	}
}

// TestForbidden is the control of the tests here: the rule does refuse.
func TestForbidden(t *testing.T) {
	if got := forbidden([]string{"netns", "sandbox"}, mayImport["rootfs"]); !slices.Equal(got, []string{"netns"}) {
		t.Errorf("rootfs importing netns and sandbox: refused %v, want netns", got)
	}
	if got := forbidden([]string{"netns"}, mayImport["cmd/sandboxd"]); got != nil {
		t.Errorf("cmd/sandboxd importing netns: refused %v, want nothing", got)
	}
}

func TestTableHasNoCycle(t *testing.T) {
	var visit func(name string, trail []string)
	visit = func(name string, trail []string) {
		if slices.Contains(trail, name) {
			t.Fatalf("the import table permits a cycle: %v -> %s", trail, name)
		}
		for _, next := range mayImport[name] {
			visit(next, append(slices.Clone(trail), name))
		}
	}
	for name := range mayImport {
		visit(name, nil)
	}
}

func TestForeignImports(t *testing.T) {
	for _, p := range load(t) {
		for _, imp := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			for _, f := range foreign {
				if below(imp, f.path) && !slices.Contains(f.by, p.short()) {
					t.Errorf("%s imports %s; only %v may: %s", p.short(), imp, f.by, f.why)
				}
			}
		}
	}
}

// below reports whether imp is the package or module path, or lies below it.
func below(imp, path string) bool { return imp == path || strings.HasPrefix(imp, path+"/") }

func TestProgramsStaySmall(t *testing.T) {
	for program, banned := range links {
		out, err := goList("-deps", "./"+program)
		if err != nil {
			t.Errorf("go list -deps ./%s: %v", program, err)
			continue
		}
		deps := strings.Fields(string(out))
		if !slices.Contains(deps, module+program) {
			t.Errorf("go list -deps ./%s does not list the program itself", program)
		}
		for _, dep := range deps {
			for _, b := range banned {
				if below(dep, b) {
					t.Errorf("%s links %s", program, dep)
				}
			}
		}
	}
}

func TestPackagesAreNamedAndDocumented(t *testing.T) {
	for _, p := range load(t) {
		if slices.Contains(emptyNames, path.Base(p.ImportPath)) {
			t.Errorf("package %s: the name says nothing about what it is for", p.short())
		}
		want := "Package " + p.Name + " "
		if p.Name == "main" {
			want = "Command " + path.Base(p.ImportPath) + " "
		}
		if !strings.HasPrefix(p.Doc, want) {
			t.Errorf("package %s has no doc comment that begins %q", p.short(), want)
		}
	}
}

// selectors calls f for each qualified name, as unix.Mount, in the sources of
// p, with the import path the qualifier stands for.
func selectors(t *testing.T, p pkg, f func(pos token.Position, imp, name string)) {
	t.Helper()
	fset := token.NewFileSet()
	for _, name := range p.sources() {
		file, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Errorf("parse: %v", err)
			continue
		}
		imports := map[string]string{}
		for _, spec := range file.Imports {
			imp := strings.Trim(spec.Path.Value, `"`)
			local := strings.TrimPrefix(path.Base(imp), "go-") // as go-yaml names its package
			if spec.Name != nil {
				local = spec.Name.Name
			}
			imports[local] = imp
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := sel.X.(*ast.Ident); ok && imports[x.Name] != "" {
					f(fset.Position(sel.Pos()), imports[x.Name], sel.Sel.Name)
				}
			}
			return true
		})
	}
}

func TestMountCallsInFewHands(t *testing.T) {
	found := map[string]int{}
	for _, p := range load(t) {
		selectors(t, p, func(pos token.Position, imp, name string) {
			if (imp != "golang.org/x/sys/unix" && imp != "syscall") || !slices.Contains(rawMountCalls, name) {
				return
			}
			found[p.short()]++
			if !slices.Contains(rawCallers, p.short()) {
				t.Errorf("%s: %s.%s; only %v call the kernel for mounts and namespaces", pos, path.Base(imp), name, rawCallers)
			}
		})
	}
	for _, p := range rawCallers { // or the search itself is broken
		if found[p] == 0 {
			t.Errorf("found no raw mount call in %s", p)
		}
	}
}

func TestTypesOnly(t *testing.T) {
	all := load(t)
	exported := map[string][]string{} // package -> exported functions and variables
	for _, p := range all {
		fset := token.NewFileSet()
		for _, name := range p.sources() {
			file, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Errorf("parse: %v", err)
				continue
			}
			exported[p.short()] = append(exported[p.short()], notTypes(file)...)
		}
	}
	for _, p := range all {
		for _, of := range typesOnly[p.short()] {
			if len(exported[of]) == 0 {
				t.Errorf("found no function in %s", of)
			}
			selectors(t, p, func(pos token.Position, imp, name string) {
				if imp == module+of && slices.Contains(exported[of], name) {
					t.Errorf("%s: %s uses %s.%s; it may use that package's types and constants alone", pos, p.short(), path.Base(of), name)
				}
			})
		}
	}
}

// notTypes names a file's functions and variables.
func notTypes(file *ast.File) []string {
	var names []string
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				names = append(names, d.Name.Name)
			}
		case *ast.GenDecl:
			if d.Tok != token.VAR {
				continue
			}
			for _, s := range d.Specs {
				for _, n := range s.(*ast.ValueSpec).Names {
					names = append(names, n.Name)
				}
			}
		}
	}
	return names
}
