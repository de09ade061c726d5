//go:build root

package integration

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestMCP lets a client of the protocol call every tool of a real daemon, as
// an agent's program would: over HTTP, and by 'sandbox mcp'.
func TestMCP(t *testing.T) {
	d := install(t, "")
	overSocket := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(d.host(), "unix://"))
	}}}
	command := exec.Command(program(t, "sandbox"), "mcp")
	command.Env = append(os.Environ(), "SANDBOX_HOST="+d.host())
	command.Stderr = d.Log
	for way, tr := range map[string]sdk.Transport{
		"http":  &sdk.StreamableClientTransport{Endpoint: "http://sandboxd/mcp", HTTPClient: overSocket, DisableStandaloneSSE: true},
		"stdio": &sdk.CommandTransport{Command: command},
	} {
		t.Run(way, func(t *testing.T) {
			s, err := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), tr, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			mcpTools(t, d, s, way)
			mcpCancel(t, d, s, way)
		})
	}
}

type toolArgs = map[string]any

// callTool returns the structured answer of a tool that must work.
func callTool(t *testing.T, s *sdk.ClientSession, name string, args toolArgs) map[string]any {
	t.Helper()
	r, err := s.CallTool(t.Context(), &sdk.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if r.IsError {
		b, _ := json.Marshal(r.Content)
		t.Fatalf("%s %v: %s", name, args, b)
	}
	var out map[string]any
	b, err := json.Marshal(r.StructuredContent)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return out
}

func mcpTools(t *testing.T, d *daemon, s *sdk.ClientSession, name string) {
	called := map[string]bool{}
	do := func(tool string, args toolArgs) map[string]any {
		t.Helper()
		called[tool] = true
		return callTool(t, s, tool, args)
	}
	sb := do("create_sandbox", toolArgs{"name": name, "memory_mib": 256, "labels": toolArgs{"way": name}})
	if list, _ := do("list_sandboxes", toolArgs{"labels": toolArgs{"way": name}})["sandboxes"].([]any); len(list) != 1 {
		t.Errorf("list: %v", list)
	}
	do("write_file", toolArgs{"sandbox": name, "path": "/srv/app/a.sh", "content": "echo $((6 * 7)); echo no >&2; exit 3\n", "mode": "755"})
	if out := do("exec", toolArgs{"sandbox": name, "command": "sh /srv/app/a.sh"}); out["stdout"] != "42\n" || out["stderr"] != "no\n" || out["exit_code"] != 3.0 {
		t.Errorf("exec: %v", out)
	}
	if out := do("read_file", toolArgs{"sandbox": name, "path": "/srv/app/a.sh"}); out["content"] != "echo $((6 * 7)); echo no >&2; exit 3\n" {
		t.Errorf("read: %v", out)
	}
	if out, _ := do("list_files", toolArgs{"sandbox": name, "path": "/srv/app"})["entries"].([]any); len(out) != 1 {
		t.Errorf("files: %v", out)
	}
	snap := do("snapshot", toolArgs{"sandbox": name, "name": "good-" + name})
	if out, _ := do("list_snapshots", toolArgs{"sandbox": name})["snapshots"].([]any); len(out) != 1 {
		t.Errorf("snapshots: %v", out)
	}
	callTool(t, s, "exec", toolArgs{"sandbox": name, "command": "rm -r /srv/app"})
	do("rollback", toolArgs{"sandbox": name, "snapshot": snap["id"]})
	d.sh(t, name, "test -x /srv/app/a.sh")
	if out, _ := do("fork", toolArgs{"from": snap["id"], "name": "fork-" + name})["forks"].([]any); len(out) != 1 || d.sh(t, "fork-"+name, "ls /srv/app") != "a.sh" {
		t.Errorf("fork: %v", out)
	}
	if out := do("stop_sandbox", toolArgs{"sandbox": name}); out["status"] != "stopped" {
		t.Errorf("stop: %v", out)
	}
	do("start_sandbox", toolArgs{"sandbox": name})
	if out := do("get_sandbox", toolArgs{"sandbox": name}); out["status"] != "running" || out["id"] != sb["id"] {
		t.Errorf("get: %v", out)
	}
	bg := callTool(t, s, "exec", toolArgs{"sandbox": name, "command": "sleep 0.2; echo late", "background": true})
	if out := do("read_output", toolArgs{"sandbox": name, "process": bg["process"], "wait_seconds": 30}); out["text"] != "late\n" || out["exit_code"] != 0.0 {
		t.Errorf("read_output: %v", out)
	}
	if out := do("run_code", toolArgs{"language": "bash", "code": "for i in {1..3}; do echo $i; done"}); out["stdout"] != "1\n2\n3\n" {
		t.Errorf("run_code: %v", out)
	}
	if out := do("cost", toolArgs{"by": "sandbox"}); out["total"] == nil {
		t.Errorf("cost: %v", out)
	}
	if r, err := s.ReadResource(t.Context(), &sdk.ReadResourceParams{URI: "sandbox://" + name + "/logs"}); err != nil || r.Contents[0].Text != "late\n" {
		t.Errorf("logs: %v, %v", r, err)
	}
	do("remove_sandbox", toolArgs{"sandbox": "fork-" + name})
	list, err := s.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tool := range list.Tools {
		if !called[tool.Name] {
			t.Errorf("%s was not called", tool.Name)
		}
	}
}

// mcpCancel gives a call up and wants its command to end; the control is that
// it ran before.
func mcpCancel(t *testing.T, d *daemon, s *sdk.ClientSession, name string) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := s.CallTool(ctx, &sdk.CallToolParams{Name: "exec", Arguments: toolArgs{"sandbox": name, "argv": []string{"sleep", "300"}, "timeout_seconds": 600}})
		done <- err
	}()
	state := func() (found, ended bool) {
		all, err := d.Processes(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if p.Argv[0] == "sleep" {
				return true, p.Exit != nil
			}
		}
		return false, false
	}
	testenv.Eventually(t, 30*time.Second, "the command starts", func() bool { found, ended := state(); return found && !ended })
	cancel()
	if err := <-done; err == nil {
		t.Error("the call that was given up succeeded")
	}
	testenv.Eventually(t, 30*time.Second, "the command of a call given up ends", func() bool { _, ended := state(); return ended })
	if sb, err := d.Sandbox(t.Context(), name); err != nil || sb.Status != sandbox.StatusRunning {
		t.Errorf("the sandbox: %v, %v", sb.Status, err)
	}
}
