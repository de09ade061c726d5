package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/docker/go-units"
	"github.com/goccy/go-yaml"

	"github.com/sandboxd/sandboxd/sandbox"
)

// show prints v as --output asks; table does so for the table format.
func (c *cli) show(v any, table func(w io.Writer) error) error {
	switch c.output {
	case "json", "yaml":
		b, err := json.MarshalIndent(v, "", "  ")
		if err != nil {
			return fmt.Errorf("printing as JSON: %w", err)
		}
		b = append(b, '\n')
		if c.output == "yaml" {
			if b, err = yaml.JSONToYAML(b); err != nil {
				return fmt.Errorf("printing as YAML: %w", err)
			}
		}
		_, err = c.out.Write(b)
		return err
	}
	return table(c.out)
}

// showLine prints v as one line of a stream: JSON Lines, or YAML documents.
func (c *cli) showLine(v any, text func() string) error {
	switch c.output {
	case "json":
		return json.NewEncoder(c.out).Encode(v)
	case "yaml":
		if _, err := io.WriteString(c.out, "---\n"); err != nil {
			return err
		}
		return c.show(v, nil)
	}
	_, err := io.WriteString(c.out, text()+"\n")
	return err
}

// columns prints rows under a header, aligned.
func columns(w io.Writer, header string, rows func(row func(format string, args ...any))) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, header)
	rows(func(format string, args ...any) { fmt.Fprintf(tw, format+"\n", plainArgs(args, sandbox.Plain)...) })
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
