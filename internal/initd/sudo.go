package initd

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Set-id programs do nothing under no_new_privs, so a sudo of the usual kind
// cannot work in a sandbox. The one of images/base asks PID 1 instead, over an
// abstract socket that the network namespace keeps to this sandbox, to start the
// command as the sandbox's root with the asker's own descriptors:
//
//	sudo ──{argv, env, cwd, user} + stdin, stdout, stderr──▶ PID 1
//	sudo ──{signal}───────────────────────────────────────▶ PID 1
//	sudo ◀────────────────────────{exit} or {error}──────── PID 1
//
// The kernel says who asks (SO_PEERCRED). Those of group sudo may, and root.
// What is started is what any command that the daemon starts as root is: forked
// from the same thread, without a right that a command as root has not.

const (
	sudoAddress = "sandbox-sudo"
	sudoGroup   = "sudo"
	maxSudo     = 64 // at once
	maxSudoSays = 128 << 10
)

// sudoRequest is the first packet, and each that follows.
type sudoRequest struct {
	Argv   []string `json:"argv"`
	Env    []string `json:"env"`
	Cwd    string   `json:"cwd"`
	User   string   `json:"user"`   // empty means root
	Signal string   `json:"signal"` // later packets have only this
}

type sudoReply struct {
	Exit  *int   `json:"exit,omitempty"`
	Error string `json:"error,omitempty"`
}

// serveSudo takes those who ask, for good. Whoever was in the network namespace
// before PID 1 may have the socket's name: then there is no sudo.
func (s *Server) serveSudo() {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return
	}
	l := os.NewFile(uintptr(fd), "sudo")
	defer l.Close()
	if unix.Bind(fd, &unix.SockaddrUnix{Name: "@" + sudoAddress}) != nil || unix.Listen(fd, maxSudo) != nil {
		return
	}
	raw, err := l.SyscallConn()
	if err != nil {
		return
	}
	slots := make(chan struct{}, maxSudo)
	for {
		slots <- struct{}{}
		nfd := -1
		var aerr error
		err := raw.Read(func(fd uintptr) bool {
			nfd, _, aerr = unix.Accept4(int(fd), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			return !errors.Is(aerr, unix.EAGAIN)
		})
		if err != nil {
			return
		}
		if aerr != nil {
			<-slots
			<-time.After(10 * time.Millisecond) // as accept does
			continue
		}
		go func() {
			defer func() { <-slots; s.worked() }()
			c := &sudoConn{f: os.NewFile(uintptr(nfd), "sudo")}
			defer c.f.Close()
			if c.raw, err = c.f.SyscallConn(); err == nil {
				s.sudo(c)
			}
		}()
	}
}

// sudoConn is somebody who asks.
type sudoConn struct {
	f   *os.File
	raw syscall.RawConn
}

// sudo serves one command from its request to its end.
func (s *Server) sudo(c *sudoConn) {
	_ = c.f.SetReadDeadline(time.Now().Add(requestDeadline))
	req, fds, err := c.receive()
	if err != nil {
		closeFDs(fds)
		return
	}
	_ = c.f.SetReadDeadline(time.Time{})
	p, err := s.startSudo(c, req, fds) // takes the descriptors
	if err != nil {
		c.tell(sudoReply{Error: err.Error()})
		return
	}
	go func() {
		for {
			req, fds, err := c.receive()
			closeFDs(fds)
			if err != nil {
				// Whoever asked is gone, or told the end: nothing is to be left of it.
				_ = p.signal(s.procs, unix.SIGKILL)
				return
			}
			if sig := unix.SignalNum(req.Signal); sig != 0 {
				_ = p.signal(s.procs, sig)
			}
		}
	}()
	code := s.procs.await(p)
	c.tell(sudoReply{Exit: &code})
}

// startSudo checks who asks and starts the command. It takes fds over.
func (s *Server) startSudo(c *sudoConn, req sudoRequest, fds []int) (*process, error) {
	defer func() { closeFDs(fds) }()
	if len(fds) != 3 {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "bad_request", "a command needs 3 descriptors, %d came", len(fds))
	}
	var cred *unix.Ucred
	var cerr error
	if err := c.raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, err
	}
	if cerr != nil {
		return nil, fmt.Errorf("ask the kernel who asks: %w", cerr)
	}
	asker, err := s.maySudo(cred.Uid)
	if err != nil {
		return nil, err
	}
	user := req.User
	if user == "" {
		user = "0"
	}
	spec := sandbox.ProcessSpec{Argv: req.Argv, WorkDir: req.Cwd, User: user, Tag: "sudo", Env: map[string]string{
		"SUDO_USER": asker.name, "SUDO_UID": fmt.Sprint(asker.uid), "SUDO_GID": fmt.Sprint(asker.gid), "SUDO_COMMAND": strings.Join(req.Argv, " "),
	}}
	for _, kv := range req.Env {
		switch k, v, ok := strings.Cut(kv, "="); {
		case !ok, k == "", k == "HOME", k == "USER", k == "LOGNAME", k == "SHELL", k == "MAIL", strings.HasPrefix(k, "SUDO_"): // the new user's
		default:
			spec.Env[k] = v
		}
	}
	return s.startWith(spec, func(sandbox.ProcessSpec, account) (*stdio, error) {
		st := &stdio{child: fds}
		fds = nil
		return st, nil
	})
}

// maySudo looks the asker up and refuses whom the image has not put into the
// group.
func (s *Server) maySudo(uid uint32) (account, error) {
	s.root.RLock()
	defer s.root.RUnlock()
	acc, err := resolveUser(fmt.Sprint(uid), readUserFile("/etc/passwd"), readUserFile("/etc/group"))
	if err != nil || uid == 0 {
		return acc, err
	}
	gid, ok := groupID(sudoGroup, readUserFile("/etc/group"))
	for _, g := range acc.groups {
		if ok && g == gid {
			return acc, nil
		}
	}
	return acc, sandbox.Errorf(sandbox.ErrForbidden, "sudo_denied", "%s is not in the group %s of this sandbox", acc.name, sudoGroup)
}

// await waits for the end of a process, and returns its exit code.
func (t *table) await(p *process) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	for p.exit == nil {
		t.changed.Wait()
	}
	return p.exit.Code
}

// receive reads one packet with the descriptors it brings. The end is errEnd.
func (c *sudoConn) receive() (req sudoRequest, fds []int, err error) {
	var buf []byte
	rerr := c.raw.Read(func(fd uintptr) bool {
		// No memory is held while there is nothing to read.
		var n int
		if n, _, err = unix.Recvfrom(int(fd), nil, unix.MSG_PEEK|unix.MSG_TRUNC); errors.Is(err, unix.EAGAIN) {
			return false
		}
		if err != nil || n == 0 {
			return true
		}
		if n > maxSudoSays {
			err = unix.EMSGSIZE
			return true
		}
		buf = make([]byte, n)
		oob := make([]byte, unix.CmsgSpace(4*3))
		oobn, flags := 0, 0
		_, oobn, flags, _, err = unix.Recvmsg(int(fd), buf, oob, unix.MSG_CMSG_CLOEXEC)
		fds = rights(oob[:max(oobn, 0)])
		if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			err = unix.EMSGSIZE
		}
		return true
	})
	switch {
	case rerr != nil:
		return req, fds, rerr
	case err != nil:
		return req, fds, err
	case len(buf) == 0:
		return req, fds, errEnd
	}
	return req, fds, json.Unmarshal(buf, &req)
}

// rights returns the descriptors in control data.
func rights(oob []byte) (fds []int) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range msgs {
		if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

func (c *sudoConn) tell(r sudoReply) {
	b, err := json.Marshal(r)
	if err != nil {
		return
	}
	_ = c.f.SetWriteDeadline(time.Now().Add(requestDeadline))
	_, _ = c.f.Write(b)
}
