//go:build root

package integration

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// e2bListen is where the daemon of these tests serves clients of the SDK; the
// namespace is the tests' own.
const e2bListen = "127.0.0.1:39717"

// TestE2B runs the SDK and the command line of E2B as they are published
// against a daemon, in the internet of the network tests.
func TestE2B(t *testing.T) {
	dir, err := filepath.Abs("e2b")
	if err != nil {
		t.Fatal(err)
	}
	node, err := exec.LookPath("node")
	if err == nil {
		_, err = os.Stat(filepath.Join(dir, "node_modules", "e2b", "package.json"))
	}
	if err != nil {
		if slices.Contains(strings.Split(os.Getenv("SANDBOXD_TEST_PROMISES"), ","), "node") {
			t.Fatalf("node was promised: %v", err)
		}
		t.Skipf("needs node, and 'make deps-e2b': %v", err)
	}
	newWorld(t)
	d := install(t, networkConfig+"e2b: {listen: \""+e2bListen+"\"}\n")
	recipe, err := filepath.Abs("../images/base")
	if err != nil {
		t.Fatal(err)
	}
	if out, errs, code := d.cli(t, nil, "", "image", "build", "-t", "base", recipe); code != 0 {
		t.Fatalf("build images/base: %d\n%s%s", code, out, errs)
	}
	env := append(os.Environ(),
		"E2B_API_URL=http://"+e2bListen, "E2B_SANDBOX_URL=http://"+e2bListen, "E2B_API_KEY="+d.e2bKey(t), "NO_COLOR=1", "HOME="+t.TempDir())
	for _, name := range []string{"control", "snapshots", "network", "commands", "files", "pty", "older"} {
		t.Run(name, func(t *testing.T) {
			if out, err := nodeRun(t, node, dir, env, "--test", "--test-reporter=spec", name+".mjs"); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	t.Run("cli", func(t *testing.T) { e2bCLI(t, node, dir, env) })
	audit, errs, code := d.cli(t, nil, "", "audit", "ls", "--limit", "1000")
	for _, what := range []string{"e2b POST /sandboxes ", "e2b DELETE /sandboxes/{id} ", "e2b POST /process.Process/Start ", "e2b POST /files "} {
		if code != 0 || !strings.Contains(audit, what) {
			t.Errorf("the audit says nothing of %q: %d %s", what, code, errs)
		}
	}
	if left, errs, code := d.cli(t, nil, "", "ls", "-q"); code != 0 || left != "" {
		t.Errorf("sandboxes left: %q %s", left, errs)
	}
}

// e2bKey makes a key for a developer without much of a quota.
func (d *daemon) e2bKey(t testing.TB) string {
	t.Helper()
	out, errs, code := d.cli(t, nil, "", "key", "create", "alice", "--role", "developer")
	key := regexp.MustCompile(`e2b_[0-9a-f]{64}`).FindString(out)
	if code != 0 || key == "" {
		t.Fatalf("make a key: %d\n%s%s", code, out, errs)
	}
	if out, errs, code := d.cli(t, nil, "", "owner", "set", "alice", "--max-sandboxes", "50", "--max-cpus", "100", "--max-memory", "64g", "--max-disk", "500g", "--requests-per-minute", "100000"); code != 0 {
		t.Fatalf("widen the quota: %d\n%s%s", code, out, errs)
	}
	return key
}

func nodeRun(t testing.TB, node, dir string, env []string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, node, args...)
	cmd.Dir, cmd.Env = dir, env
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// e2bCLI creates, lists, uses and kills a sandbox by E2B's command line.
func e2bCLI(t *testing.T, node, dir string, env []string) {
	e2b := func(args ...string) string {
		t.Helper()
		out, err := nodeRun(t, node, dir, env, append([]string{filepath.Join("node_modules", "@e2b", "cli", "dist", "index.js")}, args...)...)
		if err != nil {
			t.Fatalf("e2b %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return out
	}
	id := regexp.MustCompile(`sb[a-z2-7]{12}`).FindString(e2b("sandbox", "create", "base", "--detach"))
	if id == "" {
		t.Fatal("e2b sandbox create names no sandbox")
	}
	if out := e2b("sandbox", "list"); !strings.Contains(out, id) {
		t.Errorf("e2b sandbox list has no %s:\n%s", id, out)
	}
	if out := e2b("sandbox", "exec", id, "echo", "in it"); !strings.Contains(out, "in it") {
		t.Errorf("e2b sandbox exec: %s", out)
	}
	e2b("sandbox", "logs", id)
	e2b("sandbox", "metrics", id)
	e2b("template", "list")
	if out := e2b("sandbox", "kill", id); !strings.Contains(out, id) {
		t.Errorf("e2b sandbox kill: %s", out)
	}
	if out := e2b("sandbox", "list"); strings.Contains(out, id) {
		t.Errorf("e2b sandbox list has a killed one:\n%s", out)
	}
}
