//go:build root

package integration

import (
	"crypto/tls"
	"crypto/x509"
	"database/sql"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestAccess: the API over TLS with keys, as an operator would set it up with
// the command line, and what goes wrong.
func TestAccess(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command(program(t, "sandboxd"), "tls", "init", "--dir", dir, "--host", "box.example").CombinedOutput(); err != nil {
		t.Fatalf("tls init: %v %s", err, out)
	}
	at := freeAddress(t)
	refused := exec.Command(program(t, "sandboxd"), "--check-config", "--listen", at, "--tls-cert", "/nonexistent")
	if out, err := refused.CombinedOutput(); err == nil || !strings.Contains(string(out), "sandboxd tls init") {
		t.Errorf("listening without a certificate: %v %s", err, out)
	}
	d := install(t, "access:\n  connections_per_address: 20\n", "--listen", at, "--tls-cert", filepath.Join(dir, "server.pem"), "--tls-key", filepath.Join(dir, "server-key.pem"))
	admin := func(args ...string) string {
		t.Helper()
		out, errs, code := d.cli(t, nil, "", args...)
		if code != 0 {
			t.Fatalf("sandbox %v: %d %s", args, code, errs)
		}
		return strings.TrimSpace(out)
	}
	key := admin("key", "create", "alice", "--name", "test")
	env := []string{"SANDBOX_HOST=https://" + at, "SANDBOX_CA=" + filepath.Join(dir, "ca.pem"), "SANDBOX_KEY=" + key}
	alice := func(args ...string) (string, error) {
		cmd := exec.Command(program(t, "sandbox"), args...)
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := alice("whoami"); err != nil || !strings.Contains(out, "alice") {
		t.Fatalf("whoami over TLS: %v %s", err, out)
	}
	if out, err := alice("run", "--", "echo", "over", "tls"); err != nil || out != "over tls\n" {
		t.Errorf("run over TLS: %v %s", err, out)
	}
	if out, err := alice("key", "ls"); err == nil || !strings.Contains(out, "admin") {
		t.Errorf("keys for a developer: %v %s", err, out)
	}
	t.Run("tls", func(t *testing.T) { tlsVersions(t, at, filepath.Join(dir, "ca.pem")) })
	t.Run("slow clients", func(t *testing.T) { slowClients(t, at, alice) })
	t.Run("revoke", func(t *testing.T) { revokeCuts(t, at, dir, key, admin) })
	if out, err := alice("whoami"); err == nil || !strings.Contains(out, "revoked") {
		t.Errorf("with a revoked key: %v %s", err, out)
	}
	if out := admin("audit", "ls", "--owner", "alice"); !strings.Contains(out, " run ") || strings.Contains(out, "create-key") {
		t.Errorf("audit of alice: %s", out)
	}
	if out := admin("audit", "verify"); !strings.HasPrefix(out, "ok: ") {
		t.Errorf("audit verify: %s", out)
	}
	d.kill() // what was answered some milliseconds ago is in the audit
	d.start()
	if out := admin("audit", "ls"); !strings.Contains(out, "revoke-key") || !strings.Contains(out, "create-key") {
		t.Errorf("audit after a kill: %s", out)
	}
	d.stop()
	db, err := sql.Open("sqlite3", filepath.Join(d.Dir, "state", "sandboxd.db"))
	if err == nil {
		_, err = db.Exec(`UPDATE audit SET owner = 'mallory' WHERE seq = 2`)
		err = errors.Join(err, db.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	d.start()
	if out, _, code := d.cli(t, nil, "", "audit", "verify"); code != 1 || !strings.Contains(out, "BROKEN at row 2") {
		t.Errorf("verify of a changed row: %d %s", code, out)
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// tlsVersions: nothing below 1.2, and nothing in the clear.
func tlsVersions(t *testing.T, at, ca string) {
	pem, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	for version, good := range map[uint16]bool{tls.VersionTLS11: false, tls.VersionTLS12: true, tls.VersionTLS13: true} {
		c, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", at, &tls.Config{RootCAs: pool, ServerName: "box.example", MinVersion: version, MaxVersion: version})
		if (err == nil) != good {
			t.Errorf("TLS %x: %v", version, err)
		}
		if err == nil {
			_ = c.Close()
		}
	}
	if resp, err := http.Get("http://" + at + "/healthz"); err == nil {
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("in the clear: %s", resp.Status)
		}
	}
}

// slowClients: those that never end their request are cut off, however many
// connections they open, and others are served meanwhile.
func slowClients(t *testing.T, at string, others func(...string) (string, error)) {
	const bound = 20 // of the configuration
	from := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}, Timeout: 5 * time.Second}
	var all []net.Conn
	for range 2 * bound {
		c, err := from.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write([]byte{22}) // of a ClientHello, and no more
		all = append(all, c)
	}
	testenv.Eventually(t, 30*time.Second, "no more than the bound stay open, the newest", func() bool {
		all = slices.DeleteFunc(all, func(c net.Conn) bool {
			_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
			_, err := c.Read(make([]byte, 1))
			return !errors.Is(err, os.ErrDeadlineExceeded)
		})
		return len(all) <= bound
	})
	if len(all) == 0 {
		t.Error("no connection of the address stayed open")
	}
	if out, err := others("whoami"); err != nil {
		t.Errorf("another client meanwhile: %v %s", err, out)
	}
}

// revokeCuts: a command that runs over a key is cut with it, at once.
func revokeCuts(t *testing.T, at, dir, key string, admin func(...string) string) {
	pem, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	cl, err := client.New("https://"+at, client.WithKey(key), client.WithAuthority(pem), client.WithPatience(0))
	if err != nil {
		t.Fatal(err)
	}
	sb, err := cl.Create(t.Context(), sandbox.Spec{}, "")
	if err != nil {
		t.Fatal(err)
	}
	p, err := cl.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"sleep", "600"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ended := make(chan error, 1)
	go func() { _, err := p.Next(); ended <- err }()
	list := admin("key", "ls", "--owner", "alice")
	id := strings.Fields(list[strings.Index(list, "key_"):])[0]
	begin := time.Now()
	admin("key", "revoke", id)
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the stream went on")
		}
		t.Logf("the stream ended %v after the revocation began: %v", time.Since(begin).Round(time.Millisecond), err)
	case <-time.After(10 * time.Second):
		t.Error("a stream outlives its key")
	}
	if _, err := cl.Sandbox(t.Context(), string(sb.ID)); sandbox.CodeOf(err) != "key_revoked" {
		t.Errorf("with a revoked key: %v", err)
	}
	admin("rm", string(sb.ID))
}
