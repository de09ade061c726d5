package main

import (
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"text/tabwriter"
	"time"

	"github.com/docker/go-units"
	"github.com/goccy/go-yaml"

	"github.com/sandboxd/sandboxd/sandbox"
)

// printer prints for people. It makes plain, on one line, what its formats are
// filled with: only formats end lines, and only paint steers the terminal.
type printer struct {
	raw     io.Writer
	colours bool
}

// clean is a text that may stand as it is: it was made plain where it was made.
type clean string

func (c *cli) printer(w io.Writer) printer {
	return printer{w, isTerminal(w) && c.getenv("NO_COLOR") == "" && c.getenv("TERM") != "dumb"}
}

func (w printer) printf(format string, args ...any) error {
	_, err := fmt.Fprintf(w.raw, format, plainArgs(args)...)
	return err
}

// Colours, for terminals only.
const (
	red    = "31"
	green  = "32"
	yellow = "33"
	grey   = "90"
)

func (w printer) paint(colour, s string) clean {
	if s = sandbox.Plain(s); w.colours {
		s = "\x1b[" + colour + "m" + s + "\x1b[0m"
	}
	return clean(s)
}

// plainArgs makes plain all but numbers, which their formats print.
func plainArgs(args []any) []any {
	out := make([]any, len(args))
	for i, a := range args {
		_, text := a.(fmt.Stringer)
		kind := reflect.ValueOf(a).Kind()
		if _, ok := a.(clean); ok || !text && reflect.Bool <= kind && kind <= reflect.Complex128 {
			out[i] = a
		} else {
			out[i] = sandbox.Plain(fmt.Sprint(a))
		}
	}
	return out
}

// plainWriter is for what prints by itself.
type plainWriter struct{ io.Writer }

func (w plainWriter) Write(b []byte) (int, error) {
	_, err := io.WriteString(w.Writer, sandbox.PlainText(string(b)))
	return len(b), err
}

// show prints v as --output asks; table does so for the table format.
func (c *cli) show(v any, table func(w printer) error) error {
	if c.output != "json" && c.output != "yaml" {
		return table(c.printer(c.out))
	}
	return c.write(v, "  ")
}

// write prints v as JSON or YAML, in which what could steer a terminal stands as
// its code: encoding/json does so only below U+0020, and YAML not even there.
func (c *cli) write(v any, indent string) error {
	b, err := json.MarshalIndent(v, "", indent)
	if indent == "" && err == nil {
		b, err = json.Marshal(v)
	}
	if err != nil {
		return fmt.Errorf("printing as JSON: %w", err)
	}
	b = append(sandbox.PlainJSON(b), '\n')
	if c.output == "yaml" {
		js := b
		if b, err = yaml.JSONToYAML(js); sandbox.PlainText(string(b)) != string(b) {
			b = js // is YAML, too; the library quotes no keys
		}
		if err != nil {
			return fmt.Errorf("printing as YAML: %w", err)
		}
	}
	_, err = c.out.Write(b)
	return err
}

// showLine prints v as one line of a stream: JSON Lines, or YAML documents.
func (c *cli) showLine(v any, format string, args ...any) error {
	switch c.output {
	case "json":
		return c.write(v, "")
	case "yaml":
		if _, err := io.WriteString(c.out, "---\n"); err != nil {
			return err
		}
		return c.show(v, nil)
	}
	return c.printer(c.out).printf(format+"\n", args...)
}

// line prints a text on a line.
func line(w printer, s string) error { return w.printf("%s\n", s) }

// names prints a line for each of all.
func names[T any](c *cli, all []T, name func(T) string) error {
	for _, v := range all {
		if err := line(c.printer(c.out), name(v)); err != nil {
			return err
		}
	}
	return nil
}

// columns prints rows under a header, if there is one, aligned.
func columns(w printer, header string, rows func(row func(format string, args ...any))) error {
	tw := tabwriter.NewWriter(w.raw, 0, 0, 2, ' ', 0)
	if header != "" {
		fmt.Fprintln(tw, header)
	}
	rows(func(format string, args ...any) { fmt.Fprintf(tw, format+"\n", plainArgs(args)...) })
	return tw.Flush()
}

// size prints bytes as people read them; 0 as a dash.
func size[T int64 | uint64](n T) string {
	if n == 0 {
		return "-"
	}
	return units.BytesSize(float64(n))
}

// ago prints how long ago t was.
func ago(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return units.HumanDuration(time.Since(t)) + " ago"
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
