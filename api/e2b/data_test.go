package e2b

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// plane is a data plane over a manager in memory.
type plane struct {
	t   *testing.T
	url string
	mem *servertest.Memory
	box sandbox.Sandbox
}

func newPlane(t *testing.T) *plane {
	mem := servertest.New()
	box, err := mem.Create(t.Context(), sandbox.CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	d := newDataPlane(mem, slog.New(slog.DiscardHandler))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		box, err := mem.Sandbox(r.Context(), string(box.ID))
		if err != nil {
			noSandbox(w, string(box.ID))
			return
		}
		d.handler(box).ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	return &plane{t: t, url: srv.URL, mem: mem, box: box}
}

// do sends a request and returns the answer with its body.
func (p *plane) do(method, path, kind string, body []byte, head ...string) (*http.Response, []byte) {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.t.Context(), method, p.url+path, bytes.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	if kind != "" {
		req.Header.Set("Content-Type", kind)
	}
	for i := 0; i+1 < len(head); i += 2 {
		req.Header.Set(head[i], head[i+1])
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableCompression: true}}).Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		p.t.Fatal(err)
	}
	return resp, b
}

// unary calls a method; the answer's code is empty where it went well.
func (p *plane) unary(name, body string) (code, string) {
	p.t.Helper()
	resp, b := p.do(http.MethodPost, "/"+name, typeUnary, []byte(body))
	if resp.StatusCode == http.StatusOK {
		return "", string(b)
	}
	var e rpcError
	if err := json.Unmarshal(b, &e); err != nil || codeStatus[e.Code] != resp.StatusCode {
		p.t.Fatalf("%s: status %d, %s", name, resp.StatusCode, b)
	}
	return e.Code, e.Message
}

func framed(body string) []byte {
	b := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body)))
	return append(b, body...)
}

// said is what a stream brought.
type said struct {
	pid                 int
	stdout, stderr, pty string
	end                 *endEvent
	events              []fileEvent
	alive               int
	err                 *rpcError
	whole               bool // the last frame came
}

// open begins a stream.
func (p *plane) open(name, body string, head ...string) io.ReadCloser {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodPost, p.url+"/"+name, bytes.NewReader(framed(body)))
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header.Set("Content-Type", typeStream)
	for i := 0; i+1 < len(head); i += 2 {
		req.Header.Set(head[i], head[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != typeStream {
		p.t.Fatalf("%s: status %d, type %s", name, resp.StatusCode, resp.Header.Get("Content-Type"))
	}
	p.t.Cleanup(func() { _ = resp.Body.Close() })
	return resp.Body
}

// read takes the next frame; false with the last or where the connection broke.
func (s *said) read(t *testing.T, r io.Reader) bool {
	t.Helper()
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return false
	}
	b := make([]byte, binary.BigEndian.Uint32(head[1:]))
	if _, err := io.ReadFull(r, b); err != nil {
		return false
	}
	var m struct {
		Event struct {
			eventBody
			Data struct{ Stdout, Stderr, PTY []byte }
		}
		Filesystem *fileEvent
		Keepalive  *emptyMessage
		Error      *rpcError
	}
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatalf("frame %q: %v", b, err)
	}
	if head[0] == flagEnd {
		s.err, s.whole = m.Error, true
		return false
	}
	switch e := m.Event; {
	case e.Start != nil:
		s.pid = e.Start.PID
	case e.End != nil:
		s.end = e.End
	case e.Keepalive != nil || m.Keepalive != nil:
		s.alive++
	case m.Filesystem != nil:
		s.events = append(s.events, *m.Filesystem)
	default:
		s.stdout += string(e.Data.Stdout)
		s.stderr += string(e.Data.Stderr)
		s.pty += string(e.Data.PTY)
	}
	return true
}

func (p *plane) run(body string, head ...string) *said {
	p.t.Helper()
	r := p.open("process.Process/Start", body, head...)
	s := &said{}
	for s.read(p.t, r) {
	}
	return s
}

func TestCommandsRun(t *testing.T) {
	p := newPlane(t)
	s := p.run(`{"process":{"cmd":"echo","args":["a","b"],"envs":{},"unknown":[{}]},"stdin":false}`)
	if s.stdout != "a b\n" || s.end == nil || s.end.ExitCode != 0 || !s.end.Exited || s.end.Error != "" || !s.whole || s.err != nil || s.pid == 0 {
		t.Errorf("echo: %+v, end %+v", s, s.end)
	}
	s = p.run(`{"process":{"cmd":"err","args":["x"]}}`)
	if s.stderr != "x\n" || s.stdout != "" {
		t.Errorf("stderr: %+v", s)
	}
	s = p.run(`{"process":{"cmd":"exit","args":["7"]}}`)
	if s.end == nil || s.end.ExitCode != 7 || s.end.Error != "exit status 7" {
		t.Errorf("exit 7: %+v", s.end)
	}
	if s = p.run(`{"process":{"cmd":""}}`); s.err == nil || s.err.Code != codeInvalidArgument {
		t.Errorf("no command: %+v", s.err)
	}
	if s = p.run(`{`); s.err == nil || s.err.Code != codeInvalidArgument {
		t.Errorf("no JSON: %+v", s.err)
	}
}

func TestACommandIsFed(t *testing.T) {
	p := newPlane(t)
	r := p.open("process.Process/Start", `{"process":{"cmd":"cat"},"stdin":true,"tag":"feline"}`)
	s := &said{}
	if !s.read(t, r) || s.pid == 0 {
		t.Fatalf("no start: %+v", s)
	}
	if c, list := p.unary("process.Process/List", "{}"); c != "" || !strings.Contains(list, `"cmd":"cat"`) || !strings.Contains(list, `"tag":"feline"`) {
		t.Errorf("list: %s %s", c, list)
	}
	in := base64.URLEncoding.EncodeToString([]byte("hi\xff\xfe"))
	for _, sel := range []string{fmt.Sprintf(`{"pid":%d}`, s.pid), fmt.Sprintf(`{"pid":"%d"}`, s.pid), `{"tag":"feline"}`} {
		if c, m := p.unary("process.Process/SendInput", `{"process":`+sel+`,"input":{"stdin":"`+in+`"}}`); c != "" {
			t.Errorf("input to %s: %s %s", sel, c, m)
		}
	}
	for bad, want := range map[string]code{
		`{"process":{"pid":99999},"input":{"stdin":"aGk="}}`:                    codeNotFound,
		`{"process":{},"input":{"stdin":"aGk="}}`:                               codeInvalidArgument,
		fmt.Sprintf(`{"process":{"pid":%d},"input":{}}`, s.pid):                 codeInvalidArgument,
		fmt.Sprintf(`{"process":{"pid":%d},"input":{"pty":"aGk="}}`, s.pid):     codeFailedPrecondition,
		fmt.Sprintf(`{"process":{"pid":%d},"input":{"stdin":"*"}}`, s.pid):      codeInvalidArgument,
		fmt.Sprintf(`{"process":{"pid":%d.5},"input":{"stdin":"aGk="}}`, s.pid): codeInvalidArgument,
	} {
		if c, m := p.unary("process.Process/SendInput", bad); c != want {
			t.Errorf("%s: %s %s, want %s", bad, c, m, want)
		}
	}
	if c, m := p.unary("process.Process/CloseStdin", fmt.Sprintf(`{"process":{"pid":%d}}`, s.pid)); c != "" {
		t.Errorf("close: %s %s", c, m)
	}
	for s.read(t, r) {
	}
	if want := strings.Repeat("hi\xff\xfe", 3); s.stdout != want || s.end == nil || s.end.ExitCode != 0 {
		t.Errorf("%q, want %q; end %+v", s.stdout, want, s.end)
	}
}

func TestACommandIsKilled(t *testing.T) {
	p := newPlane(t)
	r := p.open("process.Process/Start", `{"process":{"cmd":"sleep"}}`)
	s := &said{}
	s.read(t, r)
	body := fmt.Sprintf(`{"process":{"pid":%d},"signal":"SIGNAL_SIGTERM"}`, s.pid)
	if c, m := p.unary("process.Process/SendSignal", body); c != "" {
		t.Errorf("%s: %s %s", body, c, m)
	}
	if c, _ := p.unary("process.Process/SendSignal", fmt.Sprintf(`{"process":{"pid":%d},"signal":"SIGNAL_UNSPECIFIED"}`, 424242)); c != codeUnimplemented {
		t.Errorf("another signal: %s", c)
	}
	for s.read(t, r) {
	}
	if s.end == nil || s.end.ExitCode != -1 || s.end.Exited || s.end.Status != "signal: terminated" {
		t.Errorf("killed: %+v", s.end)
	}
}

func TestTheDeadlineKillsAndADisconnectDoesNot(t *testing.T) {
	p := newPlane(t)
	s := p.run(`{"process":{"cmd":"sleep"}}`, "Connect-Timeout-Ms", "50")
	if s.err == nil || s.err.Code != codeDeadlineExceeded || s.end != nil {
		t.Errorf("after the deadline: %+v", s.err)
	}
	testenv.Eventually(t, 10*time.Second, "the end of what is late", func() bool {
		_, list := p.unary("process.Process/List", "{}")
		return !strings.Contains(list, "sleep")
	})
	if s = p.run(`{"process":{"cmd":"sleep"}}`, "Connect-Timeout-Ms", "soon"); s.err == nil || s.err.Code != codeInvalidArgument {
		t.Errorf("a bad deadline: %+v", s.err)
	}

	r := p.open("process.Process/Start", `{"process":{"cmd":"cat"}}`)
	first := &said{}
	first.read(t, r)
	_ = r.Close()
	r = p.open("process.Process/Connect", fmt.Sprintf(`{"process":{"pid":%d}}`, first.pid), "Keepalive-Ping-Interval", "1")
	again := &said{}
	for again.alive == 0 {
		if !again.read(t, r) {
			t.Fatalf("the stream ended: %+v", again.err)
		}
	}
	if again.pid != first.pid {
		t.Errorf("connected to %d, not %d", again.pid, first.pid)
	}
	p.unary("process.Process/SendInput", fmt.Sprintf(`{"process":{"pid":%d},"input":{"stdin":"b25l"}}`, first.pid))
	p.unary("process.Process/CloseStdin", fmt.Sprintf(`{"process":{"pid":%d}}`, first.pid))
	for again.read(t, r) {
	}
	if again.stdout != "one" || again.end == nil {
		t.Errorf("after the reconnect: %+v", again)
	}
	r = p.open("process.Process/Connect", fmt.Sprintf(`{"process":{"pid":%d}}`, first.pid))
	for again.read(t, r) {
	}
	if again.err == nil || again.err.Code != codeNotFound {
		t.Errorf("connect to one that ended: %+v", again.err)
	}
}

func TestAnEndOfTheSandboxBreaksStreams(t *testing.T) {
	p := newPlane(t)
	r := p.open("process.Process/Start", `{"process":{"cmd":"sleep"}}`)
	s := &said{}
	s.read(t, r)
	if _, err := p.mem.Remove(t.Context(), string(p.box.ID), "test"); err != nil {
		t.Fatal(err)
	}
	for s.read(t, r) {
	}
	if s.end != nil || s.err == nil || s.err.Code != codeUnavailable {
		t.Errorf("the stream ended as if the process had: %+v %+v", s.end, s.err)
	}
	if resp, b := p.do(http.MethodGet, "/health", "", nil); resp.StatusCode != http.StatusBadGateway || !strings.Contains(string(b), "was not found") {
		t.Errorf("health: %d %s", resp.StatusCode, b)
	}
}

func TestTerminals(t *testing.T) {
	p := newPlane(t)
	r := p.open("process.Process/Start", `{"process":{"cmd":"size"},"pty":{"size":{"cols":80,"rows":"24"}}}`)
	s := &said{}
	s.read(t, r)
	if c, m := p.unary("process.Process/Update", fmt.Sprintf(`{"process":{"pid":%d},"pty":{"size":{"cols":120,"rows":40}}}`, s.pid)); c != "" {
		t.Errorf("resize: %s %s", c, m)
	}
	for s.read(t, r) {
	}
	if !strings.Contains(s.pty, "120") || s.stdout != "" {
		t.Errorf("%+v", s)
	}
	if s = p.run(`{"process":{"cmd":"size"},"pty":{"size":{"cols":-1,"rows":1}}}`); s.err == nil || s.err.Code != codeInvalidArgument {
		t.Errorf("a terminal of -1: %+v", s.err)
	}
}

func TestMethodsRefuse(t *testing.T) {
	p := newPlane(t)
	for _, c := range []struct {
		method, path, kind string
		body               []byte
		want               int
	}{
		{http.MethodPost, "/process.Process/Nothing", typeUnary, nil, http.StatusNotFound},
		{http.MethodGet, "/process.Process/List", typeUnary, nil, http.StatusMethodNotAllowed},
		{http.MethodPost, "/process.Process/List", "application/proto", nil, http.StatusUnsupportedMediaType},
		{http.MethodPost, "/process.Process/Start", typeUnary, nil, http.StatusUnsupportedMediaType},
		{http.MethodPost, "/process.Process/List", typeUnary, bytes.Repeat([]byte(" "), maxMessage+100), http.StatusTooManyRequests},
		{http.MethodPost, "/filesystem.Filesystem/Remove", typeUnary, []byte("{\"path\":\"/c\xff\"}"), http.StatusBadRequest},
		{http.MethodPost, "/filesystem.Filesystem/Remove", typeUnary, []byte(`{"path":"/c\ud800"}`), http.StatusBadRequest},
		{http.MethodPost, "/filesystem.Filesystem/Remove", typeUnary, []byte(`{"path":"/c\ufffd"}`), http.StatusBadRequest},
		{http.MethodPost, "/filesystem.Filesystem/Remove", typeUnary, []byte(`{"path":"/c\u00e9"}`), http.StatusOK},
		{http.MethodDelete, "/files", "", nil, http.StatusMethodNotAllowed},
		{http.MethodGet, "/health", "", nil, http.StatusNoContent},
	} {
		if resp, b := p.do(c.method, c.path, c.kind, c.body); resp.StatusCode != c.want {
			t.Errorf("%s %s as %s: %d %.80s, want %d", c.method, c.path, c.kind, resp.StatusCode, b, c.want)
		}
	}
}

// form writes a form whose parts are called file.
func form(t *testing.T, parts ...[2]string) (kind string, body []byte) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for _, p := range parts {
		h := textproto.MIMEHeader{"Content-Disposition": {`form-data; name="file"`}}
		if p[0] != "" {
			h.Set("Content-Disposition", `form-data; name="file"; filename="`+p[0]+`"`)
		}
		part, err := w.CreatePart(h)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(part, p[1])
	}
	_ = w.Close()
	return w.FormDataContentType(), b.Bytes()
}

func TestFilesAreWrittenAndRead(t *testing.T) {
	p := newPlane(t)
	kind, body := form(t, [2]string{"", "no name"})
	resp, b := p.do(http.MethodPost, "/files?path=/d/one.txt", kind, body)
	if resp.StatusCode != http.StatusOK || strings.TrimSpace(string(b)) != `[{"path":"/d/one.txt","name":"one.txt","type":"file"}]` {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	kind, body = form(t, [2]string{"/d/e/two.txt", "two"}, [2]string{"/d/Ünïcode %22q%22.txt", "three"})
	if resp, b = p.do(http.MethodPost, "/files", kind, body); resp.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	var z bytes.Buffer
	zw := gzip.NewWriter(&z)
	_, _ = io.WriteString(zw, strings.Repeat("packed ", 200))
	_ = zw.Close()
	if resp, b = p.do(http.MethodPost, "/files?path=/d/z", "application/octet-stream", z.Bytes(), "Content-Encoding", "gzip"); resp.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	if resp, b = p.do(http.MethodPost, "/files?path=/d/empty", "application/octet-stream", nil); resp.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	if resp, b = p.do(http.MethodPost, "/files?path=/proc/cpuinfo", "application/octet-stream", []byte("content without a size")); resp.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	for path, want := range map[string]string{
		"/d/one.txt": "no name", "/d/e/two.txt": "two", "/d/%C3%9Cn%C3%AFcode%20%22q%22.txt": "three", "/d/z": strings.Repeat("packed ", 200), "/d/empty": "",
		"/proc/cpuinfo": "content without a size",
	} {
		resp, b := p.do(http.MethodGet, "/files?path="+path, "", nil, "Accept-Encoding", "gzip, deflate")
		if resp.StatusCode != http.StatusOK || string(b) != want || resp.Header.Get("Content-Length") != fmt.Sprint(len(want)) {
			t.Errorf("%s: %d %.40q, Content-Length %s", path, resp.StatusCode, b, resp.Header.Get("Content-Length"))
		}
	}
	resp, b = p.do(http.MethodGet, "/files?path=/d/z", "", nil, "Accept-Encoding", "gzip")
	zr, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil || resp.Header.Get("Content-Encoding") != "gzip" {
		t.Fatalf("packed: %v, %v", err, resp.Header)
	}
	if b, err = io.ReadAll(zr); err != nil || len(b) != 7*200 {
		t.Errorf("unpacked %d bytes, %v", len(b), err)
	}
	resp, b = p.do(http.MethodGet, "/files?path=/d/one.txt", "", nil, "Range", "bytes=3-5")
	if resp.StatusCode != http.StatusPartialContent || string(b) != "nam" {
		t.Errorf("a range: %d %q", resp.StatusCode, b)
	}
}

func TestFilesRefuse(t *testing.T) {
	p := newPlane(t)
	twice, body := form(t, [2]string{"/x", "1"}, [2]string{"/x", "2"})
	for _, c := range []struct {
		method, path, kind string
		body               []byte
		head               []string
		want               int
	}{
		{http.MethodGet, "/files?path=/nothing", "", nil, nil, http.StatusNotFound},
		{http.MethodGet, "/files", "", nil, nil, http.StatusBadRequest},
		{http.MethodPost, "/files", "application/octet-stream", nil, nil, http.StatusBadRequest},
		{http.MethodPost, "/files?path=/x%ff", "application/octet-stream", nil, nil, http.StatusBadRequest},
		{http.MethodPost, "/files?path=/x", "text/plain", nil, nil, http.StatusBadRequest},
		{http.MethodPost, "/files?path=/x", "multipart/form-data", nil, nil, http.StatusBadRequest},
		{http.MethodPost, "/files", twice, body, nil, http.StatusBadRequest},
		{http.MethodPost, "/files?path=/x", "application/octet-stream", []byte("plain"), []string{"Content-Encoding", "gzip"}, http.StatusBadRequest},
		{http.MethodPost, "/files?path=/x", "application/octet-stream", nil, []string{"X-Metadata-A", strings.Repeat("x", 5000)}, http.StatusBadRequest},
		{http.MethodPost, "/files?path=/x", "application/octet-stream", nil, []string{"X-Metadata-A", "\xfc"}, http.StatusBadRequest},
	} {
		resp, b := p.do(c.method, c.path, c.kind, c.body, c.head...)
		var f failure
		if resp.StatusCode != c.want || json.Unmarshal(b, &f) != nil || f.Code != c.want || f.Message == "" {
			t.Errorf("%s %s: %d %s, want %d", c.method, c.path, resp.StatusCode, b, c.want)
		}
	}
}

func TestDirectories(t *testing.T) {
	p := newPlane(t)
	for _, c := range []struct {
		method, body string
		want         code
		has          string
	}{
		{"MakeDir", `{"path":"/w/a"}`, "", `"FILE_TYPE_DIRECTORY"`},
		{"MakeDir", `{"path":"/w/a"}`, codeAlreadyExists, ""},
		{"Stat", `{"path":"/w/a"}`, "", `"permissions":"drwxr-xr-x"`},
		{"Stat", `{"path":"/nothing"}`, codeNotFound, ""},
		{"ListDir", `{"path":"/w","depth":1}`, "", `"/w/a"`},
		{"ListDir", `{"path":"/w"}`, "", `"size":"`},
		{"ListDir", `{"path":"/nothing"}`, codeNotFound, ""},
		{"Move", `{"source":"/w/a","destination":"/v/b"}`, "", `"/v/b"`},
		{"Move", `{"source":"/w/a","destination":"/v/c"}`, codeNotFound, ""},
		{"Remove", `{"path":"/v/b"}`, "", "{}"},
		{"Remove", `{"path":"/v/b"}`, "", "{}"},
		{"Stat", `{"path":"~other/x"}`, codeInvalidArgument, ""},
	} {
		got, text := p.unary("filesystem.Filesystem/"+c.method, c.body)
		if got != c.want || !strings.Contains(text, c.has) {
			t.Errorf("%s %s: %s %s", c.method, c.body, got, text)
		}
	}
}

func TestRelative(t *testing.T) {
	for _, c := range [][3]string{{"/a", "/a", "."}, {"/a", "/a/b/c", "b/c"}, {"/", "/x", "x"}} {
		if got := relative(c[0], c[1]); got != c[2] {
			t.Errorf("relative(%s, %s) = %s", c[0], c[1], got)
		}
	}
}

func FuzzRequests(f *testing.F) {
	f.Add("process.Process/Start", framed(`{"process":{"cmd":"echo","args":["a"]},"pty":{"size":{"cols":1,"rows":"2"}}}`))
	f.Add("process.Process/SendInput", []byte(`{"process":{"pid":"1"},"input":{"stdin":"_-8="}}`))
	f.Add("filesystem.Filesystem/ListDir", []byte(`{"path":"~/x","depth":1e3}`))
	f.Fuzz(func(t *testing.T, name string, body []byte) {
		inner, err := unwrap(body)
		if err == nil && len(inner) != len(body)-frameHead {
			t.Fatalf("%d bytes of %d", len(inner), len(body))
		}
		for _, b := range [][]byte{body, inner} {
			check[startRequest](t, b)
			check[inputRequest](t, b)
			check[signalRequest](t, b)
			check[updateRequest](t, b)
			check[listRequest](t, b)
			check[watchRequest](t, b)
		}
	})
}

// check decodes: what is no message is an invalid argument, and nothing else.
func check[T any](t *testing.T, b []byte) {
	if _, err := decode[T](b); err != nil && asRPC(err).Code != codeInvalidArgument {
		t.Fatalf("%v", err)
	}
}
