//go:build root

package escape

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The ways to a working directory that take more than a call.

// workDirsE2B is where the daemon serves clients of E2B.
const workDirsE2B = "127.0.0.1:39719"

// inSandbox makes a sandbox and runs the climbing program in it.
func inSandbox(ctx context.Context, d *harness.Daemon, file string, spec sandbox.Spec) (string, error) {
	sb, err := d.Create(ctx, spec, "")
	if err != nil {
		return "", err
	}
	defer d.Remove(ctx, string(sb.ID))
	r, err := d.Try(ctx, string(sb.ID), sandbox.ProcessSpec{Argv: climbing(file)})
	return r.Stdout, err
}

// imagesThatPoint are images whose configuration or passwd names a directory,
// imported as OCI archives.
func imagesThatPoint(t *testing.T, d *harness.Daemon, file string, spec sandbox.Spec) {
	var planted []entry
	homes := fmt.Sprintf("root:*:0:0:root:/:/bin/sh\nplain:*:%[1]s:%[1]s::/tmp:/bin/sh\n", id(spec.User))
	for n := range 256 {
		for i, name := range namesOf(n) {
			homes += fmt.Sprintf("h%d-%d:*:%[3]s:%[3]s::%[4]s:/bin/sh\n", n, i, id(spec.User), name)
		}
		planted = append(
			planted, link(fmt.Sprintf("tmp/links/d%d", n), fmt.Sprintf("/proc/self/fd/%d", n)),
			link(fmt.Sprintf("tmp/links/n%d", n), fmt.Sprintf("fds/%d", n)), link(fmt.Sprintf("tmp/links/u%d", n), fmt.Sprintf("../../proc/thread-self/fd/%d", n)),
		)
	}
	all := dir("all") // that is everybody's, for agentsThatPoint
	all.Mode = 0o777
	planted = append([]entry{dir("etc"), {Header: tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(homes))}, data: homes}, dir("tmp"), dir("tmp/links"), link("tmp/links/fds", "/dev/fd"), all, dir("all/fine"), link("all/way", "fine")}, planted...)
	var made atomic.Int64
	tryAll(t, workDirWay{name: "image", dear: true, slow: true, run: func(ctx context.Context, dir string) (string, error) {
		name := fmt.Sprintf("pointing-%d", made.Add(1))
		if err := ociImage(t, d, name, imageConfig{WorkingDir: dir, User: spec.User}, planted...); err != nil {
			return "", err
		}
		defer d.RemoveImage(ctx, name)
		return inSandbox(ctx, d, file, sandbox.Spec{Image: name, Capabilities: spec.Capabilities})
	}})
	if err := ociImage(t, d, "homes", imageConfig{}, planted...); err != nil {
		t.Fatal(err)
	}
	// One sandbox for all names: what its image or its spec says is a link that
	// is turned to each.
	if err := ociImage(t, d, "turned", imageConfig{WorkingDir: "/all/way", User: spec.User}, planted...); err != nil {
		t.Fatal(err)
	}
	for name, spec := range map[string]sandbox.Spec{
		"image, turned": {Image: "turned", Capabilities: spec.Capabilities},
		"spec, turned":  {Image: "homes", WorkDir: "/all/way", User: spec.User, Capabilities: spec.Capabilities},
	} {
		ref := string(d.New(t, spec).ID)
		var mu sync.Mutex
		tryAll(t, workDirWay{name: name, dear: true, run: func(ctx context.Context, dir string) (string, error) {
			mu.Lock()
			defer mu.Unlock()
			if r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: []string{"busybox", "ln", "-sfn", dir, "/all/way"}, WorkDir: "/"}); err != nil || r.Exit.Code != 0 {
				t.Errorf("turn the link to %s: %+v %v", dir, r, err)
			}
			r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: climbing(file)})
			return r.Stdout, err
		}})
	}
	sb := d.New(t, sandbox.Spec{Image: "homes", Capabilities: spec.Capabilities})
	tryAll(t, workDirWay{name: "passwd", run: func(ctx context.Context, dir string) (string, error) {
		user := "plain"
		for n := range 256 {
			if i := slices.Index(namesOf(n), dir); i >= 0 {
				user = fmt.Sprintf("h%d-%d", n, i)
			}
		}
		r, err := d.Try(ctx, string(sb.ID), sandbox.ProcessSpec{Argv: climbing(file), User: user})
		return r.Stdout, err
	}})
}

func id(user string) string {
	if user == "" {
		return "0"
	}
	return user
}

// byBuild has a Dockerfile name the directory.
func byBuild(d *harness.Daemon, file, user string) workDirWay {
	return workDirWay{name: "build", dear: true, slow: true, run: func(ctx context.Context, dir string) (string, error) {
		var out strings.Builder
		recipe := fmt.Sprintf("FROM homes\nUSER %s\nWORKDIR %s\nRUN %s\n", id(user), dir, climbing(file)[2])
		_, err := d.Build(ctx, sandbox.BuildRequest{Dockerfile: recipe, NoCache: true}, nil, func(e sandbox.BuildEvent) error {
			out.Write(e.Data)
			return nil
		})
		return out.String(), err
	}}
}

// byMCP asks as an agent's client does, all in one session.
func byMCP(t *testing.T, d *harness.Daemon, file string, spec sandbox.Spec) workDirWay {
	sb := d.New(t, spec)
	d.Sh(t, string(sb.ID), plant)
	cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandbox"), "mcp")
	cmd.Env = append(os.Environ(), "SANDBOX_HOST="+d.Host())
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() })
	lines := bufio.NewReader(stdout)
	var mu sync.Mutex
	asked := 0
	ask := func(method string, params any) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		asked++
		if err := json.NewEncoder(stdin).Encode(map[string]any{"jsonrpc": "2.0", "id": asked, "method": method, "params": params}); err != nil {
			return "", err
		}
		for {
			said, err := lines.ReadString('\n')
			if err != nil || strings.Contains(said, fmt.Sprintf(`"id":%d,`, asked)) || strings.Contains(said, fmt.Sprintf(`"id":%d}`, asked)) {
				return said, err
			}
		}
	}
	if _, err := ask("initialize", map[string]any{"protocolVersion": "2025-06-18", "capabilities": map[string]any{}, "clientInfo": map[string]any{"name": "probe", "version": "1"}}); err != nil {
		t.Fatal(err)
	}
	if err := json.NewEncoder(stdin).Encode(map[string]any{"jsonrpc": "2.0", "method": "notifications/initialized"}); err != nil {
		t.Fatal(err)
	}
	return workDirWay{name: "mcp", dear: true, run: func(_ context.Context, dir string) (string, error) {
		said, err := ask("tools/call", map[string]any{"name": "exec", "arguments": map[string]any{"sandbox": sb.ID, "argv": climbing(file), "workdir": dir}})
		if err == nil && strings.Contains(said, `"isError":true`) {
			err = errors.New(said)
		}
		return said, err
	}}
}

// byE2B starts processes as clients of E2B do, whose cwd it is.
func byE2B(t *testing.T, d *harness.Daemon, file, user string) workDirWay {
	said, errs, code := d.CLI(t, nil, "", "key", "create", "alice"+user, "--role", "developer")
	key := regexp.MustCompile(`e2b_[0-9a-f]{64}`).FindString(said)
	if code != 0 || key == "" {
		t.Fatalf("make a key: %d\n%s%s", code, said, errs)
	}
	if said, errs, code := d.CLI(t, nil, "", "owner", "set", "alice"+user, "--requests-per-minute", "100000"); code != 0 {
		t.Fatalf("widen the quota: %d\n%s%s", code, said, errs)
	}
	send := func(ctx context.Context, path, body string, head ...string) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+workDirsE2B+path, strings.NewReader(body))
		if err != nil {
			return nil, err
		}
		for i := 0; i < len(head); i += 2 {
			req.Header.Set(head[i], head[i+1])
		}
		return http.DefaultClient.Do(req)
	}
	resp, err := send(t.Context(), "/sandboxes", `{"templateID":"base"}`, "X-API-Key", key, "Content-Type", "application/json")
	if err != nil {
		t.Fatal(err)
	}
	var made struct{ SandboxID, EnvdAccessToken string }
	err = json.NewDecoder(resp.Body).Decode(&made)
	resp.Body.Close()
	if err != nil || made.SandboxID == "" {
		t.Fatalf("make a sandbox: %d %v", resp.StatusCode, err)
	}
	d.Sh(t, made.SandboxID, plant)
	if user == "" {
		user = "root"
	}
	return workDirWay{name: "e2b", dear: true, run: func(ctx context.Context, dir string) (string, error) {
		argv := climbing(file)
		body, err := json.Marshal(map[string]any{"process": map[string]any{"cmd": argv[0], "args": argv[1:], "cwd": dir}, "stdin": false})
		if err != nil {
			return "", err
		}
		frame := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
		resp, err := send(ctx, "/process.Process/Start", string(frame), "Content-Type", "application/connect+json", "Connect-Protocol-Version", "1",
			"E2b-Sandbox-Id", made.SandboxID, "E2b-Sandbox-Port", "49983", "X-Access-Token", made.EnvdAccessToken,
			"Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		all, err := io.ReadAll(resp.Body)
		out := ""
		for len(all) >= 5 {
			n := 5 + int(binary.BigEndian.Uint32(all[1:]))
			if n > len(all) {
				break
			}
			var m struct {
				Event struct {
					Data struct{ Stdout, Stderr []byte }
				}
				Error json.RawMessage
			}
			_ = json.Unmarshal(all[5:n], &m)
			out += string(m.Event.Data.Stdout) + string(m.Event.Data.Stderr)
			if m.Error != nil {
				err = errors.New(string(m.Error))
			}
			all = all[n:]
		}
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("%d %s", resp.StatusCode, bytes.TrimSpace(all))
		}
		return out, err
	}}
}

// agentsThatPoint are agents of the lab that begin in the directory, and health
// checks of one that makes its own a link to it.
func agentsThatPoint(t *testing.T, d *harness.Daemon, file, user string) {
	// A project may have 200 agents in its life: each has 100 here.
	var mu sync.Mutex
	var projects []string
	deployed := 0
	deploy := func(ctx context.Context, name string, spec project.AgentSpec) (project.Agent, string, error) {
		mu.Lock()
		if deployed++; deployed > 100*len(projects) {
			p, err := d.CreateProject(t.Context(), project.Request{Name: fmt.Sprintf("pointing%s-%d", user, deployed)})
			if err != nil {
				mu.Unlock()
				return project.Agent{}, "", err
			}
			projects = append(projects, string(p.ID))
		}
		in := projects[len(projects)-1]
		mu.Unlock()
		a, err := d.Deploy(ctx, in, name, spec)
		return a, in, err
	}
	// look returns an agent and what its process said so far.
	look := func(ctx context.Context, in string, id project.AgentID) (project.AgentView, string) {
		v, err := d.Project(ctx, in)
		if err != nil {
			return project.AgentView{}, ""
		}
		for _, a := range v.Agents {
			if a.ID != id {
				continue
			}
			all, _ := d.Processes(ctx, string(a.Sandbox))
			for _, proc := range all {
				if proc.Tag == "health" {
					continue
				}
				if r, err := d.Output(ctx, string(a.Sandbox), proc.ID, 0, false); err == nil {
					b, _ := io.ReadAll(r)
					r.Close()
					return a, string(b)
				}
			}
			return a, ""
		}
		return project.AgentView{}, ""
	}
	script := climbing(file)[2]
	tryAll(t, workDirWay{name: "agent", dear: true, slow: true, run: func(ctx context.Context, dir string) (string, error) {
		a, in, err := deploy(ctx, "worker", project.AgentSpec{
			Image: "homes", Command: []string{"sh", "-c", "(" + script + "); exec busybox sleep 1000"}, WorkDir: dir, User: user, Restart: project.RestartPolicy{When: project.RestartNever},
		})
		if err != nil {
			return "", err
		}
		defer d.RemoveAgent(context.WithoutCancel(ctx), a.ID)
		for ctx.Err() == nil {
			v, said := look(ctx, in, a.ID)
			if strings.HasPrefix(said, "/") || strings.Contains(said, "\n/") || strings.Contains(said, hostSecret) {
				return said, nil
			}
			if v.Status == project.AgentFailed || v.Status == project.AgentStopped {
				return said, errors.New(v.Detail)
			}
			<-time.After(20 * time.Millisecond)
		}
		return "", ctx.Err()
	}})
	t.Run("health", func(t *testing.T) {
		var list []string
		for _, n := range numbers() {
			list = append(list, namesOf(n)...)
		}
		if harness.Soak(1, 2) == 1 {
			list = list[7*7 : 13*7]
		}
		// It turns its directory, which the checks begin in, to each name for two
		// checks' time and then back, and waits for the verdict of a check there.
		turn := `cd /all; n=0; turn() { busybox rm -f way; busybox ln -s "$1" way; }; for name in ` + strings.Join(list, " ") + `; do
			turn "$name"; busybox sleep 0.03; turn fine; busybox rm -f verdict; until [ -e verdict ]; do busybox sleep 0.01; done; n=$((n+1)); done; echo "turned $n"; exec busybox sleep 1000`
		a, in, err := deploy(t.Context(), "checked", project.AgentSpec{
			Image: "homes", Command: []string{"sh", "-c", turn}, WorkDir: "/all/way", User: user, Restart: project.RestartPolicy{When: project.RestartNever},
			Health: &project.HealthCheck{Command: []string{"sh", "-c", `said=$(` + script + `); case $said in *` + hostSecret + `*) echo "$said" >>/all/outside;; */all/fine) echo "$said" >/all/verdict;; esac`}, Interval: 10, Retries: 100},
		})
		if err != nil {
			t.Fatal(err)
		}
		defer d.RemoveAgent(t.Context(), a.ID)
		var v project.AgentView
		said := ""
		for deadline := time.Now().Add(time.Duration(harness.Soak(1, 20)) * time.Minute); time.Now().Before(deadline) && !strings.Contains(said, "turned"); <-time.After(100 * time.Millisecond) {
			if v, said = look(t.Context(), in, a.ID); v.Status == project.AgentFailed {
				break
			}
		}
		if want := fmt.Sprintf("turned %d", len(list)); !strings.Contains(said, want) {
			t.Fatalf("control: checks do not run in a plain directory: %s %q, %q, want %s", v.Status, v.Detail, said, want)
		}
		if out := d.Sh(t, string(v.Sandbox), "cat /all/outside 2>/dev/null; true"); out != "" {
			t.Errorf("a health check read the host's file: %.300s", out)
		}
		t.Logf("%s names, each followed by a check that passed", strings.TrimSpace(said))
	})
}
