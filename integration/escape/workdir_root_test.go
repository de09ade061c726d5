//go:build root

package escape

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// hostSecret is what the canary holds: a file of the host that everybody may read,
// in a directory that everybody may enter, outside every sandbox.
const hostSecret = "canary-of-the-host-6f1d"

// climbing finds the canary from a working directory that lies outside, however
// deep: it says so for each depth from which the path leads there.
func climbing(canary string) []string {
	return []string{"sh", "-c", `p=.; for i in 1 2 3 4 5 6 7 8 9 10 11 12; do cat "$p` + canary + `" 2>/dev/null; p=$p/..; done; pwd; exit 0`}
}

// canary makes the file, and beside it a program that says what it is told.
// /var/tmp is not the sandbox's: what is read or run there is the host's.
func canary(t *testing.T) string {
	dir, err := os.MkdirTemp("/var/tmp", "sandboxd-canary-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	file := filepath.Join(dir, "canary")
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatalf("needs a static busybox: %v", err)
	}
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(file, []byte(hostSecret), 0o644), os.WriteFile(filepath.Join(dir, "echo"), busybox, 0o755)); err != nil {
		t.Fatal(err)
	}
	return file
}

// namesOf are names of directories that lead to descriptor n of whoever
// resolves them, some of them through planted links.
func namesOf(n int) []string {
	return []string{
		fmt.Sprintf("/proc/self/fd/%d", n), fmt.Sprintf("/proc/1/fd/%d", n), fmt.Sprintf("/proc/thread-self/fd/%d", n), fmt.Sprintf("/dev/fd/%d", n),
		fmt.Sprintf("/tmp/links/d%d", n), fmt.Sprintf("/tmp/links/n%d", n), fmt.Sprintf("/tmp/links/u%d/../../..", n),
	}
}

// plant makes the links inside, also through one another.
const plant = `mkdir -p /tmp/links && chmod 755 /tmp/links && cd /tmp/links && i=0; while [ $i -lt 256 ]; do
ln -sfn /proc/self/fd/$i d$i; ln -sfn fds/$i n$i; ln -sfn ../../proc/thread-self/fd/$i u$i; i=$((i+1)); done; ln -sfn /dev/fd fds`

// numbers are the descriptors tried: PID 1 of an idle sandbox has fewer than 20.
func numbers() []int {
	var all []int
	for n := range harness.Soak(20, 256) {
		all = append(all, n)
	}
	return all
}

// workDirWay runs the climbing program in a directory by one way in, and returns
// what it said. A directory that is refused is no error.
type workDirWay struct {
	name string
	run  func(ctx context.Context, dir string) (string, error)
	// dear ones try a few names alone when cut down.
	dear bool
	// silent ones do not say where they are.
	silent bool
}

func TestWorkDirs(t *testing.T) {
	d := harness.Install(t, "")
	file := canary(t)
	t.Run("control", func(t *testing.T) {
		if out, err := exec.CommandContext(t.Context(), filepath.Join(filepath.Dir(file), "echo"), hostSecret).Output(); err != nil || !strings.Contains(string(out), hostSecret) {
			t.Errorf("the host's program does not run: %v %s", err, out)
		}
		// The same program in a directory that is really outside.
		for _, dir := range []string{"/", harness.CgroupRoot(), "/proc/self/fd/3"} {
			argv := climbing(file)
			cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
			cgroup, err := os.Open(harness.CgroupRoot())
			if err != nil {
				t.Fatal(err)
			}
			defer cgroup.Close()
			cmd.ExtraFiles = []*os.File{cgroup}
			if cmd.Dir = dir; dir == "/proc/self/fd/3" {
				cmd.Dir = "" // entered by the shell, where the descriptor is
				cmd.Args[2] = "cd " + dir + " && " + cmd.Args[2]
			}
			if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), hostSecret) {
				t.Errorf("in %s the program does not find the canary: %v %s", dir, err, out)
			}
		}
	})
	for _, who := range []struct {
		name, user string
		caps       sandbox.Capabilities
	}{{"root", "", ""}, {"uid 1000", "1000", ""}, {"no capabilities", "", sandbox.CapabilitiesNone}} {
		t.Run(who.name, func(t *testing.T) {
			sb := d.New(t, sandbox.Spec{Image: "host", Capabilities: who.caps})
			ref := string(sb.ID)
			d.Sh(t, ref, plant)
			d.Sh(t, ref, "sleep 10000 >/dev/null 2>&1 & mkdir -p /tmp/fine") // so that PID 1 holds a process's descriptors
			run := func(spec sandbox.ProcessSpec) func(ctx context.Context, dir string) (string, error) {
				return func(ctx context.Context, dir string) (string, error) {
					spec.WorkDir, spec.User = dir, who.user
					r, err := d.Try(ctx, ref, spec)
					return r.Stdout + r.Stderr, err
				}
			}
			tryAll(t, workDirWay{name: "exec", run: run(sandbox.ProcessSpec{Argv: climbing(file)})})
			tryAll(t, workDirWay{name: "terminal", dear: true, run: run(sandbox.ProcessSpec{Argv: climbing(file), TTY: &sandbox.WindowSize{Cols: 80, Rows: 24}})})
			outside := strings.Repeat("/..", 12) + filepath.Dir(file) + "/echo"
			tryAll(t, workDirWay{name: "program", dear: true, silent: true, run: func(ctx context.Context, dir string) (string, error) {
				r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: []string{dir + outside, hostSecret}, User: who.user})
				return r.Stdout, err
			}})
			tryAll(t, workDirWay{name: "interpreter", dear: true, silent: true, run: func(ctx context.Context, dir string) (string, error) {
				script := "/tmp/s" + strings.ReplaceAll(dir, "/", "-")
				d.Sh(t, ref, "printf '#!"+dir+outside+" "+hostSecret+"\n' > "+script+" && chmod 755 "+script)
				r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: []string{script}, User: who.user})
				return r.Stdout, err
			}})
			tryAll(t, workDirWay{name: "sudo", dear: true, run: func(ctx context.Context, dir string) (string, error) {
				r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: append([]string{"python3", "-c", sudoClient, dir}, climbing(file)...)})
				return r.Stdout, err
			}})
			tryAll(t, workDirWay{name: "files", dear: true, silent: true, run: func(ctx context.Context, dir string) (string, error) {
				var out strings.Builder
				_, body, err := d.Files(ref).Read(ctx, who.user, dir+strings.Repeat("/..", 12)+file, 0, -1)
				if err == nil {
					_, err = io.Copy(&out, body)
					body.Close()
				}
				return out.String(), err
			}})
		})
	}
	t.Run("image", func(t *testing.T) { imagesThatPoint(t, d, file) })
	t.Run("spec", func(t *testing.T) {
		tryAll(t, workDirWay{name: "spec", dear: true, run: func(ctx context.Context, dir string) (string, error) {
			sb := d.New(t, sandbox.Spec{Image: "host", WorkDir: dir})
			defer d.Remove(ctx, string(sb.ID))
			r, err := d.Try(ctx, string(sb.ID), sandbox.ProcessSpec{Argv: climbing(file)})
			return r.Stdout, err
		}})
	})
	t.Run("cli", func(t *testing.T) {
		sb := d.New(t, sandbox.Spec{Image: "host"})
		d.Sh(t, string(sb.ID), plant)
		tryAll(t, workDirWay{name: "cli", dear: true, run: func(_ context.Context, dir string) (string, error) {
			argv := append([]string{"exec", "-w", dir, string(sb.ID), "--"}, climbing(file)...)
			out, errs, code := d.CLI(t, nil, "", argv...)
			if code != 0 {
				return out, errors.New(errs)
			}
			return out, nil
		}})
	})
	t.Run("mcp", func(t *testing.T) {
		sb := d.New(t, sandbox.Spec{Image: "host"})
		tryAll(t, workDirWay{name: "tool", dear: true, run: func(ctx context.Context, dir string) (string, error) {
			var in strings.Builder
			for _, m := range []any{
				map[string]any{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": map[string]any{
					"protocolVersion": "2025-06-18", "capabilities": map[string]any{}, "clientInfo": map[string]any{"name": "probe", "version": "1"},
				}},
				map[string]any{"jsonrpc": "2.0", "method": "notifications/initialized"},
				map[string]any{"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": map[string]any{
					"name": "exec", "arguments": map[string]any{"sandbox": sb.ID, "argv": climbing(file), "workdir": dir},
				}},
			} {
				if err := json.NewEncoder(&in).Encode(m); err != nil {
					return "", err
				}
			}
			cmd := exec.CommandContext(ctx, harness.Program(t, "sandbox"), "mcp")
			cmd.Env = append(os.Environ(), "SANDBOX_HOST="+d.Host())
			stdin, err := cmd.StdinPipe() // open until the answer is there
			if err != nil {
				return "", err
			}
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				return "", err
			}
			if err := cmd.Start(); err != nil {
				return "", err
			}
			_, _ = io.WriteString(stdin, in.String())
			said := ""
			for lines := bufio.NewScanner(stdout); !strings.Contains(said, `"id":2`) && lines.Scan(); {
				said = lines.Text()
			}
			stdin.Close()
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return said, nil
		}})
	})
	t.Run("agent", func(t *testing.T) { agentsThatPoint(t, d, file) })
}

// sudoClient asks PID 1 over its abstract socket, as anybody inside may:
// arguments are the directory and the command.
const sudoClient = `import array,json,os,socket,sys
s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.connect("\0sandbox-sudo")
s.sendmsg([json.dumps({"argv":sys.argv[2:],"env":[],"cwd":sys.argv[1],"user":""}).encode()],[(socket.SOL_SOCKET,socket.SCM_RIGHTS,array.array("i",[0,1,2]))])
print(s.recv(65536).decode())`

// tryAll tries every name and wants the canary by none; a plain directory must
// work, or the way itself does not.
func tryAll(t *testing.T, way workDirWay) {
	t.Helper()
	t.Run(way.name, func(t *testing.T) {
		var names []string
		for _, n := range numbers() {
			switch {
			case !way.dear || harness.Soak(1, 2) == 2:
				names = append(names, namesOf(n)...)
			case n > 6 && n < 17: // where a PID 1 has its directories
				names = append(names, namesOf(n)[0])
			}
		}
		if out, err := way.run(t.Context(), "/tmp"); !way.silent && (err != nil || !strings.Contains(out, "/tmp")) {
			t.Errorf("control: in /tmp it says %q, %v", out, err)
		}
		var mu sync.Mutex
		var wg sync.WaitGroup
		refused, slots := 0, make(chan struct{}, 4)
		for _, dir := range names {
			wg.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				out, err := way.run(ctx, dir)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					refused++
				}
				if strings.Contains(out, hostSecret) {
					t.Errorf("%s: in %s the host's file was read", way.name, dir)
				}
			})
		}
		wg.Wait()
		t.Logf("%d names, %d refused", len(names), refused)
	})
}

// imagesThatPoint are images whose configuration or passwd names a descriptor.
func imagesThatPoint(t *testing.T, d *harness.Daemon, file string) {
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatalf("needs a static busybox: %v", err)
	}
	run := func(kind, dir string) (string, error) {
		home := "/"
		if kind == "passwd" {
			home = dir
		}
		var archive bytes.Buffer
		w := tar.NewWriter(&archive)
		put := func(h tar.Header, data []byte) {
			h.Size = int64(len(data))
			if err := w.WriteHeader(&h); err != nil {
				t.Error(err)
			}
			_, _ = w.Write(data)
		}
		put(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, busybox)
		for _, applet := range []string{"sh", "cat", "pwd"} {
			put(tar.Header{Name: "bin/" + applet, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil)
		}
		put(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:*:0:0:root:"+home+":/bin/sh\n"))
		put(tar.Header{Name: "home", Typeflag: tar.TypeSymlink, Linkname: dir, Mode: 0o777}, nil)
		if err := w.Close(); err != nil {
			return "", err
		}
		name := "pointing-" + kind
		if _, err := d.ImportImage(t.Context(), name, &archive); err != nil {
			return "", err
		}
		spec := sandbox.Spec{Image: name}
		if kind == "link" {
			spec.WorkDir = "/home"
		}
		sb := d.New(t, spec)
		defer d.Remove(t.Context(), string(sb.ID))
		r, err := d.Try(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: climbing(file)})
		return r.Stdout, err
	}
	for _, kind := range []string{"passwd", "link"} {
		for n := range harness.Soak(12, 256) {
			if harness.Soak(1, 2) == 1 && n < 6 {
				continue
			}
			dir := fmt.Sprintf("/proc/self/fd/%d", n)
			if out, err := run(kind, dir); strings.Contains(out, hostSecret) {
				t.Errorf("%s: an image that names %s reads the host's file (%v)", kind, dir, err)
			}
		}
		if out, err := run(kind, "/bin"); err != nil || !strings.Contains(out, "/bin") {
			t.Errorf("control: %s names a plain directory: %q %v", kind, out, err)
		}
	}
	t.Run("build", func(t *testing.T) {
		for n := range harness.Soak(14, 256) {
			if harness.Soak(1, 2) == 1 && n < 8 {
				continue
			}
			var out strings.Builder
			recipe := fmt.Sprintf("FROM pointing-link\nRUN true\nWORKDIR /proc/self/fd/%d\nRUN %s\n", n, climbing(file)[2])
			_, err := d.Build(t.Context(), sandbox.BuildRequest{Dockerfile: recipe, NoCache: true}, nil, func(e sandbox.BuildEvent) error {
				out.Write(e.Data)
				return nil
			})
			if strings.Contains(out.String(), hostSecret) {
				t.Errorf("build: WORKDIR /proc/self/fd/%d reads the host's file (%v)", n, err)
			}
		}
	})
}

// agentsThatPoint are agents of the lab, and their health checks, which run in
// the same directory.
func agentsThatPoint(t *testing.T, d *harness.Daemon, file string) {
	p, err := d.CreateProject(t.Context(), project.Request{Name: "pointing"})
	if err != nil {
		t.Fatal(err)
	}
	script := climbing(file)[2]
	// run returns what an agent said within a moment, and how it fared.
	run := func(dir string, limit time.Duration) string {
		a, err := d.Deploy(t.Context(), string(p.ID), "worker", project.AgentSpec{
			Command: []string{"sh", "-c", script + "; exec sleep 1000"}, WorkDir: dir, Restart: project.RestartPolicy{When: "never"},
			Health: &project.HealthCheck{Command: []string{"sh", "-c", script + " | grep -q " + hostSecret + " && exit 9; exit 0"}, Interval: 200},
		})
		if err != nil {
			return err.Error()
		}
		defer d.RemoveAgent(t.Context(), a.ID)
		said := ""
		for deadline := time.Now().Add(limit); time.Now().Before(deadline) && !strings.Contains(said, "/"); <-time.After(50 * time.Millisecond) {
			v, err := d.Project(t.Context(), string(p.ID))
			if err != nil {
				continue
			}
			for _, av := range v.Agents {
				if av.ID != a.ID || av.Sandbox == "" {
					continue
				}
				if all, err := d.Processes(t.Context(), string(av.Sandbox)); err == nil && len(all) > 0 {
					if r, err := d.Output(t.Context(), string(av.Sandbox), all[0].ID, 0, false); err == nil {
						b, _ := io.ReadAll(r)
						r.Close()
						said += string(b)
					}
				}
			}
		}
		return said
	}
	began := time.Now()
	if said := run("/tmp", time.Minute); !strings.Contains(said, "/tmp") {
		t.Fatalf("control: an agent in /tmp says %q", said)
	}
	limit := max(2*time.Second, 3*time.Since(began)) // for one that says nothing
	for n := range harness.Soak(11, 64) {
		if harness.Soak(1, 2) == 1 && n < 8 {
			continue
		}
		if dir := fmt.Sprintf("/proc/self/fd/%d", n); strings.Contains(run(dir, limit), hostSecret) {
			t.Errorf("an agent in %s reads the host's file", dir)
		}
	}
}
