package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

// hostile steers a terminal in each way there is, and ends its line. It begins
// like an event of the network, so that 'net log' shows it.
const hostile = "net.a\x1b[2J\x07\u009b31m\u202e\u2066b\x7f\r\nforged"

// hostileDaemon answers every request as the API's description says, with
// hostile in each text, or with a problem that says it.
type hostileDaemon struct {
	doc struct {
		Paths      map[string]map[string]struct{ Responses map[string]hostileResponse }
		Components struct{ Schemas map[string]hostileSchema }
	}
	yes     bool // what every bool is
	problem bool
}

type hostileResponse struct {
	Content map[string]struct{ Schema hostileSchema }
}

type hostileSchema struct {
	Ref                     string `json:"$ref"`
	Type                    any    // a word, or a list of them
	Format, ContentEncoding string
	Properties              map[string]hostileSchema
	AdditionalProperties    any
	Items                   *hostileSchema
}

// numbers are the texts in which clients read a number.
var numbers = regexp.MustCompile(`^(amount|charged|cost|limit|min_profit|outside|price|profit|quantity|revenue|spent|total|usage)$`)

// value is one value of a schema: lists have one item, and so have maps.
func (d *hostileDaemon) value(name string, s hostileSchema, depth int) any {
	if s.Ref != "" {
		s = d.doc.Components.Schemas[strings.TrimPrefix(s.Ref, "#/components/schemas/")]
	}
	if types, ok := s.Type.([]any); ok {
		s.Type = types[0]
	}
	switch {
	case depth > 8:
		return nil
	case s.Type == "object":
		m := map[string]any{}
		for k, p := range s.Properties {
			m[k] = d.value(k, p, depth+1)
		}
		if more, ok := s.AdditionalProperties.(map[string]any); ok {
			b, _ := json.Marshal(more)
			var p hostileSchema
			_ = json.Unmarshal(b, &p)
			m[hostile] = d.value(name, p, depth+1)
		}
		return m
	case s.Type == "array":
		return []any{d.value(name, *s.Items, depth+1)}
	case s.Type == "boolean":
		return d.yes
	case s.Type == "integer", s.Type == "number":
		return 1
	case s.Format == "date-time":
		return "2026-01-02T03:04:05Z"
	case s.Format == "ip":
		return "10.0.0.1"
	case s.ContentEncoding == "base64":
		return base64.StdEncoding.EncodeToString([]byte(hostile))
	case s.Type == "string" && numbers.MatchString(name):
		return "1"
	case name == "hash", name == "head", name == "prev":
		return strings.Repeat("0", 64)
	}
	return hostile
}

// find returns what the description says of a request; a path with the fewest
// parameters comes first.
func (d *hostileDaemon) find(method, path string) (found map[string]hostileResponse) {
	least := 100
	for p, methods := range d.doc.Paths {
		m, ok := methods[strings.ToLower(method)]
		if n := strings.Count(p, "{"); ok && n < least && likePath(p, path) {
			least, found = n, m.Responses
		}
	}
	return found
}

func likePath(pattern, path string) bool {
	want, have := strings.Split(pattern, "/"), strings.Split(path, "/")
	return slices.EqualFunc(want, have, func(w, h string) bool { return w == h || strings.HasPrefix(w, "{") })
}

func (d *hostileDaemon) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	if d.problem {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusConflict)
		_ = json.NewEncoder(w).Encode(d.value("", d.doc.Components.Schemas["Problem"], 0))
		return
	}
	rs := d.find(r.Method, r.URL.EscapedPath())
	content := rs["200"].Content
	for _, code := range []string{"201", "202"} {
		if content == nil {
			content = rs[code].Content
		}
	}
	answer := func(kind string, over map[string]any) string {
		v := d.value("", content[kind].Schema, 0)
		if m, ok := v.(map[string]any); ok {
			maps.Copy(m, over)
		}
		b, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		return string(b)
	}
	var body string
	switch q := r.URL.Query(); {
	case q.Has("cursor") || q.Has("after") || q.Has("before"):
		body = "{}" // the end of the list
	case content == nil:
	case content["text/event-stream"].Schema.Ref != "" && r.Header.Get("Accept") == "text/event-stream":
		body = "event: progress\ndata: " + answer("text/event-stream", nil) + "\n\n"
		if content["application/json"].Schema.Ref != "" {
			body += "event: done\ndata: " + answer("application/json", nil) + "\n\n"
		}
	case content["application/x-ndjson"].Schema.Ref != "":
		data := []byte(strings.TrimSuffix(hostile, "forged")) // what a step prints has lines
		for _, kind := range []string{"note", "step", "output", "done", "image"} {
			body += answer("application/x-ndjson", map[string]any{"type": kind, "data": data}) + "\n"
		}
	default:
		over := map[string]any{}
		if strings.HasSuffix(r.URL.Path, "/promotions") { // or it is watched for ever
			over["status"] = "completed"
		}
		body = answer("application/json", over)
	}
	if body == "" {
		w.WriteHeader(http.StatusNoContent)
	}
	_, _ = io.WriteString(w, body)
}

// hostileArgs are the words after a command where those in its usage will not do.
var hostileArgs = map[string]string{
	"audit verify": "", "budget set": "x --cpu 90m", "cost add": "x --meter m --qty 1", "revenue add": "x --amount 1", "cost cancel": "1 --reason r", "files chmod": "x 0755 /a",
	"files cat": "x /a", "fork": "x", "cp": "x:/a DIR/to", "key ls": "--all", "image build": "DIR",
	"port-forward": "x 80", "image import": "a", "key create": "alice", "net explain": "x 10.0.0.1:22", "net fault": "x --partition", "net set": "x --net off", "port publish": "x 80",
	"project create": "p --goal g", "project deploy": "x --type t --config DIR/agent", "project enter": "x cost 1 --key k", "project experiment complete": "x e --success",
	"project experiment start": "x h", "project kill": "x --yes", "project rm": "x --yes", "project promote": "x --yes --no-wait --force", "project set": "x --goal g", "schedule add": "x reset @daily",
	"secret set": "s", "template set": "t a", "timeout": "x 30m", "undo": "x", "volume create": "v", "volume set": "v --size 1g", "webhook create": "https://a.example/", "owner set": "alice --role viewer",
}

// Commands of which a part is left out: those that print what is not ours to
// change (the output of commands, files, archives), and those that print nothing
// of an answer, or numbers alone.
var (
	rawOutput = strings.Fields("attach cp exec files-cat image-export logs port-forward run shell snapshot-export")
	silent    = regexp.MustCompile(`(^| )(rm|kill|chmod|mkdir|mv|revoke|pool|fault|prune|cancel)$|^(cost|revenue) add$|^files put$|^port publish$`)
)

// TestHostileAnswers runs every command there is against a daemon whose answers,
// or whose errors, hold hostile in each text: none of it steers the terminal or
// begins a line there, and what is to be seen of it is.
func TestHostileAnswers(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"Dockerfile": "FROM a\n", "agent": "command: [a]\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d := &hostileDaemon{}
	w := httptest.NewRecorder()
	newWorld(t).handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/openapi.json", http.NoBody))
	if err := json.Unmarshal(w.Body.Bytes(), &d.doc); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(d)
	defer srv.Close()
	run := func(args ...string) (out, errs string) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stdout, stderr := outputs{end: cancel, endless: args[0] == "top"}, bytes.Buffer{}
		c := &cli{name: "sandbox", in: strings.NewReader("v"), out: &stdout, err: &stderr, getenv: func(k string) string {
			return map[string]string{"SANDBOX_HOST": srv.URL}[k]
		}}
		c.main(ctx, args)
		return stdout.buf.String(), stderr.String()
	}
	completed := 0
	for _, cmd := range leaves((&cli{name: "sandbox", getenv: os.Getenv}).root()) {
		name := strings.TrimPrefix(cmd.CommandPath(), "sandbox ")
		if slices.Contains([]string{"man", "completion", "mcp"}, name) { // they ask nothing, and show nothing
			continue
		}
		words, ok := hostileArgs[name]
		if !ok {
			words = strings.Repeat("x ", len(regexp.MustCompile(`(?m) [A-Z]{2,}…?( |$)`).FindAllString(strings.ReplaceAll(cmd.Use, " ", "  "), -1)))
		}
		args := append(strings.Fields(name), strings.Fields(strings.ReplaceAll(words, "DIR", dir))...)
		t.Run(name, func(t *testing.T) {
			d.problem = false
			words, _ := run(append(append([]string{"__complete"}, strings.Fields(name)...), "")...)
			if completed += strings.Count(words, `net.a\`); sandbox.PlainText(words) != words || regexp.MustCompile(`(?m)^forged`).MatchString(words) {
				t.Errorf("completion: %q", words)
			}
			for _, how := range []string{"problem", "json", "yaml", "table", "quiet"} {
				if d.problem = how == "problem"; !d.problem && slices.Contains(rawOutput, strings.ReplaceAll(name, " ", "-")) {
					continue
				}
				args := append(args, "-o", how)
				switch {
				case d.problem:
					args[len(args)-1] = "table"
				case how == "quiet" && cmd.Flags().Lookup(how) == nil:
					continue
				case how == "quiet":
					args = append(args[:len(args)-2], "-q")
				}
				all := ""
				for _, d.yes = range []bool{false, true} {
					out, errs := run(args...)
					if all += out + errs; strings.Contains(errs, "(broken_answer)") || strings.Contains(errs, "usage: ") {
						t.Errorf("%s: control: it did not get as far: %s", how, errs)
					}
				}
				if sandbox.PlainText(all) != all || regexp.MustCompile(`(?m)^forged`).MatchString(all) {
					t.Errorf("%s: %q", how, all)
				}
				if !strings.Contains(all, `net.a\`) && (d.problem || !silent.MatchString(name)) {
					t.Errorf("%s: control: nothing of it is shown: %s", how, all)
				}
			}
		})
	}
	if completed < 30 {
		t.Errorf("control: %d words of completions are of the daemon", completed)
	}
}

// outputs ends a command that has no end by itself once it printed something.
type outputs struct {
	buf     bytes.Buffer
	end     func()
	endless bool
}

func (o *outputs) Write(b []byte) (int, error) {
	if o.endless {
		o.end()
	}
	return o.buf.Write(b)
}

func leaves(cmd *cobra.Command) (out []*cobra.Command) {
	for _, sub := range cmd.Commands() {
		out = append(out, leaves(sub)...)
	}
	if cmd.Runnable() && cmd.Name() != "net" { // which shows its help
		out = append(out, cmd)
	}
	return out
}
