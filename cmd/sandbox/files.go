package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) filesCmd() *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use: "files", Aliases: []string{"file"}, Short: "Work on the files of a running sandbox",
		Long: `Work on the files of a running sandbox. Paths are absolute inside; links lead
nowhere but inside; what is written counts against the sandbox's quota. See also cp.`,
	}
	cmd.PersistentFlags().StringVarP(&user, "user", "u", "", "as whom; the sandbox's user if not given")
	cmd.AddCommand(c.filesLs(&user), c.filesStat(&user), c.filesCat(&user), c.filesPut(&user), c.filesMkdir(&user),
		c.filesRm(&user), c.filesMv(&user), c.filesChmod(&user), c.filesWatch(&user))
	return cmd
}

// fileCmd is a command on SANDBOX and at least one PATH.
func (c *cli) fileCmd(use, short, example string, args cobra.PositionalArgs, do func(cmd *cobra.Command, f sandbox.Files, args []string) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Example: example, Args: args, ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return do(cmd, cl.Files(args[0]), args[1:])
		},
	}
}

func (c *cli) fileTable(w printer, items []sandbox.FileInfo, path bool) error {
	return columns(w, "MODE\tUSER\tGROUP\tSIZE\tMODIFIED\tNAME", func(row func(string, ...any)) {
		for _, i := range items {
			name := i.Name
			if path {
				name = i.Path
			}
			if i.Type == sandbox.FileSymlink {
				name += " -> " + i.Target
			}
			row("%s\t%s\t%s\t%s\t%s\t%s", modeText(i), owner(i.User, i.UID), owner(i.Group, i.GID), size(i.Size), i.ModTime.Local().Format("2006-01-02 15:04"), name)
		}
	})
}

// modeText prints a mode as ls does.
func modeText(i sandbox.FileInfo) string {
	m := os.FileMode(i.Mode & 0o777)
	for bit, flag := range map[uint32]os.FileMode{0o4000: os.ModeSetuid, 0o2000: os.ModeSetgid, 0o1000: os.ModeSticky} {
		if i.Mode&bit != 0 {
			m |= flag
		}
	}
	kind := map[sandbox.FileType]string{sandbox.FileRegular: "-", sandbox.FileDir: "d", sandbox.FileSymlink: "l", sandbox.FileOther: "?"}[i.Type]
	text := m.Perm().String()[1:]
	if m != m.Perm() {
		text += fmt.Sprintf(" (%04o)", i.Mode)
	}
	return kind + text
}

func owner(name string, id uint32) string {
	if name != "" {
		return name
	}
	return strconv.FormatUint(uint64(id), 10)
}

func (c *cli) filesLs(user *string) *cobra.Command {
	depth := 1
	cmd := c.fileCmd("ls SANDBOX [PATH]", "List a directory", "  sandbox files ls dev /etc\n  sandbox files ls --depth 3 dev /app", cobra.RangeArgs(1, 2),
		func(cmd *cobra.Command, f sandbox.Files, args []string) error {
			dir := "/"
			if len(args) == 1 {
				dir = args[0]
			}
			items, err := f.List(cmd.Context(), *user, dir, depth)
			if err != nil {
				return err
			}
			return c.show(items, func(w printer) error { return c.fileTable(w, items, depth > 1) })
		})
	cmd.Flags().IntVar(&depth, "depth", 1, "levels deep")
	return cmd
}

func (c *cli) filesStat(user *string) *cobra.Command {
	return c.fileCmd("stat SANDBOX PATH…", "Describe files", "  sandbox files stat dev /etc/passwd", cobra.MinimumNArgs(2),
		func(cmd *cobra.Command, f sandbox.Files, args []string) error {
			items := []sandbox.FileInfo{}
			for _, p := range args {
				i, err := f.Stat(cmd.Context(), *user, p)
				if err != nil {
					return err
				}
				items = append(items, i)
			}
			return c.show(items, func(w printer) error { return c.fileTable(w, items, true) })
		})
}

func (c *cli) filesCat(user *string) *cobra.Command {
	var offset, limit int64
	cmd := c.fileCmd("cat SANDBOX PATH…", "Print files", "  sandbox files cat dev /etc/os-release\n  sandbox files cat --offset 1000 --limit 100 dev /var/log/app.log", cobra.MinimumNArgs(2),
		func(cmd *cobra.Command, f sandbox.Files, args []string) error {
			for _, p := range args {
				_, r, err := f.Read(cmd.Context(), *user, p, offset, limit)
				if err != nil {
					return err
				}
				_, err = io.Copy(c.out, r)
				_ = r.Close() // read only
				if err != nil {
					return err
				}
			}
			return nil
		})
	cmd.Flags().Int64Var(&offset, "offset", 0, "first byte")
	cmd.Flags().Int64Var(&limit, "limit", -1, "at most this many bytes; -1 means all")
	return cmd
}

func (c *cli) filesPut(user *string) *cobra.Command {
	var mode string
	cmd := c.fileCmd("put SANDBOX PATH [FILE]", "Write a file",
		"  echo hello | sandbox files put dev /tmp/greeting\n  sandbox files put --mode 0755 dev /usr/local/bin/tool ./tool", cobra.RangeArgs(2, 3),
		func(cmd *cobra.Command, f sandbox.Files, args []string) error {
			m, err := parseMode(mode)
			if err != nil {
				return err
			}
			src := c.in
			if len(args) == 2 && args[1] != "-" {
				file, err := os.Open(args[1])
				if err != nil {
					return err
				}
				defer func() { _ = file.Close() }() // read only
				src = file
			}
			info, err := f.Write(cmd.Context(), *user, args[0], m, src)
			if err != nil || c.output == "table" {
				return err
			}
			return c.show(info, nil)
		})
	cmd.Long = "Write a file from FILE or standard input. The old content stays until all of the new has arrived."
	cmd.Flags().StringVar(&mode, "mode", "0644", "permission bits, octal")
	return cmd
}

// parseMode reads octal permission bits.
func parseMode(s string) (uint32, error) {
	m, err := strconv.ParseUint(strings.TrimPrefix(s, "0o"), 8, 32)
	if err != nil || m > 0o7777 {
		return 0, usage("mode %q: use octal digits, as 0644", s)
	}
	return uint32(m), nil
}

func (c *cli) filesMkdir(user *string) *cobra.Command {
	var mode string
	cmd := c.fileCmd("mkdir SANDBOX PATH…", "Make directories and their parents", "  sandbox files mkdir dev /srv/a/b", cobra.MinimumNArgs(2),
		func(cmd *cobra.Command, f sandbox.Files, args []string) error {
			m, err := parseMode(mode)
			if err != nil {
				return err
			}
			return each(c, args, func(p string) error {
				_, err := f.Mkdir(cmd.Context(), *user, p, m)
				return err
			})
		})
	cmd.Flags().StringVar(&mode, "mode", "0755", "permission bits, octal")
	return cmd
}

func (c *cli) filesRm(user *string) *cobra.Command {
	var recursive bool
	cmd := c.fileCmd("rm SANDBOX PATH…", "Delete files", "  sandbox files rm dev /tmp/greeting\n  sandbox files rm -r dev /tmp/build", cobra.MinimumNArgs(2),
		func(cmd *cobra.Command, f sandbox.Files, args []string) error {
			return each(c, args, func(p string) error { return f.Remove(cmd.Context(), *user, p, recursive) })
		})
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "whole trees")
	return cmd
}

func (c *cli) filesMv(user *string) *cobra.Command {
	return c.fileCmd("mv SANDBOX FROM TO", "Rename a file or tree", "  sandbox files mv dev /tmp/a /tmp/b", cobra.ExactArgs(3),
		func(cmd *cobra.Command, f sandbox.Files, args []string) error {
			return f.Move(cmd.Context(), *user, args[0], args[1])
		})
}

func (c *cli) filesChmod(user *string) *cobra.Command {
	return c.fileCmd("chmod SANDBOX MODE PATH…", "Change permission bits", "  sandbox files chmod dev 0755 /app/run.sh", cobra.MinimumNArgs(3),
		func(cmd *cobra.Command, f sandbox.Files, args []string) error {
			m, err := parseMode(args[0])
			if err != nil {
				return err
			}
			return each(c, args[1:], func(p string) error { return f.Chmod(cmd.Context(), *user, p, m) })
		})
}

func (c *cli) filesWatch(user *string) *cobra.Command {
	var recursive bool
	cmd := c.fileCmd("watch SANDBOX PATH", "Print changes as they happen", "  sandbox files watch -r dev /app", cobra.ExactArgs(2),
		func(cmd *cobra.Command, f sandbox.Files, args []string) error {
			w, err := f.Watch(cmd.Context(), *user, args[0], recursive)
			if err != nil {
				return err
			}
			defer func() { _ = w.Close() }() // reading only
			for {
				e, err := w.Next()
				if err != nil {
					if cmd.Context().Err() != nil {
						return nil // Ctrl-C is its ordinary end
					}
					return fmt.Errorf("watching %s: %w", args[0], err)
				}
				if err := c.showLine(e, "%s\t%s", e.Op, e.Path); err != nil {
					return err
				}
			}
		})
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "directories beneath, too")
	return cmd
}
