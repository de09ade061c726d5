package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

// build returns the process spec the flags and arguments describe.
func (f *processFlags) build(c *cli, argv []string, env map[string]string) sandbox.ProcessSpec {
	spec := sandbox.ProcessSpec{
		Argv: argv, Env: env, WorkDir: f.cwd, User: f.user, Tag: f.tag,
		TimeoutSeconds: f.limit.Seconds(), OutputBytes: int(f.keep),
		// Without a terminal here, standard input is a file or a pipe:
		// what is in it is meant for the command.
		Stdin: !f.detach && (f.interactive || !isTerminal(c.in) && !isNull(c.in)),
	}
	if f.tty {
		size := windowSize(c.in)
		spec.TTY = &size
		spec.Stdin = true
	}
	return spec
}

func (c *cli) execCmd() *cobra.Command {
	var f processFlags
	var env []string
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX -- COMMAND [ARG…]",
		Short: "Run a command in a running sandbox",
		Long: `Run a command in a running sandbox and pass its output and exit code through.

Standard input is passed on with -i, or when it is neither a terminal nor
/dev/null. Ctrl-C is passed on as SIGINT; the second one kills the command. If
the connection or the daemon goes away for a moment, the command runs on and its
output is picked up again where it broke, without losing or repeating a byte.`,
		Example: `  sandbox exec dev -- ls -l /
  sandbox exec -it dev -- bash
  sandbox exec dev -e DEBUG=1 -w /app -- ./test.sh
  tar c . | sandbox exec dev -- tar x -C /app
  sandbox exec -d dev -- python3 -m http.server      # prints the process id; see logs, ps, kill`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			vars, err := parseEnv(env, c.getenv)
			if err != nil {
				return err
			}
			return c.exec(cmd.Context(), args[0], f.build(c, command(cmd, args, 1), vars), f)
		},
	}
	f.add(cmd)
	cmd.Flags().StringArrayVarP(&env, "env", "e", nil, "environment variable K=V, or K to pass on your own; repeatable")
	return cmd
}

// command returns the arguments after the first n. One "--" before the
// command is dropped by the flag parser already; the flags after SANDBOX and
// before "--" were still ours.
func command(_ *cobra.Command, args []string, n int) []string { return args[n:] }

// exec starts a command and stays with it, or not with --detach.
func (c *cli) exec(ctx context.Context, ref string, spec sandbox.ProcessSpec, f processFlags) error {
	cl, err := c.persistent(&f.key)
	if err != nil {
		return err
	}
	spec.IdempotencyKey = f.key
	if f.detach {
		p, err := cl.StartProcess(ctx, ref, spec)
		if err != nil {
			return err
		}
		return c.showLine(p, "%s", p.ID)
	}
	// A signal before the command runs is for the command; a second one
	// does not wait for it.
	sctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer c.hold(cancel)()
	p, err := cl.Exec(sctx, ref, spec)
	if err != nil {
		return err
	}
	return c.follow(ctx, ref, p, spec, f)
}

// follow stays with a command until it ends.
func (c *cli) follow(ctx context.Context, ref string, p sandbox.ProcessIO, spec sandbox.ProcessSpec, f processFlags) error {
	exit, err := c.pump(p, spec.Stdin, f.tty)
	if err != nil {
		return c.explainEnd(ctx, ref, err)
	}
	return c.passExit(exit)
}

func (c *cli) shellCmd() *cobra.Command {
	var f processFlags
	cmd := &cobra.Command{
		Use:   "shell [flags] SANDBOX",
		Short: "Open a shell in a running sandbox",
		Long: `Open the user's login shell in a running sandbox, on a terminal: the shell of
/etc/passwd inside, else bash, else sh.`,
		Example: `  sandbox shell dev
  sandbox shell -u 1000 -w /app dev`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.tty = true
			// $SHELL is what the daemon took from /etc/passwd inside.
			argv := []string{"/bin/sh", "-c", `if [ -x "$SHELL" ]; then exec "$SHELL" -l; elif command -v bash >/dev/null; then exec bash -l; else exec sh -l; fi`}
			spec := f.build(c, argv, nil)
			if t := c.getenv("TERM"); t != "" {
				spec.Env = map[string]string{"TERM": t}
			}
			return c.exec(cmd.Context(), args[0], spec, f)
		},
	}
	cmd.Flags().StringVarP(&f.user, "user", "u", "", "user: a name, a uid or uid:gid")
	cmd.Flags().StringVarP(&f.cwd, "cwd", "w", "", "working directory")
	return cmd
}

func (c *cli) attachCmd() *cobra.Command {
	var interactive bool
	var offset int64
	cmd := &cobra.Command{
		Use:   "attach [flags] SANDBOX PROCESS",
		Short: "Connect to a process that is already running",
		Long: `Connect to a process that is already running: print its output from now on (or
from --offset on), pass signals on, and end with its exit code. With -i standard
input is passed on, too, if the process was started with one.`,
		Example: `  sandbox ps dev
  sandbox attach dev p3
  sandbox attach -i --offset 0 dev p3`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: c.completeProcess,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			// A signal before the connection stands is for the command; a second
			// one does not wait for it.
			ctx, cancel := context.WithCancel(context.WithoutCancel(cmd.Context()))
			defer cancel()
			defer c.hold(cancel)()
			proc, err := cl.Process(ctx, args[0], sandbox.ProcessID(args[1]))
			if err != nil {
				return err
			}
			from := proc.Output.End
			if cmd.Flags().Changed("offset") {
				from = offset
			}
			p, err := cl.Attach(ctx, args[0], proc.ID, from)
			if err != nil {
				return err
			}
			tty := interactive && proc.TTY
			if tty {
				_ = p.Resize(windowSize(c.in)) // it may have ended
			}
			exit, err := c.pump(p, interactive, tty)
			if err != nil {
				return c.explainEnd(cmd.Context(), args[0], err)
			}
			return c.passExit(exit)
		},
	}
	cmd.Flags().BoolVarP(&interactive, "interactive", "i", false, "pass standard input on")
	cmd.Flags().Int64Var(&offset, "offset", -1, "first byte of output wanted; -1 means the oldest kept (default: what comes from now on)")
	return cmd
}

func (c *cli) killCmd() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "kill [-s SIGNAL] SANDBOX PROCESS…",
		Short: "Send a signal to a process and all it started",
		Example: `  sandbox ps dev
  sandbox kill dev p3              # SIGTERM
  sandbox kill -s KILL dev p3`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: c.completeProcess,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			sig := strings.ToUpper(name)
			if !strings.HasPrefix(sig, "SIG") {
				sig = "SIG" + sig
			}
			return each(c, args[1:], func(id string) error {
				return cl.SignalProcess(cmd.Context(), args[0], sandbox.ProcessID(id), sig)
			})
		},
	}
	cmd.Flags().StringVarP(&name, "signal", "s", "TERM", "signal, as TERM, INT, HUP or KILL")
	return cmd
}

// each does f for every argument, complains of each failure and returns an
// exit code if there was one.
func each(c *cli, args []string, f func(string) error) error {
	var failed error
	for _, a := range args {
		if err := f(a); err != nil {
			if len(args) == 1 {
				return err
			}
			c.complain(fmt.Errorf("%s: %w", a, err))
			failed = exitError(exitTrouble)
		}
	}
	return failed
}
