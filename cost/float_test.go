package cost

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// floats type-checks the sources and returns the places with an expression
// whose type is, or is made of, a floating-point number.
func floats(t *testing.T, fset *token.FileSet, files []*ast.File, exports map[string]string) []string {
	t.Helper()
	lookup := func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", lookup)}
	if _, err := conf.Check("cost", fset, files, info); err != nil {
		t.Fatalf("type-check: %v", err)
	}
	var found []string
	for e, tv := range info.Types {
		if isFloat(tv.Type) {
			found = append(found, fset.Position(e.Pos()).String())
		}
	}
	for id, obj := range info.Defs {
		if obj != nil && isFloat(obj.Type()) {
			found = append(found, fset.Position(id.Pos()).String())
		}
	}
	return found
}

func isFloat(t types.Type) bool {
	switch t := t.(type) {
	case *types.Pointer:
		return isFloat(t.Elem())
	case *types.Slice:
		return isFloat(t.Elem())
	case *types.Array:
		return isFloat(t.Elem())
	case *types.Map:
		return isFloat(t.Key()) || isFloat(t.Elem())
	case *types.Chan:
		return isFloat(t.Elem())
	case *types.Tuple:
		for v := range t.Variables() {
			if isFloat(v.Type()) {
				return true
			}
		}
		return false
	case *types.Signature:
		return isFloat(t.Params()) || isFloat(t.Results())
	case *types.Named:
		if p := t.Obj().Pkg(); p != nil && p.Path() == "math/big" && (t.Obj().Name() == "Float" || t.Obj().Name() == "Rat") {
			return true
		}
	}
	b, ok := t.Underlying().(*types.Basic)
	return ok && b.Info()&(types.IsFloat|types.IsComplex) != 0
}

// TestNoFloats keeps floating point out of the package, be it by a literal, a
// field or the result of a function. Its control is code that has each.
func TestNoFloats(t *testing.T) {
	out, err := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	exports := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		exports[path] = file
	}
	fset := token.NewFileSet()
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	if len(files) < 5 {
		t.Fatalf("found %d sources", len(files))
	}
	for _, at := range floats(t, fset, files, exports) {
		t.Errorf("%s: floating point: count in nanos and base units", at)
	}

	for what, code := range map[string]string{
		"a literal":       "var x = 0.5",
		"a field":         "type x struct{ f float64 }",
		"a parameter":     "func x(f float32) {}",
		"a map":           "var x map[string]float64",
		"seconds":         `import "time"; func x(d time.Duration) int { return int(d.Seconds()) }`,
		"a foreign field": `import "github.com/sandboxd/sandboxd/sandbox"; func x(u sandbox.Usage) int { return int(u.CPUSeconds) }`,
		"a big float":     `import "math/big"; func x(b *big.Float) {}`,
	} {
		f, err := parser.ParseFile(fset, what, "package cost; "+code, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		if len(floats(t, fset, []*ast.File{f}, exports)) == 0 {
			t.Errorf("%s passed as no float", what)
		}
	}
	f, err := parser.ParseFile(fset, "whole", "package cost; const x int64 = 1e9", parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	if found := floats(t, fset, []*ast.File{f}, exports); found != nil {
		t.Errorf("a whole number was taken for a float: %v", found)
	}
}
