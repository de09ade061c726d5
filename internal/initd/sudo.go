package initd

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
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

// listenSudo opens the socket. Whoever was in the network namespace before PID 1
// may have its name: then there is no sudo.
func listenSudo() (*guests, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	l := os.NewFile(uintptr(fd), "sudo")
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: "@" + sudoAddress}), unix.Listen(fd, maxSudo)); err != nil {
		_ = l.Close()
		return nil, err
	}
	return newGuests(l)
}

// serveGuests takes guests, so many at once, for good.
func (s *Server) serveGuests(g *guests, slots chan struct{}, one func(*guest)) {
	for {
		slots <- struct{}{}
		c, err := g.accept()
		if err != nil {
			<-slots
			<-time.After(10 * time.Millisecond) // as accept does
			continue
		}
		go func() {
			defer func() { g.leave(c); <-slots; s.worked() }()
			one(c)
		}()
	}
}

// sudo serves one command from its request to its end.
func (s *Server) sudo(c *guest) {
	_ = c.f.SetReadDeadline(time.Now().Add(requestDeadline))
	req, err := c.receive()
	if err != nil {
		return
	}
	_ = c.f.SetReadDeadline(time.Time{})
	p, err := s.startSudo(c, req)
	c.drop()
	if err != nil {
		c.tell(sudoReply{Error: err.Error()})
		return
	}
	left := make(chan struct{})
	go func() {
		defer close(left)
		for {
			req, err := c.receive()
			c.drop()
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
	_ = c.f.SetReadDeadline(time.Now())
	<-left
}

// startSudo checks who asks and starts the command.
func (s *Server) startSudo(c *guest, req sudoRequest) (*process, error) {
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
		c.mu.Lock() // the root stays until the command is forked, and so do they
		defer c.mu.Unlock()
		if c.cut || len(c.fds) != 3 {
			return nil, sandbox.Errorf(sandbox.ErrInvalid, "bad_request", "a command needs 3 descriptors, %d came", len(c.fds))
		}
		return &stdio{child: c.fds, lent: true}, nil
	})
}

// maySudo looks the asker up and refuses whom the image has not put into the
// group.
func (s *Server) maySudo(uid uint32) (account, error) {
	s.root.RLock()
	defer s.root.RUnlock()
	acc, err := readUser(fmt.Sprint(uid))
	if err != nil || uid == 0 {
		return acc, err
	}
	group, err := readUserFile("/etc/group")
	if err != nil {
		return acc, sandbox.Errorf(sandbox.ErrForbidden, "sudo_denied", "who may use sudo is not known: %w", err)
	}
	gid, ok := groupID(sudoGroup, group)
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
func (c *guest) receive() (req sudoRequest, err error) {
	var buf []byte
	take := func(fd int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		// No memory is held while there is nothing to read.
		var n int
		if n, _, err = unix.Recvfrom(fd, nil, unix.MSG_PEEK|unix.MSG_TRUNC); err != nil || n == 0 || c.cut {
			return
		}
		if n > maxSudoSays {
			err = unix.EMSGSIZE
			return
		}
		buf = make([]byte, n)
		oob := make([]byte, unix.CmsgSpace(4*3))
		oobn, flags := 0, 0
		_, oobn, flags, _, err = unix.Recvmsg(fd, buf, oob, unix.MSG_CMSG_CLOEXEC)
		c.fds = rights(oob[:max(oobn, 0)])
		if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			err = unix.EMSGSIZE
		}
	}
	rerr := c.raw.Read(func(fd uintptr) bool {
		prod(func() { take(int(fd)) })
		return !errors.Is(err, unix.EAGAIN)
	})
	switch {
	case rerr != nil:
		return req, rerr
	case err != nil:
		return req, err
	case len(buf) == 0:
		return req, errEnd
	}
	return req, json.Unmarshal(buf, &req)
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

func (c *guest) tell(r sudoReply) {
	b, err := json.Marshal(r)
	if err != nil {
		return
	}
	_ = c.f.SetWriteDeadline(time.Now().Add(requestDeadline))
	_, _ = c.f.Write(b)
}
