package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Exit codes of our own; every other one is the command's.
const (
	exitTrouble       = 125 // the sandbox or the daemon, not the command
	exitNotExecutable = 126
	exitNotFound      = 127
	exitInterrupted   = 130
	exitPipe          = 128 + int(syscall.SIGPIPE)
)

// cli is one invocation.
type cli struct {
	name   string
	in     io.Reader
	out    io.Writer
	err    io.Writer
	getenv func(string) string

	host   string // flag --host
	key    string // flag --key-file
	ca     string // flag --ca
	output string // flag --output
	world  string // flag --world, of commands that have it

	mu       sync.Mutex
	onSignal func(os.Signal) // who wants signals; nil means nobody in particular
	giveUp   func()          // not nil: signals wait in pending for who wants them; the second calls it
	pending  []os.Signal
}

// exitError passes a command's exit code through.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// main runs one command line and returns the exit code.
func (c *cli) main(ctx context.Context, args []string) int {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sigs := make(chan os.Signal, 8)
	signal.Notify(sigs, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(sigs)
	done := make(chan struct{})
	defer close(done)
	// A reader of ours that goes away must not end us before we cleaned up.
	signal.Ignore(syscall.SIGPIPE)
	go c.dispatch(ctx, done, sigs, cancel)

	root := c.root()
	root.SetArgs(args)
	root.SetIn(c.in)
	root.SetOut(plainWriter{c.out})
	root.SetErr(plainWriter{c.err})
	err := unknownCommand(root, args)
	if err == nil {
		err = root.ExecuteContext(ctx)
	}
	if code, ok := errors.AsType[exitError](err); ok {
		return int(code)
	}
	switch {
	case err == nil:
		return 0
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case readerGone(err):
		return exitPipe
	}
	c.complain(err)
	switch sandbox.CodeOf(err) {
	case "command_not_found":
		return exitNotFound
	case "command_not_executable":
		return exitNotExecutable
	}
	return exitTrouble
}

// readerGone reports whether nobody reads our output. A broken connection to the
// daemon is EPIPE, too, and is told.
func readerGone(err error) bool {
	_, connection := errors.AsType[*net.OpError](err)
	return errors.Is(err, syscall.EPIPE) && !connection
}

// oneWish is how long after a signal another one may mean the same.
const oneWish = 300 * time.Millisecond

// dispatch delivers signals until done; those nobody wants end the context, and
// the second of them the program.
func (c *cli) dispatch(ctx context.Context, done <-chan struct{}, sigs <-chan os.Signal, cancel func()) {
	for first := (time.Time{}); ; {
		select {
		case s := <-sigs:
			switch {
			case c.deliver(s):
			case ctx.Err() != nil && time.Since(first) < oneWish: // timeout(1) signals the program, and its group
			case ctx.Err() != nil:
				n, _ := s.(syscall.Signal) // they all are
				os.Exit(128 + int(n))      //nolint:forbidigo // asked twice, and whatever hangs does not heed the context
			default:
				first = time.Now()
				cancel()
			}
		case <-done: // not when the context ends: a command may hang or clean up then
			return
		}
	}
}

// deliver gives a signal to who wants it, or keeps it while signals are held;
// false when neither.
func (c *cli) deliver(s os.Signal) bool {
	c.mu.Lock()
	f, giveUp := c.onSignal, c.giveUp
	if f == nil && giveUp != nil {
		c.pending = append(c.pending, s)
	}
	n := len(c.pending)
	c.mu.Unlock()
	switch {
	case f != nil:
		f(s)
	case giveUp == nil:
		return false
	case n > 1:
		giveUp()
	}
	return true
}

// signals sends the signals, first those held, to f until the function
// returned is called.
func (c *cli) signals(f func(os.Signal)) (restore func()) {
	c.mu.Lock()
	before, held := c.onSignal, c.pending
	c.onSignal, c.pending = f, nil
	c.mu.Unlock()
	for _, s := range held {
		f(s)
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.onSignal = before
	}
}

// hold keeps signals that nobody wants for whoever will, so that none is
// lost between two steps of a command, nor ends it without its cleaning up.
// The second one held calls giveUp.
func (c *cli) hold(giveUp func()) (restore func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.giveUp
	c.giveUp = giveUp
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.giveUp = before
	}
}

// held tells whether a signal waits for somebody.
func (c *cli) held() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pending) > 0
}

// say prints to stderr, for people.
func (c *cli) say(format string, args ...any) { _ = c.printer(c.err).printf(format, args...) } // nobody may read it

// complain prints an error with its code. Its lines after the first are set in,
// so that none looks like one of ours.
func (c *cli) complain(err error) {
	msg := clean(strings.ReplaceAll(sandbox.PlainText(err.Error()), "\n", "\n  "))
	code := sandbox.CodeOf(err)
	if _, ok := errors.AsType[*sandbox.Error](err); !ok {
		if _, ok := errors.AsType[*fs.PathError](err); !ok {
			c.say("sandbox: %s\n", msg)
			return
		}
		code = "local_file"
	}
	c.say("%s %s (%s)\n", c.printer(c.err).paint(red, "sandbox:"), msg, code)
}

// warn prints a line for people to stderr.
func (c *cli) warn(format string, args ...any) { c.say("sandbox: "+format+"\n", args...) }

// reconnect is how long commands that carry an idempotency key are tried again.
const reconnect = 30 * time.Second

// persistent is client for a request with an idempotency key: made up, unless
// one is given. Until the daemon answers it is repeated.
func (c *cli) persistent(key *string) (*client.Client, error) {
	if *key == "" {
		*key = "cli-" + rand.Text()
	}
	return c.client(client.WithReconnect(reconnect, func(err error, d time.Duration) {
		c.warn("%v; trying again for %v, to do it at most once ('--idempotency-key %s' goes on after that)", err, d, *key)
	}))
}

// client connects to the daemon the flags or the environment name.
func (c *cli) client(more ...client.Option) (*client.Client, error) {
	host := c.host
	if host == "" {
		host = c.getenv("SANDBOX_HOST")
	}
	opts, err := c.credentials()
	if err != nil {
		return nil, err
	}
	cl, err := client.New(host, append(opts, more...)...)
	switch {
	case err != nil || c.world == "" || c.world == "lab":
		return cl, err
	case c.world == "production":
		return cl.InProduction(), nil
	}
	return nil, usage("--world %q: use lab or production", c.world)
}

// credentials are the API key and the authority to trust that the flags or
// the environment name.
func (c *cli) credentials() (opts []client.Option, err error) {
	key := c.getenv("SANDBOX_KEY")
	if c.key != "" {
		if key, err = c.readSecret(c.key); err != nil {
			return nil, err
		}
	}
	if key != "" {
		opts = append(opts, client.WithKey(key))
	}
	ca := c.ca
	if ca == "" {
		ca = c.getenv("SANDBOX_CA")
	}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_ca", "read the authority to trust (--ca, SANDBOX_CA): %w", err)
		}
		opts = append(opts, client.WithAuthority(pem))
	}
	return opts, nil
}

// plain is a text from outside on one line: details quote names that come out
// of sandboxes.
func plain(s string) string { return sandbox.Plain(s) }

func isTerminal(v any) bool {
	f, ok := v.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// root builds the tree of commands.
func (c *cli) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "sandbox",
		Short: "Run commands in sandboxes on this machine",
		Long: `Sandboxes: a file system, a network and limits of their own for code you do not
trust, on one plain Linux machine. This program asks the sandboxd daemon.

  SANDBOX  is an id (sb…), a name, or a unique beginning of an id.
  --       ends the flags; everything after it is the command.

Exit codes: that of the command; 128+N if signal N ended it; 125 if the sandbox
or the daemon is in trouble; 126 if the command cannot be executed; 127 if it
does not exist in the sandbox. Other commands: 0 or 125.`,
		Example: `  sandbox run --rm -- echo hello         one command, nothing left behind
  sandbox create --name dev --memory 1g  a sandbox to come back to
  sandbox shell dev                      look around in it
  sandbox cp ./src dev:/root/src         bring files in
  sandbox logs dev -f                    what it prints
  sandbox rm dev                         end it
  sandbox doctor                         is this machine fit?`,
		SilenceErrors: true, SilenceUsage: true, Version: version,
	}
	if c.name == "sbx" { // installed under its short name
		root.Use = c.name
	}
	root.SetVersionTemplate("sandbox {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "usage", "%w; '%s --help' shows the flags", err, cmd.CommandPath())
	})
	root.CompletionOptions.DisableDefaultCmd = true
	f := root.PersistentFlags()
	f.StringVar(&c.key, "key-file", "", "read the API key from this file (default: the key itself in $SANDBOX_KEY)")
	f.StringVar(&c.ca, "ca", "", "trust the authority in this PEM file, and no other, for https:// (default $SANDBOX_CA)")
	f.StringVar(&c.host, "host", "", "where the daemon listens: unix:///path or http(s)://host:port (default $SANDBOX_HOST, else "+client.DefaultHost+")")
	f.StringVarP(&c.output, "output", "o", "table", "table, json or yaml")
	root.AddGroup(
		&cobra.Group{ID: "run", Title: "Run commands:"}, &cobra.Group{ID: "life", Title: "Life of a sandbox:"},
		&cobra.Group{ID: "time", Title: "Back and aside:"},
		&cobra.Group{ID: "look", Title: "Look:"}, &cobra.Group{ID: "files", Title: "Files, images and volumes:"}, &cobra.Group{ID: "lab", Title: "Projects:"}, &cobra.Group{ID: "host", Title: "This machine:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, cmd := range cmds {
			cmd.GroupID = group
			root.AddCommand(cmd)
		}
	}
	add("run", c.runCmd(), c.execCmd(), c.shellCmd(), c.attachCmd(), c.killCmd(), c.portCmd(), c.portForwardCmd(), c.mcpCmd())
	add("life", c.createCmd(), c.pauseCmd(), c.resumeCmd(), c.stopCmd(), c.startCmd(), c.timeoutCmd(), c.resetCmd(), c.rmCmd())
	add("time", c.snapshotCmd(), c.forkCmd(), c.rollbackCmd(), c.logCmd(), c.undoCmd(), c.branchCmd(), c.scheduleCmd())
	look := []*cobra.Command{c.lsCmd(), c.inspectCmd(), c.logsCmd(), c.psCmd(), c.statsCmd(), c.topCmd(), c.usageCmd(), c.costCmd(), c.revenueCmd(), c.budgetCmd(), c.eventsCmd()}
	c.addWorld(look...)
	add("look", append(look, c.netCmd())...)
	add("files", c.cpCmd(), c.filesCmd(), c.imageCmd(), c.templateCmd(), c.volumeCmd(), c.secretCmd())
	add("lab", c.projectCmd())
	add("host", c.operationCmd(), c.keyCmd(), c.ownerCmd(), c.auditCmd(), c.whoamiCmd(), c.webhookCmd(), c.doctorCmd(), c.poolCmd(), c.versionCmd(), c.completionCmd(root))
	root.AddCommand(c.manCmd(root))
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		switch c.output {
		case "table", "json", "yaml":
			return nil
		case outputCSV:
			if cmd.Annotations[outputCSV] != "" {
				return nil
			}
		}
		return sandbox.Errorf(sandbox.ErrInvalid, "usage", "--output %q: use table, json or yaml", c.output)
	}
	for _, cmd := range root.Commands() {
		usageErrors(cmd)
	}
	return root
}

// unknownCommand is the error for a command or subcommand that there is not:
// cobra shows the help of a group as if nothing were wrong.
func unknownCommand(root *cobra.Command, args []string) error {
	cmd, rest, _ := root.Find(args)
	if cmd.Runnable() || cmd.ParseFlags(rest) != nil || cmd.Flags().NArg() == 0 {
		return nil
	}
	name, near := cmd.Flags().Arg(0), ""
	if cmd == root && (name == "help" || strings.HasPrefix(name, "__complete")) { // cobra's own
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2
	if all := cmd.SuggestionsFor(name); len(all) > 0 {
		near = "did you mean " + strings.Join(all, " or ") + "? "
	}
	return sandbox.Errorf(sandbox.ErrInvalid, "unknown_command", "unknown command %.40q of '%s': %srun '%[2]s --help' for the commands there are", name, cmd.CommandPath(), near)
}

// usageErrors makes complaints about arguments show the usage line.
func usageErrors(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return sandbox.Errorf(sandbox.ErrInvalid, "usage", "%w; usage: %s", err, cmd.UseLine())
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		usageErrors(sub)
	}
}
