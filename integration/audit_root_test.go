//go:build root

package integration

import (
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

// eventsOf returns the network's events of a sandbox, oldest first.
func eventsOf(t *testing.T, d *daemon, ref string) []sandbox.Event {
	t.Helper()
	var out []sandbox.Event
	q := client.EventQuery{Sandbox: ref, Limit: sandbox.MaxPage}
	for {
		events, next, err := d.Events(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		if len(events) == 0 {
			return out
		}
		for _, e := range events {
			if strings.HasPrefix(e.Type, "net.") {
				out = append(out, e)
			}
		}
		q.After = next
	}
}

// awaitEvent waits until a sandbox has an event of a type that match takes.
func awaitEvent(t *testing.T, d *daemon, ref, kind string, match func(map[string]string) bool) sandbox.Event {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); ; <-time.After(50 * time.Millisecond) {
		all := eventsOf(t, d, ref)
		for _, e := range all {
			if e.Type == kind && match(e.Data) {
				return e
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("no such event %s; there are %+v", kind, all)
		}
	}
}

// TestAudit: what a sandbox reaches, is refused and asks for is told, with the
// reason, also by a daemon that was started again; 'net explain' says the same
// beforehand, and 'net set' changes it.
func TestAudit(t *testing.T) {
	neighbours(t)
	startNameServer(t, map[string]string{"www.example.com.": "60 IN A " + publicAddr, "evil.example.net.": "60 IN A " + publicAddr})
	d := install(t, namesConfig)
	d.create(t, sandbox.Spec{Name: "dev", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"*.example.com:8080"}}})
	probe := d.give(t, "dev")
	dial := func(host, port string) bool {
		t.Helper()
		target := "tcp/" + host + ":" + port
		return d.inside(t, "dev", "root", probe, "dial", target)[target] == "ok"
	}
	cli := func(args ...string) (string, int) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), program(t, "sandbox"), args...)
		cmd.Env = append(cmd.Environ(), "SANDBOX_HOST="+d.host())
		out, _ := cmd.CombinedOutput() // its exit code is looked at
		return string(out), cmd.ProcessState.ExitCode()
	}
	explained := func(dest string, want bool, part string) {
		t.Helper()
		out, code := cli("net", "explain", "dev", dest)
		if (code == 0) != want || !strings.Contains(out, part) {
			t.Errorf("net explain %s: exit %d, want %v and %q:\n%s", dest, code, want, part, out)
		}
	}
	explained(publicAddr+":8080", false, "--add "+publicAddr+":8080")
	explained("www.example.com:8080", true, "*.example.com:8080")
	explained("evil.example.net:8080", false, "the resolver does not answer it")
	if dial(publicAddr, "8080") {
		t.Error("an address no rule names is reached")
	}
	denied := awaitEvent(t, d, "dev", sandbox.EventNetDenied, func(m map[string]string) bool { return m["dest"] == publicAddr && m["port"] == "8080" })
	if denied.Data["why"] != "default" || denied.Data["protocol"] != "tcp" {
		t.Errorf("%+v", denied)
	}
	if !dial("www.example.com", "8080") {
		t.Fatal("the permitted name is not reached")
	}
	explained(publicAddr+":8080", true, "www.example.com")
	awaitEvent(t, d, "dev", sandbox.EventNetName, func(m map[string]string) bool {
		return m["dest"] == "www.example.com" && m["verdict"] == "allowed" && m["addresses"] == publicAddr
	})
	awaitEvent(t, d, "dev", sandbox.EventNetAllowed, func(m map[string]string) bool {
		return m["dest"] == publicAddr && m["port"] == "8080" && m["name"] == "www.example.com"
	})
	if dial("evil.example.net", "8080") {
		t.Error("a name no rule names is reached")
	}
	awaitEvent(t, d, "dev", sandbox.EventNetName, func(m map[string]string) bool { return m["dest"] == "evil.example.net" && m["verdict"] == "denied" })

	if out, code := cli("net", "show", "dev"); code != 0 || !strings.Contains(out, "www.example.com "+publicAddr) || !strings.Contains(out, "*.example.com:8080") {
		t.Errorf("net show: exit %d\n%s", code, out)
	}
	if out, code := cli("net", "log", "dev", "--denied"); code != 0 || !strings.Contains(out, publicAddr+":8080") || !strings.Contains(out, "evil.example.net") || strings.Contains(out, "verdict=allowed") {
		t.Errorf("net log --denied: exit %d\n%s", code, out)
	}
	// Killed, and started again.
	d.kill()
	d.start()
	if out, code := cli("net", "set", "dev", "--add", "*.example.net:8080", "--remove", "*.example.com:8080"); code != 0 ||
		out != "- allow  *.example.com:8080\n+ allow  *.example.net:8080\n" {
		t.Fatalf("net set: exit %d\n%s", code, out)
	}
	if !dial("evil.example.net", "8080") || dial("www.example.com", "8080") {
		t.Error("the policy is not the new one")
	}
	awaitEvent(t, d, "dev", sandbox.EventNetAllowed, func(m map[string]string) bool { return m["name"] == "evil.example.net" })
}

// TestAuditOfAFlood: a sandbox that is refused very much fills no log, and its
// neighbour is told of; the counters have every packet.
func TestAuditOfAFlood(t *testing.T) {
	neighbours(t)
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "loud", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	d.create(t, sandbox.Spec{Name: "quiet", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	const flood = 20000
	script := fmt.Sprintf(`import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sent = 0
for i in range(%d):
    try:
        s.sendto(b"x", ("10.%%d.%%d.1" %% (i %% 200, i // 200 %% 200), 1000 + i %% 50000)); sent += 1
    except OSError:
        pass
print(sent)`, flood)
	sent, err := strconv.Atoi(strings.TrimSpace(d.exec(t, "loud", "python3", "-c", script).stdout))
	if err != nil || sent < flood/2 {
		t.Fatalf("sent %d, %v", sent, err)
	}
	d.exec(t, "quiet", "python3", "-c", `import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b"x", ("10.9.9.9", 999))`)
	awaitEvent(t, d, "quiet", sandbox.EventNetDenied, func(m map[string]string) bool { return m["dest"] == "10.9.9.9" })
	awaitEvent(t, d, "loud", sandbox.EventNetDenied, func(m map[string]string) bool { return true })
	told := eventsOf(t, d, "loud")
	if len(told) > 400 {
		t.Errorf("%d events of one flood", len(told))
	}
	s, err := d.Network(context.WithoutCancel(t.Context()), "loud")
	if err != nil || s.Usage.NetDropped < uint64(sent)*9/10 {
		t.Errorf("dropped %d of %d, %v", s.Usage.NetDropped, sent, err)
	}
}
