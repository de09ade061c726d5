package mcp_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/api/mcp"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// remote is a daemon reached by the Go client.
type remote struct{ *client.Client }

func (r remote) Files(_ context.Context, ref string) (sandbox.Files, error) {
	return r.Client.Files(ref), nil
}

// transports connects a client of the protocol in both ways to a daemon of
// its own, and calls f.
func transports(t *testing.T, f func(t *testing.T, m *servertest.Memory, s *sdk.ClientSession)) {
	for _, way := range []string{"http", "stdio"} {
		t.Run(way, func(t *testing.T) {
			m := servertest.New()
			ts := httptest.NewServer(server.New(server.Config{Manager: m, Version: "test", Log: slog.New(slog.DiscardHandler)}))
			t.Cleanup(ts.Close)
			var tr sdk.Transport = &sdk.StreamableClientTransport{Endpoint: ts.URL + "/mcp", DisableStandaloneSSE: true}
			if way == "stdio" {
				tr = stdio(t, ts.URL)
			}
			s, err := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), tr, nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			f(t, m, s)
		})
	}
}

// stdio serves on a pair of pipes, as 'sandbox mcp' does.
func stdio(t *testing.T, url string) sdk.Transport {
	t.Helper()
	cl, err := client.New(url)
	if err != nil {
		t.Fatal(err)
	}
	fromClient, toServer := io.Pipe()
	fromServer, toClient := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- mcp.Serve(context.Background(), mcp.Config{Daemon: remote{cl}, Version: "test"}, fromClient, toClient)
	}()
	t.Cleanup(func() {
		_ = toServer.Close()
		if err := <-done; err != nil {
			t.Errorf("serving: %v", err)
		}
	})
	return &sdk.IOTransport{Reader: fromServer, Writer: toServer}
}

// answer is what tests look at of a tool's result.
type answer struct {
	text  string
	bad   bool
	value map[string]any
}

func call(t *testing.T, s *sdk.ClientSession, name string, args map[string]any) answer {
	t.Helper()
	r, err := s.CallTool(t.Context(), &sdk.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	a := answer{bad: r.IsError}
	for _, c := range r.Content {
		if text, ok := c.(*sdk.TextContent); ok {
			a.text += text.Text
		}
	}
	raw, err := json.Marshal(r.StructuredContent)
	if err == nil {
		err = json.Unmarshal(raw, &a.value)
	}
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return a
}

// good is call of what must work.
func good(t *testing.T, s *sdk.ClientSession, name string, args map[string]any) answer {
	t.Helper()
	a := call(t, s, name, args)
	if a.bad {
		t.Fatalf("%s %v: %s", name, args, a.text)
	}
	return a
}

type object = map[string]any

func TestEveryTool(t *testing.T) {
	transports(t, func(t *testing.T, _ *servertest.Memory, s *sdk.ClientSession) {
		called := map[string]bool{}
		do := func(name string, args object) answer {
			t.Helper()
			called[name] = true
			return good(t, s, name, args)
		}
		id, _ := do("create_sandbox", object{"name": "dev", "memory_mib": 64, "labels": object{"for": "test"}, "network": "allow", "allow": []string{"example.com:443"}}).value["id"].(string)
		if id == "" {
			t.Fatal("no id")
		}
		if a := do("list_sandboxes", object{"labels": object{"for": "test"}}); !strings.Contains(a.text, id) {
			t.Errorf("list: %s", a.text)
		}
		if a := do("get_sandbox", object{"sandbox": "dev"}); a.value["status"] != "running" || a.value["id"] != id {
			t.Errorf("get: %v", a.value)
		}
		if a := do("run_code", object{"language": "python", "code": "echo hello"}); a.value["stdout"] != "hello\n" || a.value["exit_code"] != 0.0 {
			t.Errorf("run_code: %v", a.value)
		}
		if a := good(t, s, "list_sandboxes", nil); strings.Count(a.text, `"id"`) != 1 {
			t.Errorf("the sandbox of run_code stayed: %s", a.text)
		}
		if a := do("exec", object{"sandbox": "dev", "command": "err trouble"}); a.value["stderr"] != "trouble\n" || !strings.Contains(a.text, "[stderr]\ntrouble\n[exit code 0]") {
			t.Errorf("exec: %s", a.text)
		}
		if a := good(t, s, "exec", object{"sandbox": "dev", "argv": []string{"cat"}, "stdin": "given"}); a.value["stdout"] != "given" {
			t.Errorf("exec with stdin: %v", a.value)
		}
		bg := good(t, s, "exec", object{"sandbox": "dev", "argv": []string{"ticks", "5"}, "background": true})
		if a := do("read_output", object{"sandbox": "dev", "process": bg.value["process"], "wait_seconds": 30}); a.value["text"] != "0\n1\n2\n3\n4\n" || a.value["exit_code"] != 0.0 {
			t.Errorf("read_output: %v", a.value)
		}
		do("write_file", object{"sandbox": "dev", "path": "/srv/a.txt", "content": "one"})
		if a := do("read_file", object{"sandbox": "dev", "path": "/srv/a.txt"}); a.text != "one" {
			t.Errorf("read_file: %s", a.text)
		}
		if a := do("list_files", object{"sandbox": "dev", "path": "/srv"}); !strings.Contains(a.text, "/srv/a.txt") {
			t.Errorf("list_files: %s", a.text)
		}
		snap := do("snapshot", object{"sandbox": "dev", "name": "before"}).value["id"]
		if a := do("list_snapshots", object{}); !strings.Contains(a.text, snap.(string)) {
			t.Errorf("list_snapshots: %s", a.text)
		}
		if a := do("fork", object{"from": "before", "count": 2, "name": "try"}); strings.Count(a.text, `"sandbox"`) != 2 {
			t.Errorf("fork: %s", a.text)
		}
		do("rollback", object{"sandbox": "dev", "snapshot": "before"})
		if a := do("stop_sandbox", object{"sandbox": "dev"}); a.value["status"] != "stopped" {
			t.Errorf("stop: %v", a.value)
		}
		if a := do("start_sandbox", object{"sandbox": "dev"}); a.value["status"] != "running" {
			t.Errorf("start: %v", a.value)
		}
		if a := do("cost", object{"by": "sandbox"}); a.value["total"] == nil {
			t.Errorf("cost: %v", a.value)
		}
		do("remove_sandbox", object{"sandbox": id})
		do("remove_sandbox", object{"sandbox": id}) // as it says
		list, err := s.ListTools(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, tool := range list.Tools {
			if !called[tool.Name] {
				t.Errorf("%s was not called", tool.Name)
			}
			delete(called, tool.Name)
		}
		if len(called) > 0 {
			t.Errorf("not listed: %v", called)
		}
	})
}

// TestHints looks at what clients warn their users by.
func TestHints(t *testing.T) {
	transports(t, func(t *testing.T, _ *servertest.Memory, s *sdk.ClientSession) {
		list, err := s.ListTools(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		looks := []string{"list_sandboxes", "get_sandbox", "read_output", "read_file", "list_files", "list_snapshots", "cost"}
		spoils := []string{"run_code", "exec", "write_file", "rollback", "stop_sandbox", "remove_sandbox"}
		for _, tool := range list.Tools {
			a := tool.Annotations
			if a.ReadOnlyHint != slices.Contains(looks, tool.Name) || *a.DestructiveHint != slices.Contains(spoils, tool.Name) {
				t.Errorf("%s: read only %v, destructive %v", tool.Name, a.ReadOnlyHint, *a.DestructiveHint)
			}
			if tool.Description == "" || tool.InputSchema == nil || tool.OutputSchema == nil {
				t.Errorf("%s: a part is missing", tool.Name)
			}
		}
	})
}

// TestBounds reads something long, and the rest of it as the answer says.
func TestBounds(t *testing.T) {
	transports(t, func(t *testing.T, _ *servertest.Memory, s *sdk.ClientSession) {
		good(t, s, "create_sandbox", object{"name": "dev"})
		a := good(t, s, "exec", object{"sandbox": "dev", "argv": []string{"yes", "200000"}, "max_bytes": 1000})
		if n := len(a.text); n > 1500 || !strings.Contains(a.text, "bytes 500 to 199500 of the output are left out") || !strings.Contains(a.text, "read_output with process p1 and offset 500") {
			t.Errorf("%d bytes: %s", n, a.text)
		}
		b := good(t, s, "read_output", object{"sandbox": "dev", "process": "p1", "offset": 500, "max_bytes": 100})
		if b.value["text"] != strings.Repeat("y\n", 50) || b.value["next_offset"] != 600.0 || b.value["more"] != true {
			t.Errorf("the rest: %v", b.value)
		}
		// Without a cut there is no word of one.
		if c := good(t, s, "exec", object{"sandbox": "dev", "argv": []string{"yes", "1000"}, "max_bytes": 1000}); c.value["cut"] != nil || len(c.value["stdout"].(string)) != 1000 {
			t.Errorf("whole: %v", c.value)
		}
		if a := good(t, s, "run_code", object{"language": "sh", "code": "yes 100000"}); !strings.Contains(a.text, "a sandbox of your own") || len(a.text) > 34000 {
			t.Errorf("%d bytes, ending %s", len(a.text), a.text[len(a.text)-300:])
		}
		text := strings.Repeat("ä€", 30000)
		good(t, s, "write_file", object{"sandbox": "dev", "path": "/long", "content": text})
		var read strings.Builder
		for offset, n := 0.0, 0; read.Len() < len(text) && n < 20; n++ {
			f := good(t, s, "read_file", object{"sandbox": "dev", "path": "/long", "offset": offset})
			read.WriteString(f.value["content"].(string))
			offset = f.value["next_offset"].(float64)
			if cut := f.value["cut"] != nil; cut != (read.Len() < len(text)) || len(f.text) > 33000 {
				t.Fatalf("at %v: cut %v, %d bytes", offset, cut, len(f.text))
			}
		}
		if read.String() != text {
			t.Errorf("read %d bytes that differ", read.Len())
		}
		for i := range 60 {
			good(t, s, "write_file", object{"sandbox": "dev", "path": "/many/f" + string(rune('a'+i%26)) + string(rune('a'+i/26)), "content": "x"})
		}
		if f := good(t, s, "list_files", object{"sandbox": "dev", "path": "/many"}); len(f.value["entries"].([]any)) != 50 || !strings.HasPrefix(f.value["cut"].(string), "10 more") {
			t.Errorf("list: %v", f.value["cut"])
		}
	})
}

func TestErrorsSayWhatToDo(t *testing.T) {
	transports(t, func(t *testing.T, m *servertest.Memory, s *sdk.ClientSession) {
		good(t, s, "create_sandbox", object{"name": "dev"})
		for _, tc := range []struct {
			tool string
			args object
			want string
		}{
			{"get_sandbox", object{"sandbox": "absent"}, "sandbox_not_found: "},
			{"exec", object{"sandbox": "dev", "argv": []string{"nothing"}}, "command_not_found: "},
			{"exec", object{"sandbox": "dev"}, "invalid_argv: "},
			{"exec", object{"sandbox": "dev", "command": "echo", "timeout_seconds": 1e9}, "invalid_timeout: "},
			{"exec", object{"sandbox": "dev", "command": "echo", "max_bytes": 1 << 30}, "invalid_max_bytes: "},
			{"run_code", object{"language": "cobol", "code": "x"}, "invalid_language: "},
			{"create_sandbox", object{"name": "dev"}, "name_taken: "},
			{"create_sandbox", object{"memory_mib": 1 << 50}, "invalid_limits: "},
			{"read_file", object{"sandbox": "dev", "path": "relative"}, "invalid_path: "},
			{"read_file", object{"sandbox": "dev", "path": "/absent"}, "file_not_found: "},
			{"write_file", object{"sandbox": "dev", "path": "/a", "content": "?", "encoding": "base64"}, "invalid_content: "},
			{"cost", object{"from": "yesterday"}, "invalid_time: "},
			{"fork", object{"from": "dev", "count": 1000}, "invalid_count: "},
		} {
			if a := call(t, s, tc.tool, tc.args); !a.bad || !strings.HasPrefix(a.text, tc.want) {
				t.Errorf("%s %v: error %v, %q; want %q", tc.tool, tc.args, a.bad, a.text, tc.want)
			}
		}
		m.Fail = func(method string) error {
			if method == "List" {
				return io.ErrUnexpectedEOF // with no class: nothing of it may be told
			}
			return nil
		}
		if a := call(t, s, "list_sandboxes", nil); !a.bad || !strings.HasPrefix(a.text, "internal: ") || strings.Contains(a.text, "EOF") {
			t.Errorf("internal: %v %q", a.bad, a.text)
		}
	})
}

func TestResources(t *testing.T) {
	transports(t, func(t *testing.T, _ *servertest.Memory, s *sdk.ClientSession) {
		id := good(t, s, "create_sandbox", object{"name": "dev"}).value["id"].(string)
		good(t, s, "write_file", object{"sandbox": "dev", "path": "/srv/a b.txt", "content": "one"})
		good(t, s, "write_file", object{"sandbox": "dev", "path": "/srv/raw", "content": "/wA=", "encoding": "base64"})
		good(t, s, "exec", object{"sandbox": "dev", "command": "echo first"})
		good(t, s, "exec", object{"sandbox": "dev", "command": "echo second"})
		list, err := s.ListResourceTemplates(t.Context(), nil)
		if err != nil || len(list.ResourceTemplates) != 3 {
			t.Fatalf("templates: %v %v", list, err)
		}
		read := func(uri string) *sdk.ResourceContents {
			t.Helper()
			r, err := s.ReadResource(t.Context(), &sdk.ReadResourceParams{URI: uri})
			if err != nil || len(r.Contents) != 1 {
				t.Fatalf("%s: %v, %v", uri, r, err)
			}
			return r.Contents[0]
		}
		for uri, want := range map[string]string{
			"sandbox://sandboxes": id, "sandbox://dev/files/srv/a%20b.txt": "one", "sandbox://" + id + "/files/srv": "/srv/a b.txt",
			"sandbox://dev/logs": "second", "sandbox://dev/logs/p1": "first",
		} {
			if got := read(uri).Text; !strings.Contains(got, want) {
				t.Errorf("%s: %q, want %q in it", uri, got, want)
			}
		}
		if b := read("sandbox://dev/files/srv/raw").Blob; string(b) != "\xff\x00" {
			t.Errorf("raw: %q", b)
		}
		for _, uri := range []string{"sandbox://absent/logs", "sandbox://dev/files/absent", "sandbox://dev/else"} {
			if _, err := s.ReadResource(t.Context(), &sdk.ReadResourceParams{URI: uri}); err == nil || !strings.Contains(err.Error(), "not found") {
				t.Errorf("%s: %v", uri, err)
			}
		}
	})
}

// TestHTTPEdges asks the handler what no client of the protocol would.
func TestHTTPEdges(t *testing.T) {
	h := server.New(server.Config{Manager: servertest.New(), Version: "test", Log: slog.New(slog.DiscardHandler)})
	ask := func(method, kind, body string) int {
		r := httptest.NewRequest(method, "/mcp", strings.NewReader(body))
		r.Header.Set("Content-Type", kind)
		r.Header.Set("Accept", "application/json, text/event-stream")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code
	}
	list := `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}`
	for _, tc := range []struct {
		method, kind, body string
		want               int
	}{
		{http.MethodPost, "application/json", list, http.StatusOK},
		{http.MethodPost, "text/plain", list, http.StatusUnsupportedMediaType},
		{http.MethodPost, "application/json", "{", http.StatusBadRequest},
		{http.MethodPost, "application/json", strings.Repeat(" ", 5<<20), http.StatusRequestEntityTooLarge},
		{http.MethodGet, "", "", http.StatusMethodNotAllowed},
		{http.MethodDelete, "", "", http.StatusMethodNotAllowed},
	} {
		if got := ask(tc.method, tc.kind, tc.body); got != tc.want {
			t.Errorf("%s %s %.20s: %d, want %d", tc.method, tc.kind, tc.body, got, tc.want)
		}
	}
}

// TestNotUTF8: text that decoding would change is refused; what is well
// written is taken as it was meant.
func TestNotUTF8(t *testing.T) {
	transports(t, func(t *testing.T, _ *servertest.Memory, s *sdk.ClientSession) {
		good(t, s, "create_sandbox", object{"name": "dev"})
		write := func(args string) *sdk.CallToolResult {
			t.Helper()
			r, err := s.CallTool(t.Context(), &sdk.CallToolParams{Name: "write_file", Arguments: json.RawMessage(args)})
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		for _, args := range []string{
			`{"sandbox":"dev","path":"/x","content":"\ud800"}`, `{"sandbox":"dev","path":"/x\udfff","content":""}`, `{"sandbox":"dev","path":"/x\ufffd","content":""}`,
			"{\"sandbox\":\"dev\",\"path\":\"/x\",\"content\":\"\xff\"}",
		} {
			if r := write(args); !r.IsError {
				t.Errorf("%q was taken", args)
			}
		}
		if r := write(`{"sandbox":"dev","path":"/x","content":"\ud83d\ude00\ufffd"}`); r.IsError {
			t.Errorf("%+v", r)
		}
		if f := good(t, s, "read_file", object{"sandbox": "dev", "path": "/x"}); f.value["content"] != "\U0001f600\ufffd" {
			t.Errorf("%q", f.value["content"])
		}
	})
}
