package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) secretCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "secret", Short: "Manage secrets: headers sandboxes can use and never see",
		Long: `A secret is the value of a header that the daemon's web gate adds to requests on
their way out of a sandbox ('--inject HOST:HEADER=SECRET'). The sandbox asks
http://HOST, the gate speaks TLS to it. Nothing tells the value again: to change
it, set it anew.`,
	}
	cmd.AddCommand(c.secretSetCmd(), c.secretLsCmd(), c.secretRmCmd())
	return cmd
}

func (c *cli) secretSetCmd() *cobra.Command {
	var file string
	var hosts []string
	cmd := &cobra.Command{
		Use: "set [flags] NAME", Short: "Set a secret, read from standard input",
		Long: `Set a secret. Its value is the whole header, as 'Bearer …' for Authorization. It
is read from standard input or from a file, never from the command line, which
other users and the shell's history see. One line end after it is cut off.

With --to it goes to these hosts only, whatever policies say.`,
		Example: `  printf 'Bearer %s' "$TOKEN" | sandbox secret set api-key --to api.example.com
  sandbox create --name dev --allow api.example.com --inject api.example.com:Authorization=api-key
  sandbox exec dev -- curl http://api.example.com/v1/me`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeSecret,
		RunE: func(cmd *cobra.Command, args []string) error {
			value, err := c.readSecret(file)
			if err != nil {
				return err
			}
			req := sandbox.SecretRequest{Name: args[0], Value: value, Hosts: hosts}
			if err := req.Validate(); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.SetSecret(cmd.Context(), req)
			if err != nil {
				return err
			}
			return c.show(s, func(w printer) error { return line(w, s.Name) })
		},
	}
	cmd.Flags().StringVar(&file, "from-file", "", "read the value from this file")
	cmd.Flags().StringArrayVar(&hosts, "to", nil, "host it may be sent to, as example.com or '*.example.com'; repeatable")
	return cmd
}

// readSecret reads a value, and no more than may be one.
func (c *cli) readSecret(file string) (string, error) {
	from := c.in
	switch {
	case file != "":
		f, err := os.Open(file)
		if err != nil {
			return "", fmt.Errorf("read the secret: %w", err)
		}
		defer f.Close()
		from = f
	case isTerminal(c.in):
		c.warn("type the secret, then a line end and ctrl-d; it shows on the screen")
	}
	b, err := io.ReadAll(io.LimitReader(from, sandbox.MaxSecretBytes+3)) // with a line end, and too long
	if err != nil {
		return "", fmt.Errorf("read the secret: %w", err)
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r"), nil
}

func (c *cli) secretLsCmd() *cobra.Command {
	var quiet bool
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"}, Short: "List the secrets, without their values", Args: cobra.NoArgs,
		Example: "  sandbox secret ls", ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			secrets, err := cl.Secrets(cmd.Context())
			if err != nil {
				return err
			}
			if quiet {
				return names(c, secrets, func(s sandbox.Secret) string { return s.Name })
			}
			return c.show(secrets, func(w printer) error {
				return columns(w, "NAME\tTO\tOWNER\tSET", func(row func(string, ...any)) {
					for _, s := range secrets {
						to := strings.Join(s.Hosts, ",")
						if to == "" {
							to = "any host of a policy"
						}
						row("%s\t%s\t%s\t%s", s.Name, to, dash(s.Owner), ago(s.UpdatedAt))
					}
				})
			})
		},
	}
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "names only")
	return cmd
}

func (c *cli) secretRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME…", Short: "Forget secrets", Example: "  sandbox secret rm api-key", Args: cobra.MinimumNArgs(1),
		Long:              "Forget secrets. Requests that need one are refused from then on.",
		ValidArgsFunction: c.completeSecret,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(name string) error { return cl.RemoveSecret(cmd.Context(), name) })
		},
	}
}

// completeSecret offers the names of secrets.
func (c *cli) completeSecret(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	cl, err := c.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	secrets, err := cl.Secrets(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var words []string
	for _, s := range secrets {
		words = append(words, s.Name)
	}
	return words, cobra.ShellCompDirectiveNoFileComp
}
