//go:build root

package integration

import (
	"bufio"
	"crypto/rand"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// probeBinary returns the path of the static probe, built beforehand where
// there is no Go.
func probeBinary(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("SANDBOXD_BIN"); dir != "" {
		if path := filepath.Join(dir, "test-probe"); exists(path) {
			return path
		}
	}
	path := filepath.Join(t.TempDir(), "test-probe")
	cmd := exec.Command("go", "build", "-o", path, "./testdata/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the probe: %v\n%s", err, out)
	}
	return path
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

// give puts the probe into a sandbox and returns its path there.
func (d *daemon) give(t testing.TB, ref string) string {
	t.Helper()
	f, err := os.Open(probeBinary(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const path = "/opt/probe"
	if _, err := d.Files(ref).Write(t.Context(), "root", path, 0o755, f); err != nil {
		t.Fatal(err)
	}
	return path
}

// outcomes are what the probe tells: name to "ok" or the error.
type outcomes map[string]string

// inside runs the probe in a sandbox.
func (d *daemon) inside(t testing.TB, ref, user string, argv ...string) outcomes {
	t.Helper()
	r, err := d.try(t.Context(), ref, sandbox.ProcessSpec{Argv: argv, User: user})
	if err != nil {
		t.Fatalf("%q: %v", argv, err)
	}
	return parse(t, argv, []byte(r.stdout), r.stderr)
}

// outside runs the probe here, in mount and network namespaces of its own
// that look like this program's.
func outside(t testing.TB, argv ...string) outcomes {
	t.Helper()
	return runHere(t, exec.Command("unshare", append([]string{"--mount", "--propagation", "private"}, argv...)...))
}

func runHere(t testing.TB, cmd *exec.Cmd) outcomes {
	t.Helper()
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%q: %v\n%s", cmd.Args, err, errs.String())
	}
	return parse(t, cmd.Args, out, errs.String())
}

func parse(t testing.TB, argv []string, out []byte, errs string) outcomes {
	t.Helper()
	got := outcomes{}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%q: %v\n%s%s", argv, err, out, errs)
	}
	return got
}

// background starts a program that ends with the test, once it has said that
// it listens, or at once where it says nothing.
func background(t testing.TB, speaks bool, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if speaks {
		if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
			t.Fatalf("%s %q: %v", name, args, err)
		}
	}
	return cmd
}

// lacking are the attempts that even root on a host may be unable to make:
// parts a kernel can be built without, and what a container around this
// machine holds back.
var lacking = []string{"alg socket", "read kcore", "write namespace limit", "write sysrq", "write cgroup"}

// TestWorkloadCannot tries everything that must be out of reach, as root and
// as a user, with capabilities and without; and the same as root of the host.
func TestWorkloadCannot(t *testing.T) {
	d := install(t, "")
	bin := probeBinary(t)
	victim := background(t, false, bin, "wait")
	control := outside(t, bin, "try", t.TempDir(), strconv.Itoa(victim.Process.Pid))
	for name, outcome := range control {
		switch {
		case outcome == "ok":
		case slices.Contains(lacking, name):
			t.Logf("%s: on this machine even its root gets: %s", name, outcome)
		default:
			t.Errorf("%s: the control gets: %s", name, outcome)
		}
	}
	for _, profile := range []sandbox.Capabilities{sandbox.CapabilitiesRoot, sandbox.CapabilitiesNone} {
		name := "caps-" + string(profile)
		before := d.create(t, sandbox.Spec{Name: name, Capabilities: profile})
		probe := d.give(t, name)
		for _, user := range []string{"root", "user", "nobody"} {
			dir := "/tmp/" + user
			if _, err := d.Files(name).Mkdir(t.Context(), user, dir, 0o755); err != nil {
				t.Fatal(err)
			}
			got := d.inside(t, name, user, probe, "try", dir, "1")
			if len(got) != len(control) || len(got) < 45 {
				t.Errorf("%s in %s made %d attempts, the control %d", user, name, len(got), len(control))
			}
			for attempt, outcome := range got {
				if outcome == "ok" {
					t.Errorf("%s in %s: %s worked", user, name, attempt)
				}
			}
			// The place itself is not what stopped them.
			if r, err := d.try(t.Context(), name, sandbox.ProcessSpec{Argv: []string{"sh", "-c", "mkfifo " + dir + "/fifo && touch " + dir + "/file"}, User: user}); err != nil || r.exit.Code != 0 {
				t.Errorf("%s in %s cannot even make a file: %+v, %v", user, name, r, err)
			}
		}
		if sb, err := d.Sandbox(t.Context(), name); err != nil || sb.InitPID != before.InitPID || sb.Status != sandbox.StatusRunning {
			t.Errorf("%s did not outlive it: %+v, %v", name, sb.Status, err)
		}
	}
}

// TestCapabilities reads what a workload holds, and uses it.
func TestCapabilities(t *testing.T) {
	d := install(t, "")
	const (
		nothing = "0000000000000000"
		// CHOWN 0, DAC_OVERRIDE 1, FOWNER 3, FSETID 4, KILL 5, SETGID 6,
		// SETUID 7, NET_BIND_SERVICE 10 (capabilities(7)).
		eight = "00000000000004fb"
	)
	host := outside(t, probeBinary(t), "status")
	if host["CapEff"] == nothing || host["CapEff"] == eight || host["NoNewPrivs"] != "0" {
		t.Errorf("the control: %v", host)
	}
	uses := map[string]string{
		"give a file away":  "touch /tmp/f.$$ && chown 1234:1234 /tmp/f.$$",
		"open a closed one": "touch /tmp/c.$$ && chmod 0 /tmp/c.$$ && echo x > /tmp/c.$$",
		"become a user":     "setpriv --reuid 1000 --clear-groups true",
	}
	for _, c := range []struct {
		profile      sandbox.Capabilities
		user         string
		held, bounds string
	}{
		{sandbox.CapabilitiesRoot, "root", eight, eight},
		{sandbox.CapabilitiesRoot, "user", nothing, eight},
		{sandbox.CapabilitiesNone, "root", nothing, nothing},
		{sandbox.CapabilitiesNone, "user", nothing, nothing},
	} {
		name := string(c.profile) + "-" + c.user
		d.create(t, sandbox.Spec{Name: name, Capabilities: c.profile})
		probe := d.give(t, name)
		got := d.inside(t, name, c.user, probe, "status")
		for key, want := range map[string]string{
			"CapPrm": c.held, "CapEff": c.held, "CapBnd": c.bounds, "CapInh": nothing, "CapAmb": nothing, "NoNewPrivs": "1", "Seccomp": "2",
		} {
			if got[key] != want {
				t.Errorf("%s: %s is %s, want %s", name, key, got[key], want)
			}
		}
		for what, script := range uses {
			r, err := d.try(t.Context(), name, sandbox.ProcessSpec{Argv: []string{"sh", "-c", script}, User: c.user})
			if may := c.held == eight; err != nil || (r.exit.Code == 0) != may {
				t.Errorf("%s: %s: exit %d %s, %v; may it? %v", name, what, r.exit.Code, r.stderr, err, may)
			}
		}
	}
}

// TestSetIDIsUseless runs a set-id program of root's as another user.
func TestSetIDIsUseless(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "s"})
	probe := d.give(t, "s")
	d.sh(t, "s", "cp "+probe+" /opt/suid && chown 0:0 /opt/suid && chmod 6755 /opt/suid && stat -c %A /opt/suid | grep -q ^-rwsr-sr-x")
	if got := d.inside(t, "s", "nobody", "/opt/suid", "status"); got["euid"] != "65534" || got["egid"] != "65534" || got["CapEff"] != "0000000000000000" {
		t.Errorf("set-id inside: %v", got)
	}
	// The same program outside does make its caller root.
	b, err := os.ReadFile(probeBinary(t))
	if err != nil {
		t.Fatal(err)
	}
	suid := filepath.Join(d.Dir, "suid")
	if err := errors.Join(os.WriteFile(suid, b, 0o755), os.Chmod(suid, 0o755|os.ModeSetuid|os.ModeSetgid)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(suid, "status")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if got := runHere(t, cmd); got["euid"] != "0" || got["egid"] != "0" {
		t.Errorf("the control: %v", got)
	}
}

// TestHostSecretsStayOutside plants files, a socket and a process on the host
// and looks for them from inside.
func TestHostSecretsStayOutside(t *testing.T) {
	mark := "sbx-it-" + strings.ToLower(rand.Text()[:10])
	bin := probeBinary(t)
	secret := []byte("secret of the host " + mark + "\n")
	var planted []string
	for dir, mode := range map[string]os.FileMode{
		"/etc": 0o600, "/root": 0o600, "/home": 0o644, "/etc/systemd/system": 0o644, "/tmp": 0o666, "/var/tmp": 0o666,
		"/opt": 0o644, "/srv": 0o644, "/var/lib": 0o644, "/var/log": 0o644, "/run": 0o644, "/dev/shm": 0o666,
	} {
		path := filepath.Join(dir, mark)
		if dir == "/etc/systemd/system" {
			path += ".service"
		}
		if !exists(dir) {
			t.Logf("this machine has no %s", dir)
			continue
		}
		if err := errors.Join(os.WriteFile(path, secret, mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(path) })
		planted = append(planted, path)
	}
	// Of the image "host", /usr is the host's own: what everybody may read is
	// the control, what root alone may read must stay closed even to root inside.
	public, private := "/usr/local/share/"+mark+".public", "/usr/local/share/"+mark+".private"
	for path, mode := range map[string]os.FileMode{public: 0o644, private: 0o600} {
		if err := os.WriteFile(path, secret, mode); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(path) })
	}
	socket := "/run/" + mark + ".sock"
	for _, addr := range []string{socket, "@" + mark} {
		background(t, true, bin, "listen", "unix/"+addr)
	}
	t.Cleanup(func() { _ = os.Remove(socket) })
	named := filepath.Join(t.TempDir(), mark[:15]) // a comm has 15 bytes
	if err := os.Link(bin, named); err != nil {
		b, rerr := os.ReadFile(bin)
		if err := errors.Join(rerr, os.WriteFile(named, b, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	background(t, false, named, "wait")

	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "s"})
	probe := d.give(t, "s")
	for addr, outcome := range outside(t, bin, "dial", "unix/"+socket, "unix/@"+mark) {
		if outcome != "ok" {
			t.Errorf("the control: %s: %s", addr, outcome)
		}
	}
	for _, user := range []string{"root", "user"} {
		as := func(script string) string {
			t.Helper()
			r, err := d.try(t.Context(), "s", sandbox.ProcessSpec{Argv: []string{"sh", "-c", script}, User: user})
			if err != nil {
				t.Fatal(err)
			}
			return strings.TrimSpace(r.stdout)
		}
		all := strings.Join(planted, " ")
		if got := as("cat " + all + "; ls -d " + all); got != "" {
			t.Errorf("%s reads or sees %q", user, got)
		}
		if got := as("cat " + public); got != strings.TrimSpace(string(secret)) {
			t.Errorf("%s reads what everybody may: %q", user, got)
		}
		if got := as("cat " + private); got != "" {
			t.Errorf("%s reads what the host's root alone may: %q", user, got)
		}
		if got := as("echo x >> " + public + " && cat " + public); got != "" && user != "root" {
			t.Errorf("%s writes to the host's file: %q", user, got)
		}
		for addr, outcome := range d.inside(t, "s", user, probe, "dial", "unix/"+socket, "unix/@"+mark) {
			if outcome == "ok" {
				t.Errorf("%s reaches the host's socket %s", user, addr)
			}
		}
		find := "grep -l '^" + mark[:15] + "$' /proc/[0-9]*/comm"
		if got := as(find); got != "" {
			t.Errorf("%s sees the host's process: %s", user, got)
		}
		// The same looks do find the same things of the sandbox's own.
		if got := as("cp " + probe + " /tmp/" + mark[:15] + "; /tmp/" + mark[:15] + " wait & for i in $(seq 400); do " + find + " && break; sleep 0.05; done; kill $!; rm /tmp/" + mark[:15]); got == "" {
			t.Errorf("%s does not find its own process", user)
		}
		if got := as("echo own > /tmp/" + mark + "; ls -d /tmp/" + mark + "; cat /tmp/" + mark + "; rm /tmp/" + mark); got != "/tmp/"+mark+"\nown" {
			t.Errorf("%s does not see its own file: %q", user, got)
		}
	}
	if b, err := os.ReadFile(public); err != nil || string(b) != string(secret) {
		t.Errorf("the host's file now holds %q, %v", b, err)
	}
	// What is mounted and set inside names no path of the installation.
	if got := d.sh(t, "s", "cat /proc/self/mountinfo /proc/self/mounts; env"); strings.Contains(got, d.Dir) {
		t.Errorf("the daemon's directory is told inside:\n%s", got)
	}
}

// neighbourhood is a network for the daemon's host: behind a router live a
// public server, one at the metadata address and one in a private range.
const (
	hostAddr     = "44.0.0.1"
	publicAddr   = "44.0.0.2"
	metadataAddr = "169.254.169.254"
	privateAddr  = "10.99.0.1"
)

// neighbours builds the network and starts the servers, all on port 8080. It
// returns a process in the router's network namespace.
func neighbours(t *testing.T) (pid string) {
	t.Helper()
	bin := probeBinary(t)
	holder := background(t, false, "unshare", "--net", "--", bin, "wait")
	pid = strconv.Itoa(holder.Process.Pid)
	// It runs the probe once it has left ours.
	testenv.Eventually(t, 10*time.Second, "the router's namespace is there", func() bool {
		program, err := os.Readlink("/proc/" + pid + "/exe")
		return err == nil && filepath.Base(program) == filepath.Base(bin)
	})
	there := func(args ...string) []string { return append([]string{"nsenter", "-t", pid, "-n"}, args...) }
	t.Cleanup(func() { _ = run("ip", "link", "del", "itup0") }) // in vain where it was never made
	for _, args := range [][]string{
		{"ip", "link", "add", "itup0", "type", "veth", "peer", "name", "itup1", "netns", pid},
		{"ip", "addr", "add", hostAddr + "/24", "dev", "itup0"},
		{"ip", "link", "set", "itup0", "up"},
		there("ip", "link", "set", "lo", "up"),
		there("ip", "link", "set", "itup1", "up"),
		there("ip", "addr", "add", publicAddr+"/24", "dev", "itup1"),
		there("ip", "addr", "add", metadataAddr+"/32", "dev", "lo"),
		there("ip", "addr", "add", privateAddr+"/32", "dev", "lo"),
		there("ip", "route", "add", "default", "via", hostAddr),
		{"ip", "route", "add", "default", "via", publicAddr},
	} {
		if err := run(args[0], args[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	listen := there(bin, "listen", "tcp/0.0.0.0:8080")
	background(t, true, listen[0], listen[1:]...)
	background(t, true, bin, "listen", "tcp/0.0.0.0:8080") // the host's own
	return pid
}

// TestNetworkWalls dials everything a sandbox must not reach, and what it may.
func TestNetworkWalls(t *testing.T) {
	router := neighbours(t)
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "open", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	other := d.create(t, sandbox.Spec{Name: "other", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	d.create(t, sandbox.Spec{Name: "off"})
	probes := map[string]string{}
	for _, name := range []string{"open", "other", "off"} {
		probes[name] = d.give(t, name)
	}
	server := d.open(t, "other", sandbox.ProcessSpec{Argv: []string{probes["other"], "listen", "tcp/0.0.0.0:8080"}})
	if _, err := server.Next(); err != nil {
		t.Fatal(err)
	}
	gateway := d.sh(t, "open", "ip route | sed -n 's/^default via \\([0-9.]*\\).*/\\1/p'")
	if net.ParseIP(gateway) == nil {
		t.Fatalf("no gateway inside: %q", gateway)
	}
	tcp := func(addrs ...string) (all []string) {
		for _, a := range addrs {
			all = append(all, "tcp/"+net.JoinHostPort(a, "8080"))
		}
		return all
	}
	dial := func(in string, addrs ...string) outcomes {
		t.Helper()
		return d.inside(t, in, "root", append([]string{probes[in], "dial"}, tcp(addrs...)...)...)
	}
	ok := func(who string, got outcomes) {
		t.Helper()
		for addr, outcome := range got {
			if outcome != "ok" {
				t.Errorf("%s to %s: %s", who, addr, outcome)
			}
		}
	}
	denied := func(who string, got outcomes) {
		t.Helper()
		for addr, outcome := range got {
			if outcome == "ok" {
				t.Errorf("%s reaches %s", who, addr)
			}
		}
	}
	// The servers are there for those who may.
	ok("the host", outside(t, append([]string{probeBinary(t), "dial"}, tcp(hostAddr, "127.0.0.1", gateway, publicAddr, metadataAddr, privateAddr)...)...))
	ok("a sandbox", dial("other", other.Address.String(), "127.0.0.1"))
	ok("an open sandbox", dial("open", publicAddr))

	walls := []string{hostAddr, gateway, metadataAddr, privateAddr, other.Address.String(), "127.0.0.1"}
	denied("an open sandbox", dial("open", walls...))
	denied("a closed sandbox", dial("off", append(walls, publicAddr)...))
	// Nor does anyone come in, though there is a route to it.
	denied("the outside", runHere(t, exec.Command("nsenter", append([]string{"-t", router, "-n", probeBinary(t), "dial"}, tcp(other.Address.String())...)...)))
	if u := d.usage(t, "open"); u.NetTxBytes == 0 || u.NetRxBytes == 0 || u.NetDropped == 0 {
		t.Errorf("counted: %d out, %d in, %d refused", u.NetTxBytes, u.NetRxBytes, u.NetDropped)
	}
	if got := d.sh(t, "open", "ip -6 addr show dev eth0 | grep -c inet6 || true"); got != "0" {
		t.Errorf("IPv6 addresses inside: %s", got)
	}
}
