//go:build root

package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ownersConfig lets members of a group that every Debian has to the socket.
const ownersConfig = "socket_group: users\n"

// usersGroup is that group.
const usersGroup = 100

// citizen is somebody on the machine who is not root, and the daemon's client.
type citizen struct {
	uid int
	http.Client
}

// citizenOf returns a client whose connections are a user's: the daemon asks
// the kernel who is at the other end. Each is made on a thread of its own that
// becomes the user, and ends with that.
func (d *daemon) citizenOf(t testing.TB, uid int) *citizen {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		type result struct {
			c   net.Conn
			err error
		}
		done := make(chan result)
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread goes with this goroutine
			groups := []uint32{usersGroup}
			_, _, e1 := unix.RawSyscall(unix.SYS_SETGROUPS, 1, uintptr(unsafe.Pointer(&groups[0])), 0)
			_, _, e2 := unix.RawSyscall(unix.SYS_SETRESGID, usersGroup, usersGroup, usersGroup)
			_, _, e3 := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid))
			if e1|e2|e3 != 0 {
				done <- result{nil, fmt.Errorf("become user %d: %w", uid, errors.Join(e1, e2, e3))}
				return
			}
			c, err := net.Dial("unix", filepath.Join(d.Dir, "run", "sandboxd.sock"))
			done <- result{c, err}
		}()
		r := <-done
		return r.c, r.err
	}
	c := &citizen{uid: uid, Client: http.Client{Transport: &http.Transport{DialContext: dial}, Timeout: time.Minute}}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// answer is what a request came to, without what differs each time.
type answer struct {
	status int
	body   string
}

func (c *citizen) ask(t testing.TB, method, path, body string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://x"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Request-Id", "same")
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := c.Do(req)
	if err != nil {
		t.Fatalf("%s %s as %d: %v", method, path, c.uid, err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("%s %s as %d: %v", method, path, c.uid, err)
	}
	return answer{res.StatusCode, string(b)}
}

// made asks for something and decodes it.
func made[T any](t testing.TB, c *citizen, method, path, body string) (v T) {
	t.Helper()
	a := c.ask(t, method, path, body)
	if a.status/100 != 2 {
		t.Fatalf("%s %s as %d: %d %s", method, path, c.uid, a.status, a.body)
	}
	if err := json.NewDecoder(bytes.NewReader([]byte(a.body))).Decode(&v); err != nil {
		t.Fatalf("%s %s: %v in %s", method, path, err, a.body)
	}
	return v
}

// TestOwnersAreApart: what one user has another cannot see, name, work in,
// take or watch; the answers are those of what nobody has, byte for byte. The
// same requests work on what is one's own. A quota holds however many ask.
func TestOwnersAreApart(t *testing.T) {
	d := install(t, ownersConfig)
	a, b := d.citizenOf(t, 61001), d.citizenOf(t, 61002)
	create := func(c *citizen, name string) sandbox.Sandbox {
		return made[sandbox.Sandbox](t, c, "POST", "/v1/sandboxes", fmt.Sprintf(`{"name":%q,"limits":{"memory_bytes":67108864}}`, name))
	}
	of, own := create(a, "web"), create(b, "web") // a name is no secret to be found out
	if of.Owner != "uid:61001" || own.Owner != "uid:61002" {
		t.Fatalf("owners %q and %q", of.Owner, own.Owner)
	}
	snap := made[sandbox.Snapshot](t, a, "POST", "/v1/sandboxes/web/snapshots", `{"name":"s"}`)
	mine := made[sandbox.Snapshot](t, b, "POST", "/v1/sandboxes/web/snapshots", `{"name":"s"}`)

	box, shot := string(sandbox.NewID()), string(sandbox.NewSnapshotID()) // of nobody
	for _, c := range []struct{ method, path, body string }{
		{"GET", "/v1/sandboxes/BOX", ""},
		{"GET", "/v1/sandboxes/BOX/usage", ""},
		{"GET", "/v1/sandboxes/BOX/processes", ""},
		{"GET", "/v1/sandboxes/BOX/network", ""},
		{"GET", "/v1/sandboxes/BOX/files/list?path=/", ""},
		{"GET", "/v1/sandboxes/BOX/files?path=/etc/hostname", ""},
		{"GET", "/v1/sandboxes/BOX/history", ""},
		{"GET", "/v1/events?sandbox=BOX", ""},
		{"GET", "/v1/snapshots/SNAP", ""},
		{"POST", "/v1/sandboxes/BOX/exec", `{"argv":["true"]}`},
		{"POST", "/v1/sandboxes/BOX/processes", `{"argv":["true"]}`},
		{"POST", "/v1/sandboxes/BOX/snapshots", `{}`},
		{"POST", "/v1/sandboxes/BOX/pause", ""},
		{"POST", "/v1/sandboxes/BOX/resume", ""},
		{"PATCH", "/v1/sandboxes/BOX", `{"ttl_seconds":600}`},
		{"DELETE", "/v1/snapshots/SNAP", ""},
		{"DELETE", "/v1/sandboxes/BOX", ""},
	} {
		fill := func(text, box, snap string) string {
			return strings.NewReplacer("BOX", box, "SNAP", snap).Replace(text)
		}
		blank := func(s, box, snap string) string {
			return strings.NewReplacer(box, "BOX", snap, "SNAP").Replace(s)
		}
		foreign := b.ask(t, c.method, fill(c.path, string(of.ID), string(snap.ID)), c.body)
		none := b.ask(t, c.method, fill(c.path, box, shot), c.body)
		if foreign.body, none.body = blank(foreign.body, string(of.ID), string(snap.ID)), blank(none.body, box, shot); foreign != none || none.status != http.StatusNotFound {
			t.Errorf("%s %s of another: %d %s\n  of none: %d %s", c.method, c.path, foreign.status, foreign.body, none.status, none.body)
		}
		if got := b.ask(t, c.method, fill(c.path, string(own.ID), string(mine.ID)), c.body); got.status/100 != 2 { // the control
			t.Errorf("%s %s of one's own: %d %s", c.method, c.path, got.status, got.body)
		}
	}
	if got, err := d.Sandbox(t.Context(), string(of.ID)); err != nil || got.Status != sandbox.StatusRunning {
		t.Fatalf("after all that the other's sandbox is %s, %v", got.Status, err)
	}
	for path, want := range map[string]string{"/v1/sandboxes?all=true": string(own.ID), "/v1/events?limit=1000": string(own.ID), "/v1/usage?by=sandbox": string(own.ID)} {
		got := b.ask(t, "GET", path, "")
		if got.status != http.StatusOK || strings.Contains(got.body, string(of.ID)) || strings.Contains(got.body, "61001") || !strings.Contains(got.body, want) {
			t.Errorf("%s as the one without %s: %d %s", path, of.ID, got.status, got.body)
		}
	}

	const quota = 3 // of developers of whom nothing else is said
	var wg sync.WaitGroup
	answers := make(chan answer, 20)
	for i := range cap(answers) {
		wg.Go(func() {
			answers <- b.ask(t, "POST", "/v1/sandboxes", fmt.Sprintf(`{"name":"many-%d","limits":{"memory_bytes":67108864}}`, i))
		})
	}
	wg.Wait()
	close(answers)
	count := map[int]int{}
	for r := range answers {
		count[r.status]++
		if r.status != http.StatusCreated && !strings.Contains(r.body, "quota_sandboxes") {
			t.Errorf("create beyond the quota: %d %s", r.status, r.body)
		}
	}
	if count[http.StatusCreated] != quota || count[http.StatusTooManyRequests] != 20-quota {
		t.Errorf("of 20 creates at once: %v, want %d made", count, quota)
	}
	create(a, "more") // it is not the other's quota
}
