package build

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	"github.com/sandboxd/sandboxd/sandbox"
)

// stage is one stage with everything expanded.
type stage struct {
	chosen
	ops    []op
	config sandbox.ImageConfig // after its last instruction
	image  sandbox.Image       // its base, where that is an image

	env  environ // what ENV said
	args environ // what ARG said and has a value; inherited by stages made of this one
}

// op is one thing to do in a sandbox; exactly one of run, copy and dir is set.
type op struct {
	line int
	text string
	run  *runOp
	copy *copyOp
	dir  *dirOp
}

// runOp runs a command.
type runOp struct {
	argv    []string
	env     environ // all of it, without what the cache must not know
	proxies environ // of the request, not declared by an ARG
	user    string
	workdir string
	offline bool // --network=none
	script  *inline
}

// inline is a file whose content stands in the Dockerfile.
type inline struct {
	name, data string
}

// copyOp copies files.
type copyOp struct {
	from    ref
	sources []string // cleaned, without a leading slash; of a pattern the pattern
	inlines []inline
	dest    string // absolute, with a slash at the end where it must be a directory
	chown   string
	chmod   *uint32
	exclude []string
	unpack  bool // archives among the sources are unpacked
}

// dirOp makes a working directory, with those above it that are missing.
type dirOp struct {
	path, user string
}

// evaluation follows the instructions of a stage.
type evaluation struct {
	file    *dockerfile
	stage   *stage
	given   environ // --build-arg
	global  environ // ARGs before FROM
	used    map[string]bool
	cmdSet  bool
	current int // line
}

// globals are the arguments the FROM lines may use, and the names among
// those given that were declared there.
func (d *dockerfile) globals(given environ, target string) (environ, map[string]bool, error) {
	args := environ(platformArgs(target))
	used := map[string]bool{}
	x := expander{escape: d.escape}
	for _, c := range d.args {
		for _, a := range c.Args {
			line := lineOf(c.Location())
			key, err := x.word(a.Key, args)
			if err != nil {
				return nil, nil, d.invalid(line, "%w", err)
			}
			if v, ok := given[key]; ok {
				args[key], used[key] = v, true
			} else if a.Value != nil {
				if args[key], err = x.word(*a.Value, args); err != nil {
					return nil, nil, d.invalid(line, "%w", err)
				}
			}
			if err := bounded(args); err != nil {
				return nil, nil, d.invalid(line, "%w", err)
			}
		}
	}
	return args, used, nil
}

// evaluate expands one chosen stage. base is the stage it is made of, or nil;
// else image is what it begins with.
func (d *dockerfile) evaluate(c chosen, base *stage, image sandbox.Image, given, global environ, used map[string]bool) (*stage, error) {
	s := &stage{chosen: c, image: image, config: cloneConfig(image.Config), args: environ{}}
	if base != nil {
		s.config, s.args = cloneConfig(base.config), maps.Clone(base.args)
	}
	s.env = environOf(s.config.Env)
	if s.config.WorkDir == "" {
		s.config.WorkDir = "/"
	}
	e := &evaluation{file: d, stage: s, given: given, global: global, used: used}
	for _, cmd := range d.stages[c.index].Commands {
		e.current = lineOf(cmd.Location())
		before := len(s.ops)
		if err := e.instruction(cmd); err != nil {
			return nil, d.wrap(err, e.current)
		}
		e.remember(cmd, len(s.ops) == before)
	}
	s.config.Env = s.env.pairs()
	return s, nil
}

// Bounds of what an image tells of its making.
const (
	keptHistory = 128 // instructions
	keptText    = 512 // bytes of each
)

// remember adds an instruction to the image's history, as it was written: the
// values of arguments are not in it, nor is a time.
func (e *evaluation) remember(cmd instructions.Command, empty bool) {
	text := strings.ToUpper(cmd.Name())
	if code, ok := cmd.(fmt.Stringer); ok {
		text = code.String()
	}
	c := &e.stage.config
	c.History = append(c.History, sandbox.ImageHistory{CreatedBy: clip(text, keptText), Empty: empty})
	c.History = c.History[max(0, len(c.History)-keptHistory):]
}

// vars are the variables an instruction can use: ENV wins over ARG.
func (e *evaluation) vars() environ {
	v := maps.Clone(e.stage.args)
	maps.Copy(v, e.stage.env)
	return v
}

func (e *evaluation) expander() expander { return expander{escape: e.file.escape} }

func (e *evaluation) expand(word string) (string, error) { return e.expander().word(word, e.vars()) }

func (e *evaluation) expandAll(words []string) ([]string, error) {
	out := make([]string, len(words))
	for i, w := range words {
		var err error
		if out[i], err = e.expand(w); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// add appends an operation.
func (e *evaluation) add(o op) {
	o.line, o.text = e.current, e.file.quote(e.current)
	e.stage.ops = append(e.stage.ops, o)
}

func (e *evaluation) note(text string) {
	e.file.notes = append(e.file.notes, note{e.current, text})
}

func (e *evaluation) invalid(format string, args ...any) error {
	return e.file.invalid(e.current, format, args...)
}

func (e *evaluation) unsupported(format string, args ...any) error {
	return e.file.unsupported(e.current, format, args...)
}

// instruction follows one instruction.
func (e *evaluation) instruction(cmd instructions.Command) error {
	cfg := &e.stage.config
	switch c := cmd.(type) {
	case *instructions.EnvCommand:
		return e.setEnv(c)
	case *instructions.ArgCommand:
		return e.declare(c)
	case *instructions.RunCommand:
		return e.run(c)
	case *instructions.CopyCommand:
		return e.copy(c)
	case *instructions.AddCommand:
		return e.addFiles(c)
	case *instructions.WorkdirCommand:
		return e.workdir(c)
	case *instructions.UserCommand:
		return e.user(c)
	case *instructions.CmdCommand:
		cfg.Cmd, e.cmdSet = e.command(c.ShellDependantCmdLine), true
	case *instructions.EntrypointCommand:
		cfg.Entrypoint = e.command(c.ShellDependantCmdLine)
		if !e.cmdSet { // it was for the entrypoint before
			cfg.Cmd = nil
		}
	case *instructions.ShellCommand:
		cfg.Shell = slices.Clone(c.Shell)
	case *instructions.LabelCommand:
		return e.label(c)
	case *instructions.MaintainerCommand:
		e.note("MAINTAINER is old: use LABEL org.opencontainers.image.authors")
		e.setLabel("maintainer", c.Maintainer)
	case *instructions.ExposeCommand:
		return e.expose(c)
	case *instructions.VolumeCommand:
		return e.volume(c)
	case *instructions.StopSignalCommand:
		s, err := e.expand(c.Signal)
		if err != nil {
			return err
		}
		if s == "" || strings.ContainsAny(s, " \t\x00") {
			return e.invalid("STOPSIGNAL %.40q: use a name or a number, as SIGTERM", s)
		}
		cfg.StopSignal = s
	default:
		return e.unsupported("%s is not supported", strings.ToUpper(cmd.Name()))
	}
	return nil
}

func (e *evaluation) setEnv(c *instructions.EnvCommand) error {
	vars := e.vars() // as they are before the line: A=1 B=$A does not see its own
	set := environ{}
	for _, kv := range c.Env {
		k, err := e.expander().word(kv.Key, vars)
		if err == nil && (k == "" || strings.ContainsAny(k, "=\x00")) {
			err = e.invalid("ENV: %.40q is no name", k)
		}
		if err != nil {
			return err
		}
		if set[k], err = e.expander().word(kv.Value, vars); err != nil {
			return err
		}
	}
	maps.Copy(e.stage.env, set)
	return e.bounded()
}

func (e *evaluation) bounded() error {
	if err := bounded(e.vars()); err != nil {
		return e.invalid("%w", err)
	}
	return nil
}

func (e *evaluation) declare(c *instructions.ArgCommand) error {
	for _, a := range c.Args {
		key, err := e.expand(a.Key)
		if err != nil {
			return err
		}
		v, ok := e.given[key]
		switch {
		case ok:
			e.used[key] = true
		case a.Value != nil:
			if v, err = e.expand(*a.Value); err != nil {
				return err
			}
			ok = true
		default:
			v, ok = e.global[key]
		}
		if ok {
			e.stage.args[key] = v
		} else {
			delete(e.stage.args, key)
		}
	}
	return e.bounded()
}

func (e *evaluation) workdir(c *instructions.WorkdirCommand) error {
	dir, err := e.expand(c.Path)
	if err != nil {
		return err
	}
	if dir == "" {
		return e.invalid("WORKDIR names no directory")
	}
	if !path.IsAbs(dir) {
		dir = path.Join(e.stage.config.WorkDir, dir)
	}
	dir = path.Clean(dir)
	if err := sandbox.ValidateWorkDir(dir); err != nil {
		return e.invalid("%w", err)
	}
	e.stage.config.WorkDir = dir
	if dir != "/" {
		e.add(op{dir: &dirOp{path: dir, user: e.stage.config.User}})
	}
	return nil
}

func (e *evaluation) user(c *instructions.UserCommand) error {
	u, err := e.expand(c.User)
	if err != nil {
		return err
	}
	if err := sandbox.ValidateUser(u); err != nil || u == "" {
		return e.invalid("USER %.40q: use a name, a uid or uid:gid", u)
	}
	e.stage.config.User = u
	return nil
}

func (e *evaluation) label(c *instructions.LabelCommand) error {
	for _, kv := range c.Labels {
		k, err := e.expand(kv.Key)
		if err != nil {
			return err
		}
		v, err := e.expand(kv.Value)
		if err != nil {
			return err
		}
		e.setLabel(k, v)
	}
	total := 0
	for k, v := range e.stage.config.Labels {
		total += len(k) + len(v)
	}
	if total > maxLabelBytes {
		return e.invalid("labels of %d bytes: at most %d", total, maxLabelBytes)
	}
	return nil
}

const maxLabelBytes = 256 << 10

func (e *evaluation) setLabel(k, v string) {
	if e.stage.config.Labels == nil {
		e.stage.config.Labels = map[string]string{}
	}
	e.stage.config.Labels[k] = v
}

func (e *evaluation) volume(c *instructions.VolumeCommand) error {
	for _, v := range c.Volumes {
		v, err := e.expand(v)
		if err != nil {
			return err
		}
		if v == "" {
			return e.invalid("VOLUME names no directory")
		}
		if !slices.Contains(e.stage.config.Volumes, v) {
			e.stage.config.Volumes = append(e.stage.config.Volumes, v)
		}
	}
	e.note("VOLUME is recorded in the image; nothing is mounted there by itself")
	return nil
}

// expose records ports as 80/tcp.
func (e *evaluation) expose(c *instructions.ExposeCommand) error {
	for _, p := range c.Ports {
		words, err := e.expander().words(p, e.vars())
		if err != nil {
			return err
		}
		for _, w := range words {
			ports, err := portsOf(w)
			if err != nil {
				return e.invalid("EXPOSE %.40q: %w", w, err)
			}
			e.stage.config.ExposedPorts = append(e.stage.config.ExposedPorts, ports...)
		}
	}
	slices.Sort(e.stage.config.ExposedPorts)
	e.stage.config.ExposedPorts = slices.Compact(e.stage.config.ExposedPorts)
	return nil
}

// portsOf reads 80, 80/udp or 8000-8010/tcp.
func portsOf(s string) ([]string, error) {
	ports, proto, ok := strings.Cut(strings.ToLower(s), "/")
	if !ok {
		proto = "tcp"
	}
	if proto != "tcp" && proto != "udp" && proto != "sctp" {
		return nil, fmt.Errorf("the protocol is tcp, udp or sctp")
	}
	from, to, ranged := strings.Cut(ports, "-")
	if !ranged {
		to = from
	}
	lo, err1 := strconv.ParseUint(from, 10, 16)
	hi, err2 := strconv.ParseUint(to, 10, 16)
	if err1 != nil || err2 != nil || lo > hi || hi-lo > 1000 {
		return nil, fmt.Errorf("a port is a number up to 65535, or a range of at most 1000")
	}
	var out []string
	for p := lo; p <= hi; p++ {
		out = append(out, strconv.FormatUint(p, 10)+"/"+proto)
	}
	return out, nil
}

// cloneConfig returns a deep copy.
func cloneConfig(c sandbox.ImageConfig) sandbox.ImageConfig {
	c.Env, c.Entrypoint, c.Cmd = slices.Clone(c.Env), slices.Clone(c.Entrypoint), slices.Clone(c.Cmd)
	c.Shell, c.ExposedPorts, c.Volumes = slices.Clone(c.Shell), slices.Clone(c.ExposedPorts), slices.Clone(c.Volumes)
	c.Labels, c.History = maps.Clone(c.Labels), slices.Clone(c.History)
	return c
}
