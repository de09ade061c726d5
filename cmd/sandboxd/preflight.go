package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/launch"
)

// preflight finds what check cannot see in the configuration alone: what of it
// this machine does not bear. The start and --check-config both ask it, so that
// neither refuses what the other takes. It changes nothing, and does not mind a
// daemon that runs.
func (c config) preflight() error {
	var errs []error
	bad := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	for what, dir := range map[string]string{"state_dir": c.StateDir, "run_dir": c.RunDir} {
		if st, err := os.Stat(dir); err == nil && !st.IsDir() {
			bad(what, fmt.Errorf("%s is there and is no directory", dir))
		}
	}
	bad("run_dir", launch.CheckRunDir(c.RunDir))
	bad("volume.size", rootfs.CheckVolumeSize(c.StateDir, int64(c.Volume.Size)))
	bad("socket", checkUnix(c.socketPath()))
	if at := c.Network.IngressListen; strings.HasPrefix(at, "/") {
		bad("network.ingress_listen", errors.Join(checkUnix(at), checkParent(at)))
	} else {
		bad("network.ingress_listen", checkBind(at))
	}
	for what, at := range map[string]string{"listen": c.Listen, "e2b.listen": c.E2B.Listen, "metrics_listen": c.MetricsListen} {
		bad(what, checkBind(at))
	}
	errs = append(errs, c.checkCertificate())
	w := &worlds{c: c}
	if w.exists() {
		bad("production", w.checkSlots())
	}
	return errors.Join(errs...)
}

// maxUnix is the longest path of a unix socket (unix(7)).
const maxUnix = 107

// checkUnix judges the path of a socket that is to be made.
func checkUnix(path string) error {
	if len(path) > maxUnix {
		return fmt.Errorf("%s has %d bytes, and a socket's path at most %d: choose a shorter one", path, len(path), maxUnix)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("%s is there and is no socket: remove it, or choose another path", path)
	}
	return nil
}

func checkParent(path string) error {
	st, err := os.Stat(filepath.Dir(path))
	if err == nil && !st.IsDir() {
		err = fmt.Errorf("%s is no directory", filepath.Dir(path))
	}
	return err
}

// checkBind finds an address that is not this machine's. That its port is taken
// does not count: a daemon may run.
func checkBind(at string) error {
	if at == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(at)
	if err != nil {
		return nil // check says so
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EAFNOSUPPORT) {
		return fmt.Errorf("%s is no address of this machine: %w", host, err)
	}
	if err == nil {
		err = ln.Close()
	}
	return err
}
