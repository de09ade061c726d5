package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestPlainOutput: whatever helper a text from outside is printed through, in
// every format, no character that steers a terminal is left; what is plain
// stays as it is.
func TestPlainOutput(t *testing.T) {
	bads := []string{"a\x1b[2J\x07\u202e\u009bb", "invoice\u202efdp.x"}
	through := func(output string, v any) string {
		var b strings.Builder
		c := &cli{out: &b, output: output}
		if err := c.showLine(v, "%s", v); err != nil {
			t.Error(err)
		}
		return b.String()
	}
	for name, print := range map[string]func(string) string{
		"quoted": quoted,
		"row": func(s string) string {
			var b strings.Builder
			if err := columns(printer{raw: &b}, "H", func(row func(string, ...any)) { row("%s\t%v", s, sandbox.ID(s)) }); err != nil {
				t.Error(err)
			}
			return b.String()
		},
		"painted": func(s string) string {
			got, _ := strings.CutPrefix(string(printer{colours: true}.paint(red, s)), "\x1b[31m")
			return strings.TrimSuffix(got, "\x1b[0m")
		},
		"line": func(s string) string { return through("table", s) },
		"json": func(s string) string { return through("json", s) },
		"yaml": func(s string) string { return through("yaml", s) },
	} {
		for _, bad := range bads {
			if got := print(bad); got != sandbox.PlainText(got) || !strings.Contains(got, `\u202e`) {
				t.Errorf("%s: %q", name, got)
			}
		}
		if got := print("plain text é"); !strings.Contains(got, "plain text é") {
			t.Errorf("%s: control: %q", name, got)
		}
	}
}

// direct names the functions that may do what is a printer's: write to an output
// what is no text for people, steer the terminal, or say that a text is plain.
var direct = map[string]string{
	"c.out":   "main write showLine costReportCmd copyOut filesCat completionCmd imageExportCmd logs mcpCmd copyOutput snapshotExportCmd screen onTerminal",
	"c.err":   "main draw copyOutput",
	"w.raw":   "printf columns",
	"clean":   "paint complain tell",
	"printer": "printer screen",
}

// formats are the functions that print a format, and which argument that is.
var formats = map[string]int{"printf": 0, "say": 0, "warn": 0, "row": 0, "showLine": 1, "columns": 1}

// unplain returns what in a file prints past a printer, or with a format that
// may hold a text from outside.
func unplain(f *ast.File) (bad []string) {
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		asked := map[ast.Node]bool{} // outputs that something is asked about
		refuse := func(what string) {
			if !slices.Contains(strings.Fields(direct[what]), fn.Name.Name) {
				bad = append(bad, fn.Name.Name+": "+what)
			}
		}
		ast.Inspect(fn, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				what := types.ExprString(n)
				if i := strings.LastIndex(what, "c."); i > 0 {
					what = what[i:] // of one that has a cli
				}
				if slices.Contains([]string{"c.out", "c.err", "w.raw", "os.Stdout", "os.Stderr"}, what) && !asked[n] && fn.Name.Name != "main" {
					refuse(what)
				}
			case *ast.CompositeLit:
				if n.Type != nil && types.ExprString(n.Type) == "printer" {
					refuse("printer")
				}
			case *ast.CallExpr:
				name := types.ExprString(n.Fun)
				name = name[strings.LastIndex(name, ".")+1:]
				switch name {
				case "clean":
					if _, lit := n.Args[0].(*ast.BasicLit); !lit {
						refuse(name)
					}
				case "isTerminal", "windowSize", "printer":
					asked[n.Args[0]] = true
				}
				if i, ok := formats[name]; ok && !fixed(n.Args[i]) {
					bad = append(bad, fmt.Sprintf("%s: %s(%s)", fn.Name.Name, name, types.ExprString(n.Args[i])))
				}
			}
			return true
		})
	}
	return bad
}

// fixed reports whether a format is written down, or somebody else's.
func fixed(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.BinaryExpr:
		return fixed(e.X) && fixed(e.Y)
	case *ast.CallExpr:
		return types.ExprString(e.Fun) == "strings.Repeat" && fixed(e.Args[0])
	case *ast.Ident:
		return e.Name == "format" // checked where it comes from
	}
	_, ok := e.(*ast.BasicLit)
	return ok
}

// TestPrintersAlone: texts for people go through a printer.
func TestPrintersAlone(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) < 30 {
		t.Fatal(files, err)
	}
	read := func(name string, src any) []string {
		f, err := parser.ParseFile(token.NewFileSet(), name, src, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		return unplain(f)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		for _, bad := range read(name, nil) {
			t.Errorf("%s: %s: print with a printer (output.go), or name the function here", name, bad)
		}
	}
	for _, src := range []string{ // the control
		`fmt.Fprintf(c.out, "%s", v.Name)`, `fmt.Fprintln(p.c.err, v)`, `io.WriteString(w.raw, s)`, `os.Stdout.Write(b)`, `w.printf("%s", clean(v.Name))`,
		`w.printf(v.Name)`, `row("a\t" + v.Name)`, `columns(w, header, nil)`, `statsTable(printer{raw: f}, nil)`,
	} {
		if bad := read("x.go", "package main\nfunc x() {\n"+src+"\n}"); len(bad) == 0 {
			t.Errorf("control: %s passes", src)
		}
	}
}

// TestOwnersOfSandboxes says whose they are, last, where there are several.
func TestOwnersOfSandboxes(t *testing.T) {
	for owner, want := range map[string]bool{"alice": false, "bob": true} {
		var b strings.Builder
		items := []sandbox.Sandbox{{ID: "sba", Owner: "alice"}, {ID: "sbb", Owner: owner}}
		if err := new(cli).sandboxTable(printer{raw: &b}, items); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(b.String(), "\n")
		if got := strings.HasSuffix(lines[0], "OWNER") && strings.HasSuffix(lines[2], "bob"); got != want {
			t.Errorf("of alice and %s: owners are shown: %v\n%s", owner, got, b.String())
		}
	}
}
