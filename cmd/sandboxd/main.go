// Command sandboxd is the daemon: it builds, watches and removes sandboxes
// and serves the API on a unix socket.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
)

// version is set by the linker.
var version = "devel"

const defaultConfigPath = "/etc/sandboxd/config.yaml"

// ballastBytes make Go's collector run a few times less often: it starts a
// cycle when the heap has doubled, and the daemon's own live heap is a few MiB,
// which a busy second doubles many times over. The ballast counts as live and
// is never touched, so it takes no memory itself, but lets that much more
// garbage stand. A higher GOGC would do so for the heap of a thousand
// sandboxes in proportion.
const ballastBytes = 16 << 20

// The first thread shows the program's face in /proc, and the runtime cannot
// end it as it ends others that a library leaves in a foreign namespace: only
// main runs on it.
func init() { runtime.LockOSThread() }

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd:", sandbox.PlainText(err.Error()))
		os.Exit(exitStatus(err))
	}
}

func command() *cobra.Command {
	var (
		path          string
		flags         config
		checkOnly     bool
		stopSandboxes bool
	)
	cmd := &cobra.Command{
		Use:   "sandboxd",
		Short: "Build, watch and remove sandboxes on this machine",
		Long: `sandboxd builds sandboxes from Linux namespaces, cgroup v2, routed veth and
overlay filesystems, and serves them over a unix socket, and TLS where it is told to,
to the sandbox command.

It runs as root, in the foreground or under systemd. Sandboxes outlive it: when
it ends, by a signal or a crash, they go on, and the next sandboxd takes them
over with their processes and unread output.

Settings come from the built-in values, then the configuration file, then flags.`,
		Example: `  sandboxd                                  # as the systemd unit runs it
  sandboxd --cgroup=best-effort             # where limits cannot be enforced
  sandboxd --check-config --config ./config.yaml
  sandboxd tls init --host box.example.com && sandboxd --listen 0.0.0.0:7463`,
		Args: cobra.NoArgs, Version: version, SilenceUsage: true, SilenceErrors: true,
	}
	f := cmd.PersistentFlags()
	f.StringVar(&path, "config", defaultConfigPath, "configuration file (YAML)")
	f.StringVar(&flags.StateDir, "state-dir", "", "where images, sandboxes' files and the database live")
	f.StringVar(&flags.RunDir, "run-dir", "", "where sockets live while the host is up")
	f.StringVar(&flags.Socket, "socket", "", "path of the API's unix socket (default RUN-DIR/sandboxd.sock)")
	f.StringVar(&flags.Listen, "listen", "", "also serve the API over TCP with TLS, at this address and port (see 'sandboxd tls init')")
	f.StringVar(&flags.TLSCert, "tls-cert", "", "certificate for TLS, a PEM file (default "+tlsDir+"/server.pem)")
	f.StringVar(&flags.TLSKey, "tls-key", "", "its key, a PEM file (default "+tlsDir+"/server-key.pem)")
	f.StringVar(&flags.Cgroup, "cgroup", "", "enforce: refuse to start where limits cannot be enforced; best-effort: start and say which are not")
	f.StringVar(&flags.CgroupRoot, "cgroup-parent", "", "cgroup under which sandboxes live (default /sandboxd)")
	f.StringVar(&flags.LogLevel, "log-level", "", "debug, info, warn or error")
	f.StringVar(&flags.LogFormat, "log-format", "", "text or json")
	cmd.Flags().StringVar(&flags.E2B.Listen, "listen-e2b", "", "ADDRESS:PORT for clients of the E2B SDK: plain HTTP on loopback, TLS elsewhere")
	cmd.Flags().BoolVar(&checkOnly, "check-config", false, "read and check the configuration, then exit")
	cmd.Flags().BoolVar(&stopSandboxes, "stop-sandboxes", false, "on shutdown stop every sandbox (their filesystems stay) instead of leaving them running")
	configured := func() (config, error) {
		c, err := loadConfig(path, f.Changed("config"))
		if err != nil {
			return c, refusal{err}
		}
		c.override(flags)
		if err := c.check(); err != nil {
			return c, refusal{fmt.Errorf("configuration: %w", err)}
		}
		return c, nil
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := configured()
		if err != nil {
			return err
		}
		if err := c.preflight(); err != nil {
			return fmt.Errorf("configuration: %w", err)
		}
		if checkOnly {
			fmt.Fprintln(cmd.OutOrStdout(), "configuration is fine")
			return nil
		}
		return asDaemon(c, func(ctx context.Context, log *slog.Logger) error { return serve(ctx, c, log, stopSandboxes) })
	}
	cmd.AddCommand(&cobra.Command{
		Use: "retire", Args: cobra.NoArgs,
		Short: "Stop every sandbox where no daemon runs, before sandboxd is removed",
		Long: `retire stops every sandbox, takes away the network rules of sandboxes, and ends.
Files stay: the next sandboxd starts what is asked of it. No daemon may run
meanwhile on the same state directory.`,
		RunE: func(*cobra.Command, []string) error {
			c, err := configured()
			if err != nil {
				return err
			}
			return asDaemon(c, func(ctx context.Context, log *slog.Logger) error { return retire(ctx, c, log) })
		},
	})
	cmd.AddCommand(recoverCommand(configured), restoreCommand(configured))
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.SetHelpCommand(&cobra.Command{Hidden: true})
	cmd.AddCommand(tlsCommand(configured), manCommand(cmd))
	return cmd
}

// recoverCommand decides about what databases do not know.
func recoverCommand(configured func() (config, error)) *cobra.Command {
	var d decision
	cmd := &cobra.Command{
		Use: "recover", Args: cobra.NoArgs,
		Short: "List, adopt or remove what the database does not know, where no daemon runs",
		Long: `recover ends a quarantine: a database that was lost, damaged, or put back from a
backup does not know all that lies on the volume. Without flags it lists that and
changes nothing. What is adopted becomes an image, recovered-…, of the files that
were written; its processes end. Sandboxes that the database knows go on.

It also settles where a state directory belongs that was found on another machine,
or in another directory than before: --moved if that is where it lives now,
--copied if the original goes on elsewhere.`,
		Example: `  sandboxd recover                          # what there is to decide
  sandboxd recover --adopt all
  sandboxd recover --remove sbAAAAAAAAAAAA --yes`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := configured()
			if err != nil {
				return err
			}
			return asDaemon(c, func(ctx context.Context, log *slog.Logger) error {
				return recoverAll(ctx, c, log, cmd.OutOrStdout(), d)
			})
		},
	}
	cmd.Flags().StringSliceVar(&d.adopt, "adopt", nil, "sandboxes and layers to keep as images, or 'all'")
	cmd.Flags().StringSliceVar(&d.remove, "remove", nil, "sandboxes and layers to remove for good, or 'all'; with --yes")
	cmd.Flags().BoolVar(&d.yes, "yes", false, "what --remove names is removed, not only shown")
	cmd.Flags().BoolVar(&d.moved, "moved", false, "the state directory was moved here, and nobody uses it elsewhere")
	cmd.Flags().BoolVar(&d.copied, "copied", false, "the state directory is a copy, and the original goes on: this becomes another installation")
	return cmd
}

// restoreCommand puts a backup back.
func restoreCommand(configured func() (config, error)) *cobra.Command {
	return &cobra.Command{
		Use: "restore [BACKUP]", Args: cobra.MaximumNArgs(1),
		Short: "Put a backup of the database in its place, where no daemon runs",
		Long: `restore puts a backup, by default the newest of STATE/backups, in the place of the
database, and keeps what was there beside it. Those named production… are of the
production world. What is newer than the backup stays on the volume: the next
start is in quarantine until 'sandboxd recover' has decided about it. restore says
so, and names keys and owners that newer databases do not let in.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := configured()
			if err != nil {
				return err
			}
			return asDaemon(c, func(ctx context.Context, log *slog.Logger) error {
				return restore(ctx, c, log, strings.Join(args, ""), cmd.OutOrStdout())
			})
		},
	}
}

// asDaemon runs what needs all rights of the daemon, until a signal ends it.
func asDaemon(c config, run func(context.Context, *slog.Logger) error) error {
	log, err := newLogger(c)
	if err != nil {
		return err
	}
	slog.SetDefault(log)
	if os.Geteuid() != 0 {
		return errors.New("sandboxd must run as root: it makes namespaces, mounts and cgroups")
	}
	if err := launch.EnterPrivateMounts(); err != nil {
		return err
	}
	ballast := make([]byte, ballastBytes)
	defer runtime.KeepAlive(ballast)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	return run(ctx, log)
}

// manCommand writes the man page, for the build.
func manCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "man DIR", Short: "Write the man page to a directory", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			root.DisableAutoGenTag = true // or every build would differ
			return doc.GenManTree(root, &doc.GenManHeader{Title: "SANDBOXD", Section: "8", Source: "sandboxd", Manual: "sandboxd"}, args[0])
		},
	}
}

// override lays the flags that were given over the file's values.
func (c *config) override(f config) {
	for _, s := range []struct {
		to   *string
		from string
	}{
		{&c.StateDir, f.StateDir},
		{&c.RunDir, f.RunDir},
		{&c.Socket, f.Socket},
		{&c.Listen, f.Listen},
		{&c.TLSCert, f.TLSCert},
		{&c.TLSKey, f.TLSKey},
		{&c.Cgroup, f.Cgroup},
		{&c.CgroupRoot, f.CgroupRoot},
		{&c.LogLevel, f.LogLevel},
		{&c.LogFormat, f.LogFormat},
		{&c.E2B.Listen, f.E2B.Listen},
	} {
		if s.from != "" {
			*s.to = s.from
		}
	}
}
