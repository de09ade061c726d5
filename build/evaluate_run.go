package build

import (
	"fmt"
	"slices"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"

	"github.com/sandboxd/sandboxd/sandbox"
)

// shellOf is what a command in shell form runs under.
func (e *evaluation) shellOf() []string {
	if len(e.stage.config.Shell) > 0 {
		return e.stage.config.Shell
	}
	return []string{"/bin/sh", "-c"}
}

// command is an exec form as it is, or a shell form under its shell.
func (e *evaluation) command(c instructions.ShellDependantCmdLine) []string {
	if !c.PrependShell {
		return slices.Clone(c.CmdLine)
	}
	if len(c.CmdLine) == 0 {
		return nil
	}
	return append(slices.Clone(e.shellOf()), strings.Join(c.CmdLine, " "))
}

func (e *evaluation) run(c *instructions.RunCommand) error {
	r := &runOp{env: e.vars(), user: e.stage.config.User, workdir: e.stage.config.WorkDir, proxies: environ{}}
	switch instructions.GetNetwork(c) {
	case instructions.NetworkNone:
		r.offline = true
	case instructions.NetworkHost:
		return e.unsupported("RUN --network=host is not supported: a sandbox never has the host's network; build with --network open")
	}
	for _, k := range proxyArgs {
		if v, ok := e.given[k]; ok {
			e.used[k] = true
			if _, declared := r.env[k]; !declared {
				r.proxies[k] = v
			}
		}
	}
	line := c.ShellDependantCmdLine
	if len(c.Files) > 0 {
		var err error
		if line, r.script, err = heredoc(c); err != nil {
			return e.invalid("%w", err)
		}
	}
	if r.script == nil {
		if r.argv = e.command(line); len(r.argv) == 0 || r.argv[0] == "" {
			return e.invalid("RUN names no command")
		}
	}
	if err := (sandbox.ProcessSpec{Argv: append([]string{"x"}, r.argv...)}).Validate(); err != nil {
		return e.invalid("%w", err)
	}
	e.add(op{run: r})
	return nil
}

// heredoc is a RUN whose command stands in the lines after it: for the shell,
// or, where they begin with #!, a script of its own.
func heredoc(c *instructions.RunCommand) (instructions.ShellDependantCmdLine, *inline, error) {
	line := c.ShellDependantCmdLine
	if len(line.CmdLine) != 1 || !line.PrependShell {
		return line, nil, fmt.Errorf("RUN with a heredoc must be in shell form")
	}
	if parser.MustParseHeredoc(line.CmdLine[0]) == nil { // RUN python3 <<EOF: the shell reads it
		var b strings.Builder
		b.WriteString(line.CmdLine[0])
		for _, f := range c.Files {
			b.WriteString("\n" + f.Data + f.Name)
		}
		line.CmdLine = []string{b.String()}
		return line, nil, nil
	}
	data := c.Files[0].Data
	if c.Files[0].Chomp {
		data = parser.ChompHeredocContent(data)
	}
	if strings.HasPrefix(data, "#!") {
		return line, &inline{name: c.Files[0].Name, data: data}, nil
	}
	line.CmdLine = []string{data}
	return line, nil, nil
}
