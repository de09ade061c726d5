package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/api/mcp"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) mcpCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "mcp",
		Short: "Serve sandboxes to an agent as tools (MCP over stdio)",
		Long: `Serves the tools of the Model Context Protocol on standard input and output,
until that ends. Not for people: a client's configuration names this command.

  {"mcpServers": {"sandbox": {"command": "sandbox", "args": ["mcp"]}}}

Clients that speak HTTP use the daemon itself, at /mcp.`,
		Example: `  claude mcp add sandbox -- sandbox mcp
  npx @modelcontextprotocol/inspector --cli sandbox mcp --method tools/list`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return mcp.Serve(cmd.Context(), mcp.Config{Daemon: remote{cl}, Version: version}, io.NopCloser(c.in), kept{c.out})
		},
	}
}

// remote is the daemon as the tools see it.
type remote struct{ *client.Client }

func (r remote) Files(_ context.Context, ref string) (sandbox.Files, error) {
	return r.Client.Files(ref), nil
}

// kept is a writer that whoever writes to it must not close.
type kept struct{ io.Writer }

func (kept) Close() error { return nil }
