//go:build root

package faults

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

const e2bListen = "127.0.0.1:3955"

// told is what one watcher of a command was told of its end.
type told struct {
	code   string // of the error; "exit N" where it says that the command ended
	reason sandbox.Reason
	text   string
}

func toldOf(r harness.Result, err error) told {
	if err == nil {
		return told{code: fmt.Sprint("exit ", r.Exit.Code), text: r.Exit.Signal}
	}
	return toldBy(err)
}

func toldBy(err error) told {
	var x *client.ExitError
	switch {
	case err == nil:
		return told{code: "exit 0"}
	case errors.As(err, &x):
		return told{code: fmt.Sprint("exit ", x.Code), text: x.Signal}
	}
	return told{sandbox.CodeOf(err), sandbox.ReasonOf(err), err.Error()}
}

// watched are the ways to watch a command of a sandbox. Each runs its own, but
// for those that follow what the first one started.
type watched struct {
	d     *harness.Daemon
	sb    sandbox.Sandbox
	key   string // of the E2B listener
	first sandbox.ProcessID
	run   sandbox.ProcessIO
	argv  []string
	http  *http.Client
}

func (w *watched) ref() string { return string(w.sb.ID) }

func (w *watched) ways() map[string]func(context.Context) told {
	return map[string]func(context.Context) told{
		"run":     func(context.Context) told { return toldOf(harness.Collect(w.run)) },
		"exec":    func(ctx context.Context) told { return w.exec(ctx, sandbox.ProcessSpec{Argv: w.argv}) },
		"exec -i": func(ctx context.Context) told { return w.exec(ctx, sandbox.ProcessSpec{Argv: w.argv, Stdin: true}) },
		"exec -t": func(ctx context.Context) told {
			return w.exec(ctx, sandbox.ProcessSpec{Argv: w.argv, TTY: &sandbox.WindowSize{Cols: 80, Rows: 24}})
		},
		"attach": w.attach,
		"handle": w.handle,
		"lines":  w.lines,
		"raw":    w.raw,
		"mcp":    w.mcp,
		"e2b": func(ctx context.Context) told {
			return w.e2b(ctx, "process.Process/Start", map[string]any{"process": map[string]any{"cmd": w.argv[0], "args": w.argv[1:]}})
		},
		"e2b files": func(ctx context.Context) told {
			return w.e2b(ctx, "filesystem.Filesystem/WatchDir", map[string]any{"path": "/tmp", "recursive": true})
		},
		"files":     w.files,
		"cli files": func(ctx context.Context) told { return w.cli(ctx, "files", "watch", w.ref(), "/root") },
		"js":        w.js,
		"cli exec": func(ctx context.Context) told {
			return w.cli(ctx, append([]string{"exec", w.ref(), "--"}, w.argv...)...)
		},
		"cli -t": func(ctx context.Context) told {
			return w.cli(ctx, append([]string{"exec", "-t", w.ref(), "--"}, w.argv...)...)
		},
		"cli logs":   func(ctx context.Context) told { return w.cli(ctx, "logs", "-f", w.ref(), string(w.first)) },
		"cli attach": func(ctx context.Context) told { return w.cli(ctx, "attach", w.ref(), string(w.first)) },
	}
}

// oneRequest are those that do not connect again.
var oneRequest = map[string]bool{"lines": true, "mcp": true, "e2b": true, "js": true, "files": true, "cli files": true, "e2b files": true}

// ofFiles are those that watch files: no command of theirs runs.
var ofFiles = map[string]bool{"files": true, "cli files": true, "e2b files": true}

// followers watch the process of run: they start none.
var followers = map[string]bool{"run": true, "attach": true, "lines": true, "raw": true, "cli logs": true, "cli attach": true}

func (w *watched) exec(ctx context.Context, spec sandbox.ProcessSpec) told {
	return toldOf(w.d.Try(ctx, w.ref(), spec))
}

func (w *watched) attach(ctx context.Context) told {
	p, err := w.d.Attach(ctx, w.ref(), w.first, -1)
	if err != nil {
		return toldBy(err)
	}
	defer p.Close()
	return toldOf(harness.Collect(p))
}

func (w *watched) handle(ctx context.Context) told {
	h, err := w.d.Connect(ctx, w.ref())
	if err == nil {
		err = h.Command(w.argv...).Run(ctx)
	}
	return toldBy(err)
}

func (w *watched) output(ctx context.Context, accept string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://d/v1/sandboxes/"+w.ref()+"/processes/"+string(w.first)+"/output?follow=true", http.NoBody)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	resp, err := w.http.Do(req)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

func (w *watched) lines(ctx context.Context) told {
	r, err := w.output(ctx, "application/x-ndjson")
	if err != nil {
		return toldBy(err)
	}
	defer r.Close()
	var last api.OutputLine
	for s := bufio.NewScanner(r); s.Scan(); {
		last = api.OutputLine{}
		if err := json.Unmarshal(s.Bytes(), &last); err != nil {
			return toldBy(err)
		}
	}
	switch {
	case last.Exit != nil:
		return told{code: fmt.Sprint("exit ", last.Exit.Code), text: last.Exit.Signal}
	case last.Problem != nil:
		return toldBy(last.Problem.Err())
	}
	return told{code: "nothing"}
}

// raw has no place for a reason: all it can do is to break off.
func (w *watched) raw(ctx context.Context) told {
	r, err := w.output(ctx, "")
	if err != nil {
		return toldBy(err)
	}
	defer r.Close()
	if _, err = io.Copy(io.Discard, r); err != nil {
		return told{code: "broken"}
	}
	return told{code: "whole"}
}

func (w *watched) mcp(ctx context.Context) told {
	s, err := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, nil).Connect(ctx, &sdk.StreamableClientTransport{Endpoint: "http://sandboxd/mcp", HTTPClient: w.http, DisableStandaloneSSE: true}, nil)
	if err != nil {
		return toldBy(err)
	}
	defer s.Close()
	r, err := s.CallTool(ctx, &sdk.CallToolParams{Name: "exec", Arguments: map[string]any{"sandbox": w.ref(), "argv": w.argv, "timeout_seconds": 600}})
	if err != nil {
		return toldBy(err)
	}
	b, _ := json.Marshal(r.Content)
	if !r.IsError {
		return told{code: "no error", text: string(b)}
	}
	return inText(string(b))
}

// inText finds the code and the reason of an error that is only words.
func inText(text string) told {
	t := told{text: text}
	for code, words := range map[string]string{sandbox.CodeEnded: "has ended (", sandbox.CodeStopped: "is stopped", sandbox.CodeReset: "was put back on other files"} {
		if strings.Contains(text, words) {
			t.code = code
		}
	}
	if m := regexp.MustCompile(`(?:has ended|is stopped) \((\w+)`).FindStringSubmatch(text); m != nil {
		t.reason = sandbox.Reason(m[1])
	}
	return t
}

func (w *watched) files(ctx context.Context) told {
	f, err := w.d.Files(w.ref()).Watch(ctx, "", "/root", false)
	if err != nil {
		return toldBy(err)
	}
	defer f.Close()
	if _, err = f.Next(); err == nil {
		return told{code: "a change"}
	}
	return toldBy(err)
}

func (w *watched) e2b(ctx context.Context, method string, message map[string]any) told {
	get, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+e2bListen+"/sandboxes/"+w.ref(), http.NoBody)
	get.Header.Set("X-API-Key", w.key)
	resp, err := http.DefaultClient.Do(get)
	if err != nil {
		return toldBy(err)
	}
	var box struct {
		Token string `json:"envdAccessToken"`
	}
	_ = json.NewDecoder(resp.Body).Decode(&box)
	resp.Body.Close()
	body, _ := json.Marshal(message)
	frame := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+e2bListen+"/"+method, bytes.NewReader(frame))
	for k, v := range map[string]string{"E2b-Sandbox-Id": w.ref(), "E2b-Sandbox-Port": "49983", "X-Access-Token": box.Token, "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"} {
		req.Header.Set(k, v)
	}
	if resp, err = http.DefaultClient.Do(req); err != nil {
		return toldBy(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return told{code: "broken", text: err.Error()}
	}
	return inText(string(b[max(0, len(b)-2000):]))
}

const jsWatch = `import { Sandboxd } from "./src/index.js";
const c = new Sandboxd({ retries: 0 });
try { const r = await c.exec(process.argv[2], process.argv.slice(3)); console.log(JSON.stringify({ exit: r.exit })); }
catch (e) { console.log(JSON.stringify({ code: e.code, reason: e.reason, text: e.message })); }
await c.close();`

func (w *watched) js(ctx context.Context) told {
	dir, err := filepath.Abs("../../sdk/js")
	if err != nil {
		return toldBy(err)
	}
	cmd := exec.CommandContext(ctx, "node", append([]string{"--input-type=module", "-", w.ref()}, w.argv...)...)
	cmd.Dir, cmd.Env, cmd.Stdin = dir, append(os.Environ(), "SANDBOX_HOST="+w.d.Host()), strings.NewReader(jsWatch)
	out, err := cmd.Output()
	if err != nil {
		return toldBy(err)
	}
	var m struct {
		Code, Text string
		Reason     sandbox.Reason
	}
	if err := json.Unmarshal(out, &m); err != nil {
		return toldBy(err)
	}
	return told{m.Code, m.Reason, string(out)}
}

// cli wants status 125 and one line.
func (w *watched) cli(ctx context.Context, args ...string) told {
	path, err := filepath.Abs(filepath.Join(os.Getenv("SANDBOXD_BIN"), "sandbox"))
	if err != nil {
		return toldBy(err)
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), "SANDBOX_HOST="+w.d.Host())
	var errs strings.Builder
	cmd.Stderr = &errs
	err = cmd.Run()
	said := strings.TrimSpace(errs.String())
	if cmd.ProcessState == nil {
		return toldBy(err)
	}
	if code := cmd.ProcessState.ExitCode(); code != 125 || strings.Count(said, "\n") > 0 {
		return told{code: fmt.Sprint("exit ", code), text: said}
	}
	return inText(said)
}

// anEnd is one way for a sandbox's commands to be ended by it.
type anEnd struct {
	name   string
	code   string
	reason sandbox.Reason
	main   sandbox.ProcessSpec // of run
	spec   sandbox.Spec
	do     func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox)
	broken bool // the daemon goes first
}

func theEnds() []anEnd {
	sleep := sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}}
	deadline := func(what sandbox.DeadlineAction) func(*testing.T, *harness.Daemon, sandbox.Sandbox) {
		return func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) {
			must(t)(d.SetDeadline(t.Context(), string(sb.ID), sandbox.DeadlineRequest{TTLSeconds: new(int64(1)), OnDeadline: what}))
		}
	}
	stop := func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) { must(t)(d.Stop(t.Context(), string(sb.ID))) }
	until := func(script string) sandbox.ProcessSpec {
		return sandbox.ProcessSpec{Argv: []string{"sh", "-c", script}, Main: true}
	}
	late := until("exec sleep 1000")
	late.TimeoutSeconds = 15 // every watcher begins before, on a busy machine too
	return []anEnd{
		{"removed", sandbox.CodeEnded, sandbox.ReasonCancelled, sleep, sandbox.Spec{}, func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) {
			must(t)(d.Remove(t.Context(), string(sb.ID)))
		}, false},
		{"deadline", sandbox.CodeEnded, sandbox.ReasonTTL, sleep, sandbox.Spec{}, deadline("end"), false},
		{"deadline that stops", sandbox.CodeStopped, sandbox.ReasonTTL, sleep, sandbox.Spec{}, deadline("stop"), false},
		{"stopped", sandbox.CodeStopped, "", sleep, sandbox.Spec{}, stop, false},
		{"stopped, deaf to TERM", sandbox.CodeStopped, "", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "trap '' TERM; while :; do sleep 1; done"}}, sandbox.Spec{}, stop, false},
		{"reset", sandbox.CodeReset, "", sleep, sandbox.Spec{}, func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) {
			must(t)(d.Reset(t.Context(), string(sb.ID)))
		}, false},
		{"rolled back", sandbox.CodeReset, "", sleep, sandbox.Spec{}, func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) {
			s, err := d.Snapshot(t.Context(), string(sb.ID), sandbox.SnapshotRequest{})
			if err != nil {
				t.Fatal(err)
			}
			must(t)(d.Rollback(t.Context(), string(sb.ID), string(s.ID)))
		}, false},
		{"budget", sandbox.CodeStopped, sandbox.ReasonBudget, sleep, sandbox.Spec{}, func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) {
			must(t)(d.SetBudget(t.Context(), cost.BudgetRequest{Sandbox: string(sb.ID), Meter: "wall", Limit: "1s"}))
		}, false},
		{"PID 1 killed", sandbox.CodeEnded, sandbox.ReasonCrashed, sleep, sandbox.Spec{}, func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) { killInit(t, d, sb) }, false},
		{"main command ended", sandbox.CodeEnded, sandbox.ReasonExited, until("until [ -e /tmp/go ]; do sleep 0.1; done"), sandbox.Spec{}, func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) {
			d.Sh(t, string(sb.ID), "touch /tmp/go")
		}, false},
		{"main command too late", sandbox.CodeEnded, sandbox.ReasonTimeout, late, sandbox.Spec{}, func(*testing.T, *harness.Daemon, sandbox.Sandbox) {}, false},
		{"PID 1 killed while no daemon ran", sandbox.CodeEnded, sandbox.ReasonCrashed, sleep, sandbox.Spec{}, func(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) {
			pid := initPID(t, d, sb)
			d.Crash()
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			d.Up()
		}, true},
		{"daemon told to stop all", sandbox.CodeStopped, "", sleep, sandbox.Spec{}, func(_ *testing.T, d *harness.Daemon, _ sandbox.Sandbox) { d.Shut() }, false},
	}
}

func must(t *testing.T) func(any, error) {
	return func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// initPID finds PID 1 of the only sandbox that runs.
func initPID(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) int {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(harness.CgroupRoot(), d.Parent, "*", string(sb.ID), "init", "cgroup.procs"))
	more, _ := filepath.Glob(filepath.Join(harness.CgroupRoot(), d.Parent, string(sb.ID), "init", "cgroup.procs"))
	for _, f := range append(all, more...) {
		b, rerr := os.ReadFile(f)
		if pid, perr := strconv.Atoi(strings.TrimSpace(string(b))); rerr == nil && perr == nil {
			return pid
		}
	}
	t.Fatalf("PID 1 of %s is not found: %v", sb.ID, err)
	return 0
}

func killInit(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox) {
	if err := syscall.Kill(initPID(t, d, sb), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// TestEnds: whoever watches a command is told that its sandbox ended first, and
// why: the same by every way to watch. The control is the same command ending
// by itself.
func TestEnds(t *testing.T) {
	d := harness.Install(t, "usage: {interval: 200ms}\ne2b: {listen: \""+e2bListen+"\"}\n", "--stop-sandboxes")
	out, errs, code := d.CLI(t, nil, "", "key", "create", "watcher", "--role", "admin")
	key := regexp.MustCompile(`e2b_[0-9a-f]{64}`).FindString(out)
	if code != 0 || key == "" {
		t.Fatalf("make a key: %d\n%s%s", code, out, errs)
	}
	overSocket := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(d.Host(), "unix://"))
	}}}
	for _, e := range theEnds() {
		t.Run(e.name, func(t *testing.T) {
			if !d.Alive() {
				d.Up()
			}
			w := &watched{d: d, key: key, http: overSocket, argv: e.main.Argv}
			if e.main.Main {
				w.argv = []string{"sleep", "1000"}
			}
			var err error
			if w.sb, w.run, err = d.Run(t.Context(), api.RunRequest{Sandbox: e.spec, Process: api.ExecRequest{ProcessSpec: e.main}}, ""); err != nil {
				t.Fatal(err)
			}
			w.first = w.run.Process().ID
			all := w.watch(t)
			e.do(t, d, w.sb)
			for name, got := range all() {
				judge(t, e, name, got)
			}
			if !d.Alive() {
				d.Up()
			}
			records, err := d.Processes(t.Context(), w.ref())
			for _, p := range records {
				if p.Exit == nil {
					t.Errorf("process %s is said to run on", p.ID)
				}
			}
			if err != nil || len(records) == 0 && e.reason != sandbox.ReasonCrashed { // PID 1 takes its records along
				t.Errorf("records of its processes: %d, %v", len(records), err)
			}
		})
	}
}

// watch begins to watch in every way, and returns what they were told once all
// were.
func (w *watched) watch(t *testing.T) func() map[string]told {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	ways := w.ways()
	if _, err := exec.LookPath("node"); err != nil {
		delete(ways, "js")
	} else if _, err := os.Stat("../../sdk/js/node_modules/undici"); err != nil {
		delete(ways, "js")
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	got := map[string]told{}
	starts := 1
	for name, way := range ways {
		if !followers[name] && !ofFiles[name] {
			starts++
		}
		wg.Go(func() {
			r := way(ctx)
			mu.Lock()
			defer mu.Unlock()
			got[name] = r
		})
	}
	testenv.Eventually(t, time.Minute, "every watcher's command runs", func() bool {
		all, err := w.d.Processes(t.Context(), w.ref())
		if len(all) < starts {
			return false
		}
		<-time.After(2 * time.Second) // followers have begun to follow
		return err == nil
	})
	return func() map[string]told {
		defer cancel()
		wg.Wait()
		return got
	}
}

func judge(t *testing.T, e anEnd, name string, got told) {
	t.Helper()
	ok := got.code == e.code && got.reason == e.reason
	switch {
	case name == "raw":
		ok = got.code == "broken"
	case e.broken && oneRequest[name]: // nobody is left who could say more
		ok = got.code == "broken" || got.code == "nothing" || got.code == "internal" || got.code == "stream_broken" || strings.Contains(got.text, "(stream_broken)")
	case !followers[name]:
	case e.reason == sandbox.ReasonExited: // they watch the command that ends the sandbox
		ok = got.code == "exit 0"
	case e.reason == sandbox.ReasonTimeout:
		ok = got.code == "exit 143" || name == "cli logs" && got.code == "exit 0"
	}
	if name == "raw" && (e.reason == sandbox.ReasonExited || e.reason == sandbox.ReasonTimeout) {
		ok = got.code == "whole"
	}
	if !ok {
		t.Errorf("%s: told %q, reason %q (%s): want %s, %q", name, got.code, got.reason, got.text, e.code, e.reason)
	}
}

// TestKeyOfTheEnded: a create repeated with its key names the sandbox while it
// lives (the control), and is an error once that has ended.
func TestKeyOfTheEnded(t *testing.T) {
	d := harness.Install(t, "")
	first, err := d.Create(t.Context(), sandbox.Spec{}, "k1")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := d.Create(t.Context(), sandbox.Spec{}, "k1"); err != nil || again.ID != first.ID {
		t.Errorf("repeated: %s, %v; want %s", again.ID, err, first.ID)
	}
	must(t)(d.Remove(t.Context(), string(first.ID)))
	_, err = d.Create(t.Context(), sandbox.Spec{}, "k1")
	if sandbox.CodeOf(err) != sandbox.CodeKeyGone || sandbox.ReasonOf(err) != sandbox.ReasonCancelled || !strings.Contains(err.Error(), string(first.ID)) {
		t.Errorf("repeated after its end: %v", err)
	}
}

// TestProcessesOfPaused: a pause hides no process.
func TestProcessesOfPaused(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{})
	p, err := d.StartProcess(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	must(t)(d.Pause(t.Context(), string(sb.ID)))
	all, err := d.Processes(t.Context(), string(sb.ID))
	if err != nil || len(all) != 1 || all[0].ID != p.ID || all[0].Exit != nil {
		t.Errorf("processes of a paused sandbox: %+v, %v", all, err)
	}
}

// TestEndOfIdle: a sandbox that ended for idleness has no command running, and
// says so to whoever comes to it or to what it ran. The control is the same
// before.
func TestEndOfIdle(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{IdleTimeoutSeconds: 15})
	w := &watched{d: d, sb: sb, argv: []string{"true"}, first: "p1"}
	all := []string{"exec", "exec -i", "exec -t", "attach", "handle", "cli exec", "cli -t", "cli attach"}
	for _, name := range all {
		if got := w.ways()[name](t.Context()); got.code != "exit 0" {
			t.Errorf("%s of one that runs: told %q (%s)", name, got.code, got.text)
		}
	}
	testenv.Eventually(t, time.Minute, "it ends", func() bool {
		now, err := d.Sandbox(t.Context(), w.ref())
		return err == nil && now.Status == sandbox.StatusCompleted
	})
	e := anEnd{code: sandbox.CodeEnded, reason: sandbox.ReasonIdle}
	for _, name := range all {
		judge(t, e, name, w.ways()[name](t.Context()))
	}
}

// TestEndOfAnOwner: who watches a command with the key of an owner who is
// disabled is told that, and not of an end: the command runs on. The control is
// root, who goes on to watch.
func TestEndOfAnOwner(t *testing.T) {
	d := harness.Install(t, "")
	out, errs, code := d.CLI(t, nil, "", "key", "create", "watcher", "--role", "developer")
	key := regexp.MustCompile(`e2b_[0-9a-f]{64}`).FindString(out)
	if code != 0 || key == "" {
		t.Fatalf("make a key: %d\n%s%s", code, out, errs)
	}
	mine, err := client.New(d.Host(), client.WithKey(key))
	if err != nil {
		t.Fatal(err)
	}
	sb, err := mine.Create(t.Context(), sandbox.Spec{}, "")
	if err != nil {
		t.Fatal(err)
	}
	control := &watched{d: d, sb: sb, argv: []string{"sh", "-c", "until [ -e /tmp/go ]; do sleep 0.1; done"}}
	type answer struct {
		name string
		told
	}
	all := make(chan answer)
	for _, stdin := range []bool{false, true} {
		// Begun before its owner goes: a connection that breaks before it was
		// told of the process is another error.
		p, err := mine.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: control.argv, Stdin: stdin})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		go func() { all <- answer{fmt.Sprint("stdin ", stdin), toldOf(harness.Collect(p))} }()
	}
	go func() {
		_, errs, code := d.CLI(t, []string{"SANDBOX_KEY=" + key}, "", append([]string{"exec", string(sb.ID), "--"}, control.argv...)...)
		all <- answer{"cli", told{code: fmt.Sprint("exit ", code), text: errs}}
	}()
	root := make(chan told, 1)
	go func() { root <- control.exec(t.Context(), sandbox.ProcessSpec{Argv: control.argv}) }()
	testenv.Eventually(t, time.Minute, "all run", func() bool {
		procs, err := d.Processes(t.Context(), string(sb.ID))
		return err == nil && len(procs) == 4
	})
	if _, errs, code := d.CLI(t, nil, "", "owner", "set", "watcher", "--disable"); code != 0 {
		t.Fatal(errs)
	}
	for range 3 {
		if a := <-all; a.code != "owner_disabled" && (a.code != "exit 125" || !strings.Contains(a.text, "(owner_disabled)")) {
			t.Errorf("%s: told %q (%s)", a.name, a.code, a.text)
		}
	}
	d.Sh(t, string(sb.ID), "touch /tmp/go")
	if got := <-root; got.code != "exit 0" {
		t.Errorf("root: told %q (%s)", got.code, got.text)
	}
}
