package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) runCmd() *cobra.Command {
	var sf specFlags
	var pf processFlags
	var rm bool
	var entry *string
	var entrypoint string
	cmd := &cobra.Command{
		Use:   "run [flags] [--] [COMMAND [ARG…]]",
		Short: "Create a sandbox and run a command in it",
		Long: `Create a sandbox, run a command in it and pass its output and exit code through.

With --rm the sandbox ends with the command, however that ends, and also when
you interrupt the start; its record stays ('sandbox ls -a'). Without --rm the
sandbox runs on: come back with 'sandbox exec', end it with 'sandbox rm'. A
command that cannot start leaves no sandbox. The command stands in place of the
image's own; an entrypoint of the image is run with it as arguments, unless
--entrypoint names another.

An image that is not here is pulled first where its name says which registry
has it, as registry.example/team/app:1.2; --pull always or never.

Standard input is passed on with -i, or when it is neither a terminal nor
/dev/null. Ctrl-C is passed on as SIGINT; the second one kills the command.`,
		Example: `  sandbox run --rm -- echo hello
  sandbox run --rm --image host --memory 512m --cpu 1 --timeout 10m -- python3 job.py
  sandbox run --rm -it -- bash
  echo 'print(6*7)' | sandbox run --rm -- python3
  sandbox run -d --name web --net open -- python3 -m http.server
  sandbox volume create cache && sandbox run --rm -v cache:/cache -- make`,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("entrypoint") {
				entry = &entrypoint
			}
			return c.run(cmd.Context(), &sf, &pf, rm, entry, args)
		},
	}
	cmd.Flags().BoolVar(&rm, "rm", false, "end the sandbox when the command ends")
	cmd.Flags().StringVar(&entrypoint, "entrypoint", "", "program in place of the image's entrypoint and cmd; empty for none")
	sf.add(cmd)
	_ = cmd.RegisterFlagCompletionFunc("volume", c.completeMount) // the flag was just added
	pf.add(cmd)
	// A command's own flags need no "--" before them.
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// birth follows the creation of one sandbox, which a signal may interrupt.
type birth struct {
	mu          sync.Mutex
	interrupted bool
	cancel      context.CancelFunc
}

// signal notes the first signal, which lets the creation finish so that what
// it made can be removed; the second gives up.
func (b *birth) signal(os.Signal) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.interrupted {
		b.cancel()
	}
	b.interrupted = true
}

// run does the work of 'sandbox run'.
func (c *cli) run(ctx context.Context, sf *specFlags, pf *processFlags, rm bool, entry *string, argv []string) error {
	spec, err := sf.build(c.getenv, c.in)
	if err != nil {
		return err
	}
	if pf.detach && (pf.tty || pf.interactive) {
		return usage("--detach goes with neither -t nor -i: start it, then 'sandbox attach'")
	}
	cl, err := c.persistent(&pf.key)
	if err != nil {
		return err
	}
	if entry != nil && *entry != "" {
		argv = append([]string{*entry}, argv...)
	}
	ps := pf.build(c, argv, nil)
	ps.ImageCommand = entry == nil
	ps.Main = rm // so that it ends even if this program is killed
	if err := ps.Validate(); err != nil {
		return err
	}
	// A signal before the command runs is for the command; a second one
	// does not wait for it.
	if err := c.pullFor(ctx, cl, spec.Image, sf.pull); err != nil {
		return err
	}
	sctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer c.hold(cancel)() // from here on there is something to clean up
	sb, p, err := c.begin(sctx, cl, pf.key, api.RunRequest{Sandbox: spec, Process: api.ExecRequest{ProcessSpec: ps}})
	if err != nil {
		return err
	}
	if err := c.publishAll(sctx, cl, sb.ID, sf.publish); err != nil {
		_ = p.Close() // it ends with its sandbox
		c.remove(ctx, cl, sb.ID)
		return err
	}
	early := c.held()
	switch {
	case pf.detach && !early:
		_ = p.Close() // it goes on
		return c.showLine(sb, "%s", sb.ID)
	case pf.detach:
		err = exitError(exitInterrupted)
	default:
		err = c.follow(ctx, string(sb.ID), p, ps, *pf)
	}
	_, passed := errors.AsType[exitError](err)
	switch {
	case rm || early:
		c.remove(ctx, cl, sb.ID)
	case err != nil && !passed, isTerminal(c.err):
		c.warn("sandbox %s runs on: 'sandbox rm %s' ends it", sb.ID, sb.ID)
	}
	return err
}

// begin makes a sandbox with a command in it. Given up in the middle it
// removes what the daemon made.
func (c *cli) begin(ctx context.Context, cl *client.Client, key string, req api.RunRequest) (sandbox.Sandbox, sandbox.ProcessIO, error) {
	sb, p, err := cl.Run(ctx, req, key)
	if err == nil || ctx.Err() == nil {
		return sb, p, err
	}
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), detachTimeout)
	defer cancel()
	restore := c.signals(func(os.Signal) {}) // it is bounded; wait for it
	defer restore()
	if sb, err = cl.Create(sctx, req.Sandbox, key); err == nil {
		c.remove(ctx, cl, sb.ID)
	}
	return sandbox.Sandbox{}, nil, exitError(exitInterrupted)
}

// create makes a sandbox so that an interruption leaves none behind: the
// first signal waits for the creation and removes the outcome.
func (c *cli) create(ctx context.Context, cl *client.Client, spec sandbox.Spec, key string) (sandbox.Sandbox, error) {
	sctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	b := &birth{cancel: cancel}
	restore := c.signals(b.signal)
	defer restore()
	sb, err := cl.Create(sctx, spec, key)
	b.mu.Lock()
	interrupted := b.interrupted
	b.mu.Unlock()
	if !interrupted {
		return sb, err
	}
	if errors.Is(err, context.Canceled) {
		// Given up in the middle: whatever the daemon made has our key.
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), detachTimeout)
		defer cancel()
		sb, err = cl.Create(sctx, spec, key)
	}
	if err == nil {
		c.remove(ctx, cl, sb.ID)
	}
	return sandbox.Sandbox{}, exitError(exitInterrupted)
}

// remove ends a sandbox on the way out, whatever became of ctx.
func (c *cli) remove(ctx context.Context, cl *client.Client, id sandbox.ID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), detachTimeout)
	defer cancel()
	restore := c.signals(func(os.Signal) {}) // it is bounded; wait for it
	defer restore()
	if _, err := cl.Remove(ctx, string(id)); err != nil {
		c.complain(fmt.Errorf("removing sandbox %s: %w; 'sandbox rm %s' tries again", id, err, id))
	}
}

func (c *cli) createCmd() *cobra.Command {
	var sf specFlags
	var key string
	cmd := &cobra.Command{
		Use:   "create [flags]",
		Short: "Create a sandbox and print its id",
		Long: `Create a sandbox and print its id once it runs. Nothing runs in it yet: see
exec, shell and cp. What is not given is the daemon's default. 'sandbox inspect'
shows which limits this machine enforces.`,
		Example: `  sandbox create --name dev --image host --memory 1g --cpu 2 --disk 5g
  sandbox create --net open --timeout 8h --idle-timeout 30m -l team=infra
  id=$(sandbox create --idempotency-key build-4711)     # safe to repeat`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			spec, err := sf.build(c.getenv, c.in)
			if err != nil {
				return err
			}
			given := key != ""
			cl, err := c.persistent(&key)
			if err != nil {
				return err
			}
			if err := c.pullFor(cmd.Context(), cl, spec.Image, sf.pull); err != nil {
				return err
			}
			sb, err := c.create(cmd.Context(), cl, spec, key)
			if err != nil {
				return err
			}
			if err := c.publishAll(cmd.Context(), cl, sb.ID, sf.publish); err != nil {
				if !given { // with one it may have been there before
					c.remove(cmd.Context(), cl, sb.ID)
				}
				return err
			}
			return c.show(sb, func(w printer) error { return line(w, string(sb.ID)) })
		},
	}
	sf.add(cmd)
	_ = cmd.RegisterFlagCompletionFunc("volume", c.completeMount) // the flag was just added
	cmd.Flags().StringVarP(&sf.spec.WorkDir, "cwd", "w", "", "working directory of its processes")
	cmd.Flags().StringVarP(&sf.spec.User, "user", "u", "", "user of its processes: a name, a uid or uid:gid")
	addKey(cmd, &key)
	return cmd
}
