package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) doctorCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Is this machine fit, and what to do if not",
		Long: `Ask the daemon what it finds of its machine, and print how to mend what is not as
it should be. Exits with 1 if something fails. The checks are the daemon's: while
it is down, only that can be told.`,
		Example:           "  sandbox doctor",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			checks, err := cl.Doctor(cmd.Context())
			if errors.Is(err, sandbox.ErrUnavailable) {
				checks = []sandbox.Check{{
					Name: "daemon", Status: sandbox.CheckFail, Detail: err.Error(),
					Mend: "start it: 'systemctl start sandboxd', or 'sandboxd' as root in another terminal; 'journalctl -u sandboxd' says why it ended. The other checks are the daemon's own and run when it answers",
				}}
			} else if err != nil {
				return err
			}
			if err := c.show(checks, func(w printer) error { return checkLines(w, checks) }); err != nil {
				return err
			}
			for _, k := range checks {
				if k.Status == sandbox.CheckFail {
					return exitError(1)
				}
			}
			return nil
		},
	}
}

func checkLines(w printer, checks []sandbox.Check) error {
	colours := map[sandbox.CheckStatus]string{sandbox.CheckOK: green, sandbox.CheckWarn: yellow, sandbox.CheckFail: red}
	for _, k := range checks {
		err := w.printf("%s  %-20s %s\n", w.paint(colours[k.Status], fmt.Sprintf("%-4s", k.Status)), k.Name, k.Detail)
		if k.Mend != "" && k.Status != sandbox.CheckOK {
			err = errors.Join(err, line(w, "      "+k.Mend))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *cli) poolCmd() *cobra.Command {
	return &cobra.Command{
		Use: "pool", Short: "Show the pool of shells made in advance", Args: cobra.NoArgs,
		Long: `Show how the pool of shells does that the daemon keeps ready, so that a sandbox
runs in milliseconds. Many misses: raise pool.size in the daemon's configuration.`,
		Example:           "  sandbox pool",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			p, err := cl.Pool(cmd.Context())
			if err != nil {
				return err
			}
			return c.show(p, func(w printer) error {
				each := "-"
				if p.Built > 0 {
					each = ofSeconds(p.BuildSeconds / float64(p.Built)).Round(100 * time.Microsecond).String()
				}
				return w.printf(`ready    %d of %d wanted (%d in quiet times), the oldest for %s
creates  %d got a ready shell, %d waited for one
refill   %d built, %s each; %d failed, %d died unused, %d given back for want of memory
`, p.Ready, p.Target, p.Size, units.HumanDuration(ofSeconds(p.OldestSeconds)), p.Hits, p.Misses, p.Built, each, p.Failed, p.Lost, p.Shed)
			})
		},
	}
}

func ofSeconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func (c *cli) versionCmd() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the versions of this program and of the daemon", Args: cobra.NoArgs,
		Example:           "  sandbox version -o json",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Client string `json:"client"`
				Daemon string `json:"daemon,omitempty"`
				API    string `json:"api,omitempty"`
			}{Client: version}
			cl, err := c.client()
			if err != nil {
				return err
			}
			d, derr := cl.Version(cmd.Context())
			if derr == nil {
				v.Daemon, v.API = d.Version, d.API
			}
			if err := c.show(v, func(w printer) error {
				return columns(w, "PROGRAM\tVERSION", func(row func(string, ...any)) {
					row("sandbox\t%s", v.Client)
					row("sandboxd\t%s", dash(v.Daemon))
				})
			}); err != nil {
				return err
			}
			return derr
		},
	}
}

func (c *cli) completionCmd(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "completion bash|zsh|fish", Short: "Print a shell completion script",
		Example: `  source <(sandbox completion bash)
  sandbox completion fish > ~/.config/fish/completions/sandbox.fish`,
		Args: cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs), ValidArgs: []string{"bash", "zsh", "fish"},
		RunE: func(_ *cobra.Command, args []string) error {
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(c.out, true)
			case "zsh":
				return root.GenZshCompletion(c.out)
			}
			return root.GenFishCompletion(c.out, true)
		},
	}
}

// manCmd writes the man pages; the build calls it.
func (c *cli) manCmd(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "man DIR", Short: "Write the man pages to a directory", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			root.DisableAutoGenTag = true // or every build would differ
			return doc.GenManTree(root, &doc.GenManHeader{Title: "SANDBOX", Section: "1", Source: "sandboxd", Manual: "sandboxd"}, args[0])
		},
	}
}
