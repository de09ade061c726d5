package server_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// part is one part of a form.
type part struct{ name, data string }

// form is the body of a build, and its content type.
func form(t *testing.T, parts ...part) (io.Reader, string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for _, p := range parts {
		if err := w.WriteField(p.name, p.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b, w.FormDataContentType()
}

// postBuild asks for a build and returns the answer and its lines.
func postBuild(t *testing.T, m *servertest.Memory, body io.Reader, contentType string) (*httptest.ResponseRecorder, []api.BuildMessage) {
	t.Helper()
	w := httptest.NewRecorder()
	req := httptest.NewRequest(http.MethodPost, "http://d/v1/images/build", body)
	req.Header.Set("Content-Type", contentType)
	server.New(server.Config{Manager: m, Version: "test"}).ServeHTTP(w, req)
	var lines []api.BuildMessage
	if w.Code == http.StatusOK {
		for line := range strings.Lines(w.Body.String()) {
			var m api.BuildMessage
			if err := json.Unmarshal([]byte(line), &m); err != nil {
				t.Fatalf("line %q: %v", line, err)
			}
			lines = append(lines, m)
		}
	}
	return w, lines
}

func TestBuildAnswers(t *testing.T) {
	m := servertest.New()
	body, kind := form(t, part{api.BuildRequestPart, `{"names":["app"],"dockerfile":"FROM host\nRUN hello"}`})
	w, lines := postBuild(t, m, body, kind)
	if w.Code != http.StatusOK || w.Header().Get("Content-Type") != "application/x-ndjson" || len(lines) != 4 {
		t.Fatalf("%d %s: %+v", w.Code, w.Header(), lines)
	}
	if last := lines[3]; last.Type != sandbox.BuildImage || last.Image == nil || last.Image.Name != "app" || string(lines[2].Data) != "hello\n" {
		t.Errorf("lines %+v", lines)
	}
	// After the first event an error is the last line, and no status.
	body, kind = form(t, part{api.BuildRequestPart, `{"dockerfile":"FROM host\nRUN fail"}`})
	w, lines = postBuild(t, m, body, kind)
	if w.Code != http.StatusOK || len(lines) != 3 || lines[2].Type != api.BuildFailed || lines[2].Problem == nil || lines[2].Problem.Code != "build_step_failed" {
		t.Errorf("a step that fails: %d %+v", w.Code, lines)
	}
	// An error of the daemon's own shows nothing but the request.
	m.Fail = func(method string) error {
		if method == "Build" {
			return errors.New("secret of the daemon's")
		}
		return nil
	}
	body, kind = form(t, part{api.BuildRequestPart, `{"dockerfile":"FROM host"}`})
	if w, _ := postBuild(t, m, body, kind); w.Code != http.StatusInternalServerError || strings.Contains(w.Body.String(), "secret") {
		t.Errorf("an internal error: %d %s", w.Code, w.Body)
	}
}

func TestBadBuilds(t *testing.T) {
	const good = `{"dockerfile":"FROM host"}`
	for _, c := range []struct {
		name  string
		parts []part
		body  string // in place of parts, with this content type
		kind  string
		code  string
	}{
		{name: "control", parts: []part{{api.BuildRequestPart, good}}},
		{name: "control with files", parts: []part{{api.BuildRequestPart, good}, {api.BuildContextPart, ""}}},
		{name: "JSON", body: good, kind: "application/json", code: "unsupported_media_type"},
		{name: "no boundary", body: "x", kind: "multipart/form-data", code: "unsupported_media_type"},
		{name: "no parts", code: "invalid_build"},
		{name: "broken off", body: "--b\r\nContent-Disposition: form-data; name=\"request\"\r\n\r\n{", kind: "multipart/form-data; boundary=b", code: "invalid_build"},
		{name: "files first", parts: []part{{api.BuildContextPart, ""}, {api.BuildRequestPart, good}}, code: "invalid_build"},
		{name: "another second part", parts: []part{{api.BuildRequestPart, good}, {"more", ""}}, code: "invalid_build"},
		{name: "no JSON", parts: []part{{api.BuildRequestPart, "FROM host"}}, code: "invalid_build"},
		{name: "no UTF-8", parts: []part{{api.BuildRequestPart, "{\"dockerfile\":\"FROM host\\nCOPY \xff b\"}"}}, code: "invalid_build"},
		{name: "unknown field", parts: []part{{api.BuildRequestPart, `{"dockerfile":"FROM host","x":1}`}}, code: "invalid_build"},
		{name: "empty Dockerfile", parts: []part{{api.BuildRequestPart, `{"dockerfile":" \n"}`}}, code: "dockerfile_invalid"},
		{name: "large Dockerfile", parts: []part{{api.BuildRequestPart, `{"dockerfile":"` + strings.Repeat("x", sandbox.MaxDockerfile+1) + `"}`}}, code: "dockerfile_too_large"},
		{name: "large request", parts: []part{{api.BuildRequestPart, `{"dockerfile":"` + strings.Repeat("x", api.MaxBuildRequest) + `"}`}}, code: "body_too_large"},
		{name: "bad name", parts: []part{{api.BuildRequestPart, `{"dockerfile":"FROM host","names":["Not A Name"]}`}}, code: "invalid_image_name"},
		{name: "many names", parts: []part{{api.BuildRequestPart, `{"dockerfile":"FROM host","names":["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"]}`}}, code: "invalid_build"},
		{name: "bad argument", parts: []part{{api.BuildRequestPart, `{"dockerfile":"FROM host","args":{"a=b":"c"}}`}}, code: "invalid_build_arg"},
		{name: "bad limit", parts: []part{{api.BuildRequestPart, `{"dockerfile":"FROM host","limits":{"memory_bytes":5}}`}}, code: "invalid_limits"},
		{name: "bad network", parts: []part{{api.BuildRequestPart, `{"dockerfile":"FROM host","network":{"mode":"host"}}`}}, code: "invalid_network"},
		{name: "bad time", parts: []part{{api.BuildRequestPart, `{"dockerfile":"FROM host","timeout_seconds":-1}`}}, code: "invalid_timeout"},
		{name: "bad archive", parts: []part{{api.BuildRequestPart, good}, {api.BuildContextPart, strings.Repeat("x", 600)}}, code: "bad_context"},
		{name: "no Dockerfile", parts: []part{{api.BuildRequestPart, `{"dockerfile":"hello"}`}}, code: "dockerfile_invalid"},
	} {
		body, kind := form(t, c.parts...)
		if c.kind != "" {
			body, kind = strings.NewReader(c.body), c.kind
		}
		w, _ := postBuild(t, servertest.New(), body, kind)
		if c.code == "" {
			if w.Code != http.StatusOK {
				t.Errorf("%s: %d %s", c.name, w.Code, w.Body)
			}
			continue
		}
		var p api.Problem
		if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || p.Code != c.code || w.Code != p.Status || w.Code >= 500 || len(p.Detail) > 4096 {
			t.Errorf("%s: %d %.300s, want code %s", c.name, w.Code, w.Body, c.code)
		}
	}
}
