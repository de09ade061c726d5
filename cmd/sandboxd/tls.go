package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/certs"
)

// tlsCommand makes and shows the certificate of the daemon.
func tlsCommand(configured func() (config, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use: "tls", Short: "Make or show the certificate for the API over TCP",
		Long: `The API is served over TCP with TLS alone. A certificate of your own goes into
tls_cert and tls_key of the configuration; 'tls init' makes one where there is
none, signed by an authority made with it, whose ca.pem clients must be given.`,
	}
	cmd.AddCommand(tlsInitCommand(configured), tlsShowCommand(configured))
	return cmd
}

// tlsFiles are where the certificate of the daemon is, by the flags of cmd, and
// the directory of its authority.
func tlsFiles(cmd *cobra.Command, dir string, configured func() (config, error)) (string, config, error) {
	if dir == "" {
		c, err := configured()
		return filepath.Dir(c.TLSCert), c, err
	}
	of := func(flag, name string) string {
		return cmp.Or(cmd.Flag(flag).Value.String(), filepath.Join(dir, name))
	}
	return dir, config{TLSCert: of("tls-cert", certs.ServerFile), TLSKey: of("tls-key", certs.ServerKeyFile), Listen: cmd.Flag("listen").Value.String()}, nil
}

func tlsInitCommand(configured func() (config, error)) *cobra.Command {
	var dir string
	var hosts []string
	cmd := &cobra.Command{
		Use: "init [flags]", Short: "Make an authority and a certificate for this machine", Args: cobra.NoArgs,
		Long: `Make an authority (ca.pem, for clients; ca-key.pem, which you may move elsewhere) and
a certificate for this machine (server.pem, server-key.pem), good for 820 days, where the
configuration or --tls-cert and --tls-key say; the authority lies beside the certificate. It is
for the names and addresses given with --host, for localhost and the loopback
addresses, and without --host for the machine's own name. Nothing is overwritten.`,
		Example: `  sandboxd tls init --host box.example.com --host 192.0.2.7
  sandboxd tls init --dir /srv/sandboxd-tls`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(hosts) == 0 {
				name, err := os.Hostname()
				if err != nil {
					return fmt.Errorf("find this machine's name: %w; give it with --host", err)
				}
				hosts = []string{name}
			}
			for _, own := range []string{"localhost", "127.0.0.1", "::1"} {
				if !slices.Contains(hosts, own) {
					hosts = append(hosts, own)
				}
			}
			dir, c, err := tlsFiles(cmd, dir, configured)
			if err != nil {
				return err
			}
			listen := cmp.Or(c.Listen, "0.0.0.0:7463")
			if err := certs.Make(dir, c.TLSCert, c.TLSKey, hosts, time.Now()); err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			fmt.Fprintf(out, "made a certificate for %s\n\n", strings.Join(hosts, ", "))
			fmt.Fprintf(out, "In the daemon's configuration:\n  listen: %s\n  tls_cert: %s\n  tls_key: %s\n\n", listen, c.TLSCert, c.TLSKey)
			_, port, _ := net.SplitHostPort(listen)
			_, err = fmt.Fprintf(out, "For clients: give them %s, and\n  SANDBOX_HOST=https://%s SANDBOX_CA=ca.pem SANDBOX_KEY=KEY sandbox ls\nwhere 'sandbox key create OWNER' on this machine makes a KEY.\n", filepath.Join(dir, certs.AuthorityFile), net.JoinHostPort(hosts[0], port))
			return err
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "directory for the files (default where the configuration has the certificate)")
	cmd.Flags().StringSliceVar(&hosts, "host", nil, "name or address that clients connect to; repeatable")
	return cmd
}

func tlsShowCommand(configured func() (config, error)) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use: "show [FILE…]", Short: "Show what certificates are for, and until when",
		Example: "  sandboxd tls show\n  sandboxd tls show /etc/letsencrypt/live/box.example.com/fullchain.pem",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				dir, c, err := tlsFiles(cmd, dir, configured)
				if err != nil {
					return err
				}
				if ca := filepath.Join(dir, certs.AuthorityFile); exists(ca) { // one of your own has none
					args = append(args, ca)
				}
				args = append(args, c.TLSCert)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 2, ' ', 0)
			fmt.Fprintln(w, "FILE\tSUBJECT\tISSUER\tUNTIL\tFOR")
			for _, name := range args {
				c, err := certs.Read(name)
				if errors.Is(err, fs.ErrNotExist) {
					return fmt.Errorf("%w; 'sandboxd tls init' makes one", err)
				}
				if err != nil {
					return err
				}
				until := c.NotAfter.Format(time.DateOnly)
				if time.Now().After(c.NotAfter) {
					until += " (over)"
				}
				what := strings.Join(c.Hosts, ", ")
				if c.Authority {
					what = "signing"
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", c.File, c.Subject, c.Issuer, until, what)
			}
			return w.Flush()
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "directory of the files (default where the configuration has the certificate)")
	return cmd
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
