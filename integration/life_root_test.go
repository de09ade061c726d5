//go:build root

package integration

import (
	"bytes"
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestLife takes one sandbox from nothing to gone and looks at everything a
// person would.
func TestLife(t *testing.T) {
	d := install(t, "")
	sb := d.create(t, sandbox.Spec{Name: "life", Env: map[string]string{"GREETING": "hello"}})
	if sb.Status != sandbox.StatusRunning {
		t.Fatalf("created: %s", sb.Status)
	}
	for script, want := range map[string]string{
		"hostname":               "life",
		"cat /proc/1/comm":       "sandbox-init",
		"cat /proc/self/uid_map": "",
		"echo $GREETING":         "hello",
		"id -u":                  "0",
		"ls /sys/class/net":      "lo",
	} {
		got := d.sh(t, "life", script)
		if want != "" && got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	uidMap := strings.Fields(d.sh(t, "life", "cat /proc/self/uid_map"))
	// The workload's ids, and PID 1's one above them.
	if len(uidMap) != 6 || uidMap[0] != "0" || uidMap[1] == "0" || uidMap[2] != "65536" || uidMap[3] != "65536" || uidMap[4] == "0" || uidMap[5] != "1" {
		t.Errorf("uid map %v", uidMap)
	}

	// A file written through the API is there for processes, and back.
	files := d.Files("life")
	if _, err := files.Write(t.Context(), "", "/tmp/in.txt", 0o640, strings.NewReader("from outside\n")); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "life", "cat /tmp/in.txt; stat -c %a /tmp/in.txt; echo from inside > /tmp/out.txt"); got != "from outside\n640" {
		t.Errorf("read inside: %q", got)
	}
	_, r, err := files.Read(t.Context(), "", "/tmp/out.txt", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	_, err = b.ReadFrom(r)
	if errors.Join(err, r.Close()) != nil || b.String() != "from inside\n" {
		t.Errorf("read outside: %q, %v", b.String(), err)
	}

	// Stop keeps the files and loses the processes; start goes on.
	if _, err := d.StartProcess(t.Context(), "life", sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}}); err != nil {
		t.Fatal(err)
	}
	if sb, err := d.Stop(t.Context(), "life"); err != nil || sb.Status != sandbox.StatusStopped || sb.InitPID != 0 {
		t.Fatalf("stop: %+v, %v", sb, err)
	}
	if _, err := d.Exec(t.Context(), "life", sandbox.ProcessSpec{Argv: []string{"true"}}); sandbox.CodeOf(err) != "sandbox_stopped" {
		t.Errorf("exec in a stopped sandbox: %v", err)
	}
	if sb, err := d.Start(t.Context(), "life"); err != nil || sb.Status != sandbox.StatusRunning {
		t.Fatalf("start: %+v, %v", sb, err)
	}
	if got := d.sh(t, "life", "cat /tmp/out.txt; pgrep sleep || echo none"); got != "from inside\nnone" {
		t.Errorf("after stop and start: %q", got)
	}

	// Pause stops the clock for the workload, and only for it.
	p, err := d.StartProcess(t.Context(), "life", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "while :; do echo x >> /tmp/ticks; sleep 0.01; done"}})
	if err != nil {
		t.Fatal(err)
	}
	size := func() int64 {
		info, err := files.Stat(t.Context(), "", "/tmp/ticks")
		if err != nil {
			return 0
		}
		return info.Size
	}
	testenv.Eventually(t, 10*time.Second, "the process ticks", func() bool { return size() > 0 })
	if _, err := d.Pause(t.Context(), "life"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Resume(t.Context(), "life"); err != nil {
		t.Fatal(err)
	}
	before := size()
	testenv.Eventually(t, 10*time.Second, "the process ticks again", func() bool { return size() > before })
	if err := d.SignalProcess(t.Context(), "life", p.ID, "SIGTERM"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, "the process ends by the signal", func() bool {
		got, err := d.Process(t.Context(), "life", p.ID)
		return err == nil && got.Exit != nil && got.Exit.Signal == "SIGTERM" && got.Exit.Code == 128+15
	})

	d.sh(t, "life", "echo last words")
	gone, err := d.Remove(t.Context(), "life")
	if err != nil || gone.Status != sandbox.StatusCompleted || gone.Reason != sandbox.ReasonCancelled {
		t.Fatalf("removed: %s %s, %v", gone.Status, gone.Reason, err)
	}
	if gone.Usage.CPUSeconds <= 0 || !strings.Contains(string(gone.LastOutput), "last words") {
		t.Errorf("kept of it: %v cpu seconds, output %q", gone.Usage.CPUSeconds, gone.LastOutput)
	}
}

// TestCommandLine runs the one-liner and its relatives through the built
// command line program.
func TestCommandLine(t *testing.T) {
	d := install(t, "")
	cli := func(stdin string, args ...string) (string, string, int) {
		cmd := exec.Command(program(t, "sandbox"), append([]string{"--host", d.host()}, args...)...)
		var out, errs bytes.Buffer
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
		err := cmd.Run()
		code := cmd.ProcessState.ExitCode()
		if err != nil && code < 0 {
			t.Fatalf("sandbox %q: %v\n%s", args, err, errs.String())
		}
		return out.String(), errs.String(), code
	}
	if out, errs, code := cli("in\n", "run", "--rm", "-i", "--image", "host", "--", "sh", "-c", "cat; echo err >&2; exit 7"); out != "in\n" || errs != "err\n" || code != 7 {
		t.Errorf("run: %q %q %d", out, errs, code)
	}
	out, errs, code := cli("", "ls", "-a", "-o", "json")
	var list []sandbox.Sandbox
	if code != 0 || json.Unmarshal([]byte(out), &list) != nil || len(list) != 1 {
		t.Fatalf("ls: %q %q %d", out, errs, code)
	}
	if sb := list[0]; sb.Status != sandbox.StatusCompleted || sb.Reason != sandbox.ReasonExited || sb.ExitCode == nil || *sb.ExitCode != 7 {
		t.Errorf("the one-liner's sandbox ended %s, %s, %v; want completed, exited, 7", sb.Status, sb.Reason, sb.ExitCode)
	}
	if _, errs, code := cli("", "run", "--rm", "--", "no-such-command"); code != 127 {
		t.Errorf("an unknown command: exit %d, %q; want 127", code, errs)
	}
	if _, errs, code := cli("", "exec", "nobody", "--", "true"); code != 125 || !strings.Contains(errs, "sandbox_not_found") {
		t.Errorf("an unknown sandbox: exit %d, %q; want 125 and its code", code, errs)
	}
	if out, _, code := cli("", "create", "--name", "c"); code != 0 || strings.TrimSpace(out) == "" {
		t.Errorf("create: %q %d", out, code)
	}
	if _, errs, code := cli("content", "files", "put", "c", "/home/user/x"); code != 0 {
		t.Errorf("files put: %q %d", errs, code)
	}
	if out, errs, code := cli("", "files", "cat", "c", "/home/user/x"); out != "content" || code != 0 {
		t.Errorf("files cat: %q %q %d", out, errs, code)
	}
	if out, errs, code := cli("", "doctor"); code != 0 || !strings.Contains(out, "kernel") {
		t.Errorf("doctor: %q %q %d", out, errs, code)
	}
	if _, errs, code := cli("", "rm", "c"); code != 0 {
		t.Errorf("rm: %q %d", errs, code)
	}
}
