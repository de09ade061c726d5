package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

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
	removeMatching(filepath.Join(c.backupDir(), name+"-*"+backupEnd+".part*")) // of a daemon that was killed
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
	every := time.Duration(c.Backup.Every)
	wait := time.Until(st.ModTime().Add(every))
	if wait > every { // the clock was set back
		wait = 0
	}
	return wait, nil
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
		old := 0
		if last := len(all) - 1; all[last] > path { // of a clock that went ahead
			old = last
		}
		err = errors.Join(err, os.Remove(all[old]))
		all = slices.Delete(all, old, old+1)
	}
	return err
}

// removeMatching removes what was left half made; what stays is left for the next time.
func removeMatching(pattern string) {
	left, _ := filepath.Glob(pattern)
	for _, path := range left {
		_ = os.Remove(path)
	}
}
