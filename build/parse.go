package build

import (
	"errors"
	"fmt"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Codes of errors that are about the Dockerfile.
const (
	codeInvalid     = "dockerfile_invalid"     // no Dockerfile
	codeUnsupported = "dockerfile_unsupported" // Docker could, this cannot
)

// dockerfile is a Dockerfile's instructions, not yet expanded.
type dockerfile struct {
	lines  []string
	escape rune
	args   []instructions.ArgCommand // before the first FROM
	stages []instructions.Stage
	notes  []note
}

// note is something to tell that stops nothing.
type note struct {
	line int
	text string
}

// parse reads a Dockerfile. Errors are of class ErrInvalid with code
// dockerfile_invalid or dockerfile_unsupported, and name and quote the line.
func parse(text string) (*dockerfile, error) {
	d := &dockerfile{lines: strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n")}
	d.syntax(text)
	res, err := parser.Parse(strings.NewReader(text))
	if err != nil {
		return nil, d.wrap(err, 0)
	}
	d.escape = res.EscapeToken
	for _, w := range res.Warnings {
		line := 0
		if w.Location != nil {
			line = w.Location.Start.Line
		}
		d.notes = append(d.notes, note{line, w.Short})
	}
	if err := d.flags(res.AST); err != nil {
		return nil, err
	}
	if d.stages, d.args, err = instructions.Parse(res.AST, nil); err != nil {
		return nil, d.wrap(err, 0)
	}
	if len(d.stages) == 0 {
		return nil, d.invalid(1, "no FROM: a Dockerfile begins with the image to start from")
	}
	return d, nil
}

// syntax judges the directive that names another parser. Ours understands
// docker/dockerfile:1; anything else may mean another language.
func (d *dockerfile) syntax(text string) {
	name, _, at, ok := parser.DetectSyntax([]byte(text))
	if !ok {
		return
	}
	line := 1
	if len(at) > 0 {
		line = max(at[0].Start.Line, 1)
	}
	short := strings.TrimPrefix(name, "docker.io/")
	rest, found := strings.CutPrefix(short, "docker/dockerfile:1")
	if !found && short != "docker/dockerfile" || rest != "" && rest[0] != '.' && rest[0] != '-' && rest[0] != '@' {
		d.notes = append(d.notes, note{line, fmt.Sprintf("the syntax directive %.80q is ignored: the built-in parser reads docker/dockerfile:1", name)})
	}
}

// flags refuses what the parser takes and a sandbox cannot do, by the name
// it was written with.
func (d *dockerfile) flags(ast *parser.Node) error {
	for _, n := range ast.Children {
		word := strings.ToLower(n.Value)
		known, ok := knownFlags[word]
		if !ok {
			continue // told by the parser, or below
		}
		for _, f := range n.Flags {
			name, _, _ := strings.Cut(strings.TrimPrefix(f, "--"), "=")
			why, listed := known[name]
			switch {
			case !listed:
				return d.invalid(n.StartLine, "%s has no flag --%.40s", strings.ToUpper(word), name)
			case why != "":
				return d.unsupported(n.StartLine, "%s --%s is not supported: %s", strings.ToUpper(word), name, why)
			}
		}
	}
	return nil
}

// knownFlags lists every flag of Docker's, with the reason where it is
// refused.
var knownFlags = map[string]map[string]string{
	"from": {"platform": ""},
	"run": {
		"network":  "",
		"mount":    "copy what it needs, or let the layer cache keep what it makes",
		"security": "a build step has no more rights than any sandbox",
		"device":   "a sandbox has no devices of the host's",
	},
	"copy": {
		"from": "", "chown": "", "chmod": "", "link": "", "exclude": "",
		"parents": "name the directories, or copy the tree",
	},
	"add": {
		"chown": "", "chmod": "", "link": "", "exclude": "", "unpack": "",
		"keep-git-dir": "git sources are not fetched",
		"checksum":     "it is for URLs, which are not fetched",
	},
	"env": {}, "label": {}, "workdir": {}, "user": {}, "entrypoint": {}, "cmd": {}, "arg": {},
	"expose": {}, "volume": {}, "stopsignal": {}, "shell": {}, "maintainer": {},
}

// refused are the instructions that no stage may have.
func refused(c instructions.Command) (why string) {
	switch c := c.(type) {
	case *instructions.HealthCheckCommand:
		return "HEALTHCHECK is not supported: nothing here asks for health; leave it out"
	case *instructions.OnbuildCommand:
		return "ONBUILD is not supported: write the instruction into the Dockerfile that needs it"
	case *instructions.AddCommand:
		for _, s := range c.SourcePaths {
			if remote(s) {
				return fmt.Sprintf("ADD of a URL or git repository (%.80s) is not supported: fetch it in a RUN step with --network open, or put it into the context", s)
			}
		}
	case *instructions.CopyCommand:
		for _, s := range c.SourcePaths {
			if remote(s) {
				return fmt.Sprintf("COPY of a URL (%.80s) is not possible: fetch it in a RUN step", s)
			}
		}
	}
	return ""
}

// remote tells of a source that is no path: a URL or a git repository.
func remote(s string) bool {
	for _, p := range []string{"http://", "https://", "git://", "git@", "ssh://", "ftp://"} {
		if strings.HasPrefix(strings.ToLower(s), p) {
			return true
		}
	}
	return strings.HasPrefix(s, "github.com/")
}

func (d *dockerfile) invalid(line int, format string, args ...any) error {
	return d.at(codeInvalid, line, fmt.Errorf(format, args...))
}

func (d *dockerfile) unsupported(line int, format string, args ...any) error {
	return d.at(codeUnsupported, line, fmt.Errorf(format, args...))
}

// wrap makes an error of the parser's one of ours, with the line it tells or
// else the given one.
func (d *dockerfile) wrap(err error, line int) error {
	if _, ok := errors.AsType[*sandbox.Error](err); ok {
		return err
	}
	if at, ok := errors.AsType[*parser.LocationError](err); ok && len(at.Locations) > 0 && len(at.Locations[0]) > 0 {
		line = max(at.Locations[0][0].Start.Line, 1) // directives are told from 0 on
	}
	code := codeInvalid
	if unknown, ok := errors.AsType[*instructions.UnknownInstructionError](err); ok {
		line, err = unknown.Line, fmt.Errorf("unknown instruction %.40q", unknown.Instruction)
	}
	for { // "dockerfile parse error on line 3: …" says what we say
		inner := errors.Unwrap(err)
		if inner == nil || !strings.HasPrefix(err.Error(), "dockerfile parse error") {
			break
		}
		err = inner
	}
	return d.at(code, line, err)
}

// at makes an error about a line, which it quotes.
func (d *dockerfile) at(code string, line int, err error) error {
	if line < 1 || line > len(d.lines) {
		return sandbox.Errorf(sandbox.ErrInvalid, code, "Dockerfile: %w", err)
	}
	return sandbox.Errorf(sandbox.ErrInvalid, code, "Dockerfile line %d: %w\n  %d | %s", line, err, line, d.quote(line))
}

// quote is a line as it may be shown.
func (d *dockerfile) quote(line int) string {
	if line < 1 || line > len(d.lines) {
		return ""
	}
	return clip(strings.TrimSpace(d.lines[line-1]), 200)
}

// clip shortens text for people.
func clip(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}

// lineOf is where an instruction begins.
func lineOf(at []parser.Range) int {
	if len(at) == 0 {
		return 0
	}
	return at[0].Start.Line
}
