//go:build root

package faults

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// held is a request that goes on: its head, what is sent after it, and how.
type held struct {
	name, method, path string
	head               []string
	body               string
	send               int // one of the below
}

const (
	whole   = iota // the body is sent
	half           // the body goes on: a chunk of it is sent
	socket         // it is upgraded to a WebSocket, and the body is the first message
	unread         // nobody reads the answer
	dialect        // it is for the E2B listener, with the sandbox's token
	dialectHalf
)

// ways are the requests that go on, in the sandbox box with the process p.
func (w *tenants) ways(owner, box, pid string) []held {
	in := "/v1/sandboxes/" + box
	frame := func(s string) string { return "\x00\x00\x00\x00" + string(rune(len(s))) + s }
	connect := []string{"Content-Type", "application/connect+json"}
	tar := []string{"Content-Type", "application/x-tar"}
	form := []string{"Content-Type", "multipart/form-data; boundary=x"}
	part := "--x\r\nContent-Disposition: form-data; name=\"%s\"; filename=\"f\"\r\n\r\n%s"
	request := fmt.Sprintf(part, "request", `{"dockerfile":"RlJPTSBob3N0"}`) + "\r\n" + fmt.Sprintf(part, "context", "half")
	return []held{
		{"exec", "POST", in + "/exec", nil, `{"argv":["sleep","600"]}`, whole},
		{"exec, WebSocket", "GET", in + "/exec", nil, `{"argv":["sleep","600"]}`, socket},
		{"run, WebSocket", "GET", "/v1/run", nil, `{"sandbox":{` + small + `},"process":{"argv":["sleep","600"]}}`, socket},
		{"attach", "GET", in + "/processes/" + pid + "/attach", nil, "", socket},
		{"logs", "GET", in + "/processes/" + pid + "/output?follow=true", nil, "", whole},
		{"lines", "GET", in + "/processes/" + pid + "/output?follow=true", []string{"Accept", "application/x-ndjson"}, "", whole},
		{"events", "GET", "/v1/events", []string{"Accept", "text/event-stream"}, "", whole},
		{"watch", "GET", in + "/files/watch?path=/tmp", nil, "", whole},
		{"port", "GET", in + "/ports/8123/connect", []string{"Connection", "Upgrade", "Upgrade", "sandbox-port"}, "", whole},
		{"archive in", "PUT", in + "/files/archive?path=/tmp", tar, "half", half},
		{"archive out", "GET", in + "/files/archive?path=/usr/lib", nil, "", unread},
		{"file in", "PUT", in + "/files?path=/tmp/x", []string{"Content-Type", "application/octet-stream"}, "half", half},
		{"image in", "POST", "/v1/images?name=own/" + owner + "/half", tar, "half", half},
		{"snapshot in", "POST", "/v1/snapshots", tar, "half", half},
		{"build", "POST", "/v1/images/build", form, request, half},
		{
			"MCP", "POST", "/mcp",
			[]string{"Accept", "application/json, text/event-stream"},
			`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"exec","arguments":{"sandbox":"` + box + `","command":"sleep 600","timeout_seconds":600}}}`, whole,
		},
		{"E2B start", "POST", "/process.Process/Start", connect, frame(`{"process":{"cmd":"sleep","args":["600"]}}`), dialect},
		{"E2B watch", "POST", "/filesystem.Filesystem/WatchDir", connect, frame(`{"path":"/tmp"}`), dialect},
		{"E2B file in", "POST", "/files?path=/tmp/y", form, fmt.Sprintf(part, "file", "half"), dialectHalf},
	}
}

// begin sends a request and returns its connection.
func (w *tenants) begin(h held, key, token string) (net.Conn, error) {
	var c net.Conn
	var err error
	if h.send == dialect || h.send == dialectHalf {
		c, err = net.Dial("tcp", tenantsE2B)
	} else {
		c, err = net.Dial("unix", filepath.Join(w.Dir, "run", "sandboxd.sock"))
	}
	if err != nil {
		return nil, err
	}
	head := []string{"Host", "x", "X-API-Key", key, "X-Access-Token", token}
	if len(h.head) == 0 || h.head[0] != "Connection" && h.send != socket {
		head = append(head, "Connection", "close")
	}
	body := h.body
	switch h.send {
	case half, dialectHalf:
		head = append(head, "Transfer-Encoding", "chunked")
		body = fmt.Sprintf("%x\r\n%s\r\n", len(body), body)
	case socket:
		head = append(head, "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA==")
		if body != "" {
			body = string([]byte{0x81, 0x80 | byte(len(body)), 0, 0, 0, 0}) + body // a mask of zeroes
		}
	default:
		head = append(head, "Content-Length", fmt.Sprint(len(body)))
		if len(h.head) == 0 || h.head[0] != "Content-Type" {
			head = append(head, "Content-Type", "application/json")
		}
	}
	text := h.method + " " + h.path + " HTTP/1.1\r\n"
	for head := append(head, h.head...); len(head) > 0; head = head[2:] {
		text += head[0] + ": " + head[1] + "\r\n"
	}
	_, err = io.WriteString(c, text+"\r\n"+body)
	return c, err
}

// await returns what a request was answered once its connection is closed.
func (h held) await(c net.Conn) string {
	if h.send == unread {
		for { // what it answers fills the socket: only writing tells
			if _, err := c.Write([]byte("\n")); err != nil {
				return ""
			}
			<-time.After(10 * time.Millisecond)
		}
	}
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "HTTP/1.1 1") && !strings.HasPrefix(line, "HTTP/1.1 2") { // refused: the connection may stay
		return line
	}
	rest, _ := io.ReadAll(r)
	return line + string(rest)
}

// streams end with the right that let them in, in every dialect and both ways;
// those of somebody else go on.
func (w *tenants) streams(t *testing.T) {
	type ended struct {
		who, name, said string
		at              time.Time
	}
	all := make(chan ended, 1000)
	open := map[string]bool{}
	begin := func(who, owner string) {
		w.root("PUT", "/v1/owners/"+owner, roomy)
		w.key(who, owner, "developer")
		made := w.e2b("POST", "/sandboxes", `{"templateID":"base"}`, "X-API-Key", w.keys[who])
		id, token := field(t, made, "sandboxID"), field(t, made, "envdAccessToken")
		a := w.native(who, "POST", "/v1/sandboxes/"+id+"/processes", `{"argv":["python3","-c","import socket,time\ns=socket.create_server(('0.0.0.0',8123))\nprint('listens',flush=True)\ntime.sleep(600)"]}`)
		pid := field(t, a, "id")
		for deadline := time.Now().Add(time.Minute); !strings.Contains(w.native(who, "GET", "/v1/sandboxes/"+id+"/processes/"+pid+"/output", "").body, "listens"); {
			if time.Now().After(deadline) {
				t.Fatalf("nothing listens in the sandbox: %d %s", a.status, a.body)
			}
			<-time.After(20 * time.Millisecond)
		}
		for _, h := range w.ways(owner, id, pid) {
			c, err := w.begin(h, w.keys[who], token)
			if err != nil {
				t.Fatalf("%s: %v", h.name, err)
			}
			t.Cleanup(func() { _ = c.Close() })
			open[who+": "+h.name] = true
			go func() { said := h.await(c); all <- ended{who, h.name, said, time.Now()} }()
		}
	}
	none := func(t *testing.T, why string, wait time.Duration) {
		t.Helper()
		for deadline := time.After(wait); ; {
			select {
			case e := <-all:
				t.Fatalf("%s: %s of %s ended: %q", why, e.name, e.who, e.said)
			case <-deadline:
				return
			}
		}
	}
	w.t = t
	begin("control", "bob")
	for _, c := range []struct{ what, end, back, code string }{
		{"disabled", `{"disabled":true}`, `{"disabled":false}`, "owner_disabled"},
		{"demoted", `{"role":"viewer"}`, `{"role":"developer"}`, "role_too_low"},
		{"revoked", "", "", "key_revoked"},
		{"removed", "", "", "key_revoked"},
	} {
		t.Run(c.what, func(t *testing.T) {
			w.t = t
			begin("dave", "dave")
			none(t, "before anything changed", time.Second)
			began := time.Now()
			switch c.what {
			case "revoked":
				w.root("DELETE", "/v1/keys/"+w.ids["dave"], "")
			case "removed":
				w.root("DELETE", "/v1/owners/dave", "")
			default:
				w.root("PUT", "/v1/owners/dave", c.end)
				defer w.root("PUT", "/v1/owners/dave", c.back)
			}
			left := map[string]bool{}
			for name := range open {
				left[name] = strings.HasPrefix(name, "dave")
			}
			slowest := ended{at: began}
			for n := len(w.ways("", "", "")); n > 0; n-- {
				select {
				case e := <-all:
					if e.who != "dave" {
						t.Fatalf("%s of %s ended with dave's rights", e.name, e.who)
					}
					switch e.name {
					case "exec", "lines", "events", "watch", "MCP":
						if !strings.Contains(e.said, c.code) {
							t.Errorf("%s does not say %s: %q", e.name, c.code, e.said)
						}
					}
					if (e.name == "E2B start" || e.name == "E2B watch") && !strings.Contains(e.said, `{"error":{"code":"permission_denied"`) {
						t.Errorf("%s ends as if all were well: %q", e.name, e.said)
					}
					delete(left, "dave: "+e.name)
					if e.at.After(slowest.at) {
						slowest = e
					}
				case <-time.After(10 * time.Second):
					for name, his := range left {
						if his {
							t.Errorf("%s goes on after its owner was %s", name, c.what)
						}
					}
					return
				}
			}
			t.Logf("the last, %s, ended after %s", slowest.name, slowest.at.Sub(began))
		})
		if t.Failed() {
			return
		}
	}
	none(t, "nothing of theirs changed", 100*time.Millisecond)
}

// background: what goes on by itself ends with the right to begin it, too;
// what somebody else began goes on.
func (w *tenants) background(t *testing.T) {
	w.t = t
	silent, err := net.Listen("tcp", "127.0.0.1:0") // a registry that never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	build := fmt.Sprintf("--x\r\nContent-Disposition: form-data; name=\"request\"\r\n\r\n%s\r\n--x--\r\n", `{"dockerfile":"FROM host\nRUN sleep 600"}`)
	begin := func(who, owner string) (ids []string) {
		w.root("PUT", "/v1/owners/"+owner, `{"role":"operator"}`) // who may pull from here
		w.key(who, owner, "operator")
		for _, a := range []reply{
			w.native(who, "POST", "/v1/images/build", build, "Content-Type", "multipart/form-data; boundary=x", "Prefer", "respond-async"),
			w.native(who, "POST", "/v1/images/pull", fmt.Sprintf(`{"reference":"%s/app:1","name":"own/%s/app"}`, silent.Addr(), owner), "Prefer", "respond-async"),
		} {
			if a.status != http.StatusAccepted {
				t.Fatalf("begin: %d %s", a.status, a.body)
			}
			ids = append(ids, field(t, a, "id"))
		}
		return ids
	}
	status := func(id, wait string) reply { return w.root("GET", "/v1/operations/"+id+"?wait_seconds="+wait, "") }
	control := begin("builder", "carol")
	for _, c := range []struct{ what, method, path, body string }{
		{"disabled", "PUT", "/v1/owners/dora", `{"disabled":true}`},
		{"demoted", "PUT", "/v1/owners/dora", `{"role":"viewer"}`},
		{"revoked", "DELETE", "/v1/keys/", ""},
		{"removed", "DELETE", "/v1/owners/dora", ""},
	} {
		ids := begin("dora", "dora")
		for _, id := range ids {
			if a := status(id, "1"); field(t, a, "status") != "running" {
				t.Fatalf("before dora was %s: %s", c.what, a.body)
			}
		}
		if c.what == "revoked" {
			c.path += w.ids["dora"]
		}
		began := time.Now()
		w.root(c.method, c.path, c.body)
		for _, id := range ids {
			if a := status(id, "20"); field(t, a, "status") != "cancelled" {
				t.Errorf("after dora was %s: %s", c.what, a.body)
			}
		}
		t.Logf("%s: they ended after %s", c.what, time.Since(began))
		if c.what != "removed" {
			w.root("PUT", "/v1/owners/dora", `{"disabled":false}`)
		}
	}
	for _, id := range control {
		if a := status(id, "0"); field(t, a, "status") != "running" {
			t.Errorf("the control: %s", a.body)
		}
		w.root("DELETE", "/v1/operations/"+id, "")
	}
}
