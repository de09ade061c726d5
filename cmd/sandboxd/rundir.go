package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Whoever cleans up in /run may remove what the daemon has there, while it runs:
// it is made again.

// lookEvery is how often the daemon looks whether it is still there.
const lookEvery = time.Second

// keepWhole calls restore now and then, until stopped. It says what was made
// again, and once why that does not work.
func keepWhole(log *slog.Logger, what string, restore func() (made bool, err error)) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for said := ""; ; {
			made, err := restore()
			switch now := fmt.Sprint(err); {
			case err != nil && now != said:
				log.Error("make again what somebody removed: tried every second", "what", what, "err", err)
				said = now
			case err == nil:
				if said = ""; made {
					log.Warn("made again what somebody removed", "what", what)
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(lookEvery):
			}
		}
	}()
	return func() error { cancel(); <-done; return nil }
}

// lastingSocket is the API's socket, at its path for as long as it is open.
type lastingSocket struct {
	c    config
	log  *slog.Logger
	stop func() error

	mu    sync.Mutex
	now   *net.UnixListener // guarded by mu
	locks []*os.File        // guarded by mu; made again with the directories
}

// listenForGood listens at the API's socket.
func listenForGood(c config, log *slog.Logger) (*lastingSocket, error) {
	ln, err := listen(c, log)
	if err != nil {
		return nil, err
	}
	s := &lastingSocket{c: c, log: log, now: ln}
	s.stop = keepWhole(log, c.socketPath(), s.restore)
	return s, nil
}

func (s *lastingSocket) listener() *net.UnixListener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// restore makes the locks and the socket again where they are gone. Where another
// daemon took their place, that has it.
func (s *lastingSocket) restore() (made bool, err error) {
	gone := func(path string) bool {
		_, err := os.Lstat(path)
		return errors.Is(err, os.ErrNotExist)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range []struct{ path, what, flag string }{
		{filepath.Join(s.c.RunDir, "lock"), "run directory", "--run-dir"}, {s.c.socketPath() + ".lock", "socket", "--socket"},
	} {
		if !gone(l.path) {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(l.path), 0o711); err != nil {
			return made, err
		}
		f, err := lock(l.path, file, unix.LOCK_EX, l.what, l.flag)
		if err != nil {
			return made, err
		}
		s.locks, made = append(s.locks, f), true
	}
	if err := checkUnix(s.c.socketPath()); err != nil {
		return made, err
	}
	if !gone(s.c.socketPath()) {
		return made, nil
	}
	ln, err := listen(s.c, s.log)
	if err != nil {
		return made, err
	}
	old := s.now
	s.now = ln
	return true, old.Close()
}

// Accept implements net.Listener.
func (s *lastingSocket) Accept() (net.Conn, error) {
	for {
		ln := s.listener()
		c, err := ln.Accept()
		if err == nil || s.listener() == ln {
			return c, err
		}
	}
}

// Addr implements net.Listener.
func (s *lastingSocket) Addr() net.Addr { return s.listener().Addr() }

// Close implements net.Listener. The locks are held to the end of the process.
func (s *lastingSocket) Close() error {
	err := s.stop()
	if rerr := os.Remove(s.c.socketPath()); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	return errors.Join(err, s.listener().Close())
}
