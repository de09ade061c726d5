//go:build root

package escape

import (
	"context"
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

// mayHold is more descriptors than a PID 1 with a few processes has.
const mayHold = 40

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
	// slow ones begin something anew for each name: at full length they try
	// every form of the descriptors that PID 1 may hold, and one form of each
	// other.
	slow bool
	// silent ones do not say where they are: control must bring back what they
	// reach.
	silent  bool
	control func(ctx context.Context) (string, error)
}

func TestWorkDirs(t *testing.T) {
	d := harness.Install(t, "e2b: {listen: \""+workDirsE2B+"\"}\n")
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
			d.Sh(t, ref, "sed -i '/^sudo:/d' /etc/group && echo sudo:x:27:user >>/etc/group")
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
			program := func(ctx context.Context, dir string) (string, error) {
				r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: []string{dir + outside, hostSecret}, User: who.user})
				return r.Stdout, err
			}
			interpreter := func(ctx context.Context, dir string) (string, error) {
				script := "/tmp/s" + strings.ReplaceAll(dir, "/", "-")
				d.Sh(t, ref, "printf '#!"+dir+outside+" "+hostSecret+"\n' > "+script+" && chmod 755 "+script)
				r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: []string{script}, User: who.user})
				return r.Stdout, err
			}
			// The controls find a program, and a file, of the sandbox's own at the
			// canary's path.
			inside := func(run func(context.Context, string) (string, error)) func(context.Context) (string, error) {
				return func(ctx context.Context) (string, error) {
					defer d.Sh(t, ref, "rm -r "+filepath.Dir(file))
					d.Sh(t, ref, "mkdir -p "+filepath.Dir(file)+" && cd "+filepath.Dir(file)+" && cp /bin/echo echo && printf "+hostSecret+" >canary && chmod 755 . echo canary")
					return run(ctx, "/tmp/fine")
				}
			}
			tryAll(t, workDirWay{name: "program", dear: true, silent: true, run: program, control: inside(program)})
			tryAll(t, workDirWay{name: "interpreter", dear: true, silent: true, run: interpreter, control: inside(interpreter)})
			tryAll(t, workDirWay{name: "sudo", dear: true, run: func(ctx context.Context, dir string) (string, error) {
				r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: append([]string{"python3", "-c", sudoClient, dir}, climbing(file)...), User: who.user})
				return r.Stdout, err
			}})
			files := func(ctx context.Context, dir string) (string, error) {
				var out strings.Builder
				_, body, err := d.Files(ref).Read(ctx, who.user, dir+strings.Repeat("/..", 12)+file, 0, -1)
				if err == nil {
					_, err = io.Copy(&out, body)
					body.Close()
				}
				return out.String(), err
			}
			tryAll(t, workDirWay{name: "files", dear: true, silent: true, run: files, control: inside(files)})
			tryAll(t, workDirWay{name: "spec", dear: true, slow: true, run: func(ctx context.Context, dir string) (string, error) {
				return inSandbox(ctx, d, file, sandbox.Spec{Image: "host", WorkDir: dir, User: who.user, Capabilities: who.caps})
			}})
			tryAll(t, byMCP(t, d, file, sandbox.Spec{Image: "host", User: who.user, Capabilities: who.caps}))
			imagesThatPoint(t, d, file, sandbox.Spec{User: who.user, Capabilities: who.caps})
			if who.caps == "" { // these know no profiles
				tryAll(t, byBuild(d, file, who.user))
				tryAll(t, byE2B(t, d, file, who.user))
				agentsThatPoint(t, d, file, who.user)
			}
		})
	}
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
			case harness.Soak(1, 2) == 2 && way.slow && n >= mayHold:
				names = append(names, namesOf(n)[n%len(namesOf(n))])
			case !way.dear || harness.Soak(1, 2) == 2:
				names = append(names, namesOf(n)...)
			case n > 6 && n < 17 && (!way.slow || n == 8 || n == 15): // where a PID 1 had its directories
				names = append(names, namesOf(n)[0])
			}
		}
		if way.silent {
			if out, err := way.control(t.Context()); err != nil || !strings.Contains(out, hostSecret) {
				t.Errorf("control: it says %q, %v", out, err)
			}
		} else if out, err := way.run(t.Context(), "/tmp"); err != nil || !strings.Contains(out, "/tmp") {
			t.Errorf("control: in /tmp it says %q, %v", out, err)
		}
		var mu sync.Mutex
		var wg sync.WaitGroup
		found, ends, slots := 0, map[string]int{}, make(chan struct{}, 4)
		for _, dir := range names {
			wg.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				out, err := way.run(ctx, dir)
				mu.Lock()
				defer mu.Unlock()
				switch code := codeOf(err); {
				case err == nil:
					ends["begun"]++
				case code != "":
					ends[code]++
				default:
					ends["refused"]++
				}
				if strings.Contains(out, hostSecret) {
					found++
					t.Errorf("%s: in %s the host's file was read", way.name, dir)
				}
			})
		}
		wg.Wait()
		t.Logf("%d names, %d outside: %v", len(names), found, ends)
	})
}
