package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// backupConfig is about copies of the databases, made while they are used.
type backupConfig struct {
	Every duration `yaml:"every"` // 0: never
	Keep  int      `yaml:"keep"`
}

func builtinBackup() backupConfig { return backupConfig{Every: duration(time.Hour), Keep: 24} }

func (b backupConfig) check() error {
	if b.Keep < 1 || b.Keep > 10000 || b.Every != 0 && time.Duration(b.Every) < time.Second {
		return errors.New("backup: use a keep of 1 to 10000, and an every of 1s or more (0: none are made)")
	}
	return nil
}

const (
	backupTime = "20060102T150405Z"
	backupEnd  = ".db"
)

func (c config) backupDir() string { return filepath.Join(c.StateDir, "backups") }

// backupsOf lists the backups of a database, sandboxd or production, oldest
// first.
func (c config) backupsOf(name string) ([]string, error) {
	all, err := filepath.Glob(filepath.Join(c.backupDir(), name+"-*"+backupEnd))
	slices.Sort(all)
	return all, err
}

// keepBackups makes backups until stopped: when the newest is so old as they
// may be.
func keepBackups(c config, name string, db *state.DB, log *slog.Logger) (stop func()) {
	if c.Backup.Every == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			wait, err := c.nextBackup(name)
			if err == nil && wait <= 0 {
				err = c.backUp(ctx, name, db)
				wait = time.Duration(c.Backup.Every)
			}
			if err != nil && ctx.Err() == nil {
				log.ErrorContext(ctx, "back up the database: tried again", "database", name, "err", err)
				wait = min(time.Minute, time.Duration(c.Backup.Every))
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
		}
	}()
	return func() { cancel(); <-done }
}

// nextBackup is how long the newest backup will do.
func (c config) nextBackup(name string) (time.Duration, error) {
	all, err := c.backupsOf(name)
	if err != nil || len(all) == 0 {
		return 0, err
	}
	st, err := os.Stat(all[len(all)-1])
	if err != nil {
		return 0, err
	}
	return time.Until(st.ModTime().Add(time.Duration(c.Backup.Every))), nil
}

func (c config) backUp(ctx context.Context, name string, db *state.DB) error {
	if err := os.MkdirAll(c.backupDir(), 0o700); err != nil {
		return err
	}
	path := filepath.Join(c.backupDir(), name+"-"+time.Now().UTC().Format(backupTime)+backupEnd)
	part := path + ".part"
	if err := os.Remove(part); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := db.Backup(ctx, part); err != nil {
		return err
	}
	if err := os.Rename(part, path); err != nil {
		return err
	}
	all, err := c.backupsOf(name)
	for len(all) > c.Backup.Keep {
		err = errors.Join(err, os.Remove(all[0]))
		all = all[1:]
	}
	return err
}

// restore puts a backup in the place of its database, which it keeps beside it.
func restore(c config, log *slog.Logger, backup string, out io.Writer) error {
	unlock, err := lockAll(c, log)
	if err != nil {
		return err
	}
	defer unlock()
	if backup == "" {
		all, err := c.backupsOf("sandboxd")
		if err != nil || len(all) == 0 {
			return errors.Join(err, fmt.Errorf("there is no backup in %s", c.backupDir()))
		}
		backup = all[len(all)-1]
	}
	name := "sandboxd"
	if strings.HasPrefix(filepath.Base(backup), "production-") {
		name = "production"
	}
	path := filepath.Join(c.StateDir, name+".db")
	part := path + ".restored"
	files := []string{"", "-wal", "-shm"}
	tidy := func() { // also what a restore that was cut off left: its log would be taken for this one's
		for _, end := range files {
			_ = os.Remove(part + end)
		}
	}
	tidy()
	for _, end := range files[:2] { // one that was set aside may have a log
		if err := copyFile(backup+end, part+end); err != nil && (end == "" || !errors.Is(err, os.ErrNotExist)) {
			return fmt.Errorf("copy the backup: %w", err)
		}
	}
	if err := state.CheckBackup(context.Background(), part); err != nil {
		tidy()
		return fmt.Errorf("%s is not restored, nothing was changed: %w", backup, err)
	}
	aside := ".before-" + time.Now().UTC().Format("20060102T150405.000000Z")
	for _, end := range files {
		if err := os.Rename(path+end, path+aside+end); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("set the old database aside: %w", err)
		}
	}
	if err := os.Rename(part, path); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s is %s now; what was there is %s\n", path, backup, path+aside)
	fmt.Fprintln(out, "The volume is newer than it: 'sandboxd recover' says what the backup does not know, and adopts or removes it.")
	if name == "sandboxd" { // the production world has none of its own
		tellValidAgain(out, path+aside, path)
	}
	return nil
}

// tellValidAgain says whom a restored database lets in that the one before did not.
func tellValidAgain(out io.Writer, before, now string) {
	ctx := context.Background()
	oldKeys, oldOwners, err := state.Credentials(ctx, before)
	keys, owners, nerr := state.Credentials(ctx, now)
	if err := errors.Join(err, nerr); err != nil {
		fmt.Fprintf(out, "Keys revoked, and owners disabled, since the backup are valid again, and what was there cannot be compared (%v): see 'sandbox key ls' and 'sandbox owner ls'.\n", err)
		return
	}
	good := map[string]bool{}
	for _, o := range oldOwners {
		good["owner "+o.Name] = !o.Disabled
	}
	for _, k := range oldKeys {
		good[k.ID] = k.RevokedAt == nil
	}
	for _, o := range owners {
		if !o.Disabled && !good["owner "+o.Name] {
			fmt.Fprintf(out, "Owner %s was disabled or removed since the backup, and is enabled again: 'sandbox owner set %s --disable'\n", o.Name, o.Name)
		}
	}
	for _, k := range keys {
		over := k.RevokedAt != nil || k.ExpiresAt != nil && time.Now().After(*k.ExpiresAt)
		if !over && !good[k.ID] {
			fmt.Fprintf(out, "Key %s of %s (%s…) was revoked or removed since the backup, and is valid again: 'sandbox key revoke %s'\n", strings.TrimSpace(k.ID+" "+sandbox.Plain(k.Name)), k.Owner, k.Begins, k.ID)
		}
	}
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err == nil {
		err = out.Sync()
	}
	return errors.Join(err, out.Close())
}
