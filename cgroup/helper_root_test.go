//go:build root

package cgroup

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The test binary runs itself as the processes the tests watch: what each
// helper does is named by the variable, its argument by the other.
const (
	helperVar = "SANDBOXD_CGROUP_HELPER"
	argVar    = "SANDBOXD_CGROUP_ARG"
)

// testUID is the host id of the tests' sandbox root.
const testUID = 0x1ffe0000

func TestMain(m *testing.M) {
	switch os.Getenv(helperVar) {
	case "":
		os.Exit(m.Run())
	case "wait": // until standard input ends
		_, _ = io.Copy(io.Discard, os.Stdin)
	case "up": // tells that it runs, then waits
		fmt.Println("up")
		_, _ = io.Copy(io.Discard, os.Stdin)
	case "burn":
		for { //nolint:staticcheck // burning is its work
		}
	case "eat": // memory, and stay
		n, _ := strconv.Atoi(os.Getenv(argVar))
		b := make([]byte, n)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		fmt.Println("ate")
		_, _ = io.Copy(io.Discard, os.Stdin)
		runtime.KeepAlive(b)
	case "cpus": // as nproc counts
		fmt.Println(runtime.NumCPU())
	case "fork": // as many children as asked, all at once
		n, _ := strconv.Atoi(os.Getenv(argVar))
		fmt.Println(forkMany(n))
		_, _ = io.Copy(io.Discard, os.Stdin)
	case "open": // a daemon in the parent cgroup itself
		_, err := Open(Config{Mount: os.Getenv("SANDBOXD_CGROUP_MOUNT"), Parent: os.Getenv(argVar), BestEffort: true})
		own, _ := os.ReadFile("/proc/self/cgroup")
		_ = json.NewEncoder(os.Stdout).Encode(openReport{errText(err), string(own)})
	case "guest":
		guestHelper()
	}
	os.Exit(0)
}

type openReport struct{ Err, Own string }

func errText(err error) string {
	if err != nil {
		return err.Error()
	}
	return ""
}

// forkMany starts n processes that wait, and returns how many came to be.
func forkMany(n int) int {
	made := 0
	for range n {
		r, _, _ := os.Pipe() // the other end stays open: the child waits
		c := exec.Command("/proc/self/exe")
		c.Env = []string{helperVar + "=wait", "GOMAXPROCS=1"}
		c.Stdin = r
		if c.Start() == nil {
			made++
		}
	}
	return made
}

// newTree opens a tree with a scratch parent, which is removed at the end.
func newTree(t testing.TB) *Tree {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.Cgroup2)
	mount, err := testenv.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	tree, err := Open(Config{Mount: mount, Parent: fmt.Sprintf("/sandboxd-test-%d", os.Getpid()), BestEffort: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := tree.kill(ctx, tree.dir); err != nil {
			t.Error(err)
		}
		if err := removeAll(tree.dir); err != nil {
			t.Error(err)
		}
	})
	return tree
}

// process is a helper in a cgroup.
type process struct {
	*exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	done chan struct{} // closed once it was reaped
}

// start runs a helper as a process born in the cgroup dir.
func start(t testing.TB, dir, helper, arg string, change ...func(*exec.Cmd)) *process {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	mount, _ := testenv.CgroupRoot()
	c := exec.Command("/proc/self/exe")
	c.Env = []string{helperVar + "=" + helper, argVar + "=" + arg, "SANDBOXD_CGROUP_MOUNT=" + mount}
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	c.Stderr = os.Stderr
	for _, f := range change {
		f(c)
	}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stdout = w
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	p := &process{Cmd: c, in: in, out: bufio.NewReader(r), done: make(chan struct{})}
	go func() { _ = c.Wait(); close(p.done) }()
	t.Cleanup(func() {
		_ = c.Process.Kill()
		<-p.done
		_ = r.Close()
	})
	return p
}

// line reads one line of the helper's output.
func (p *process) line(t testing.TB) string {
	t.Helper()
	s, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("reading the helper's answer: %v", err)
	}
	return strings.TrimSpace(s)
}

// ended waits for the helper's end and returns how it came.
func (p *process) ended(t testing.TB) syscall.WaitStatus {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		t.Fatal("the helper did not end")
	}
	return p.ProcessState.Sys().(syscall.WaitStatus)
}

// settled makes a sandbox whose PID 1 is a waiting helper.
func settled(t testing.TB, tree *Tree) (sandbox.ID, *process) {
	t.Helper()
	id := sandbox.NewID()
	if err := tree.Create(id); err != nil {
		t.Fatal(err)
	}
	init := start(t, dirOf(t, tree, id, partID), "wait", "")
	if err := tree.Settle(t.Context(), id, init.Process.Pid, testUID); err != nil {
		t.Fatal(err)
	}
	return id, init
}

func dirOf(t testing.TB, tree *Tree, id sandbox.ID, part string) string {
	t.Helper()
	dir, err := tree.at(id, part)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// soon is a context for one operation of a test.
func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// guestReport is what the sandbox's own root can do with its cgroup.
type guestReport struct {
	Cgroup    string            // as it sees itself
	Born      string            // where its child was born
	Attempts  map[string]string // what it tried, and the error; "" is success
	ChildLive bool
}

// guestHelper plays PID 1: on a word it tries, with the descriptor of work,
// what it needs and what must be refused.
func guestHelper() {
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	const work = 3
	r := guestReport{Attempts: map[string]string{}}
	own, _ := os.ReadFile("/proc/self/cgroup")
	r.Cgroup = strings.TrimSpace(string(own))
	try := func(name string, f func() error) { r.Attempts[name] = errText(f()) }

	try("mkdir", func() error { return unix.Mkdirat(work, "p1", 0o755) })
	try("mkdir deeper", func() error { return unix.Mkdirat(work, "p1/deeper", 0o755) })
	try("mkdir outside", func() error { return unix.Mkdirat(work, "../other", 0o755) })
	for _, f := range []string{
		"cgroup.max.descendants", "cgroup.max.depth", "cgroup.freeze", "cgroup.subtree_control", "../cgroup.subtree_control",
		"memory.max", "pids.max", "cpu.max", "../init/pids.max", "../cgroup.kill",
	} {
		try("write "+f, func() error {
			fd, err := unix.Openat(work, f, unix.O_WRONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			_, err = unix.Write(fd, []byte("max"))
			return err
		})
	}
	try("fork", func() error {
		p1, err := unix.Openat(work, "p1", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		in, _, err := os.Pipe()
		if err != nil {
			return err
		}
		c := exec.Command("/proc/self/exe")
		c.Env = []string{helperVar + "=wait"}
		c.Stdin = in
		c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: p1}
		if err := c.Start(); err != nil {
			return err
		}
		born, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", c.Process.Pid))
		r.Born = strings.TrimSpace(string(born))
		r.ChildLive = c.Process.Signal(syscall.Signal(0)) == nil
		return err
	})
	_ = json.NewEncoder(os.Stdout).Encode(r)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// refused reports an error that means no.
func refused(text string) bool {
	for _, e := range []error{unix.EACCES, unix.EPERM, unix.EAGAIN} {
		if text == e.Error() {
			return true
		}
	}
	return false
}
