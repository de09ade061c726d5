package main

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"
)

// asProgram makes the test binary the program itself.
const asProgram = "SANDBOX_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// TestBrokenPipe closes the reader of the real standard output, which kills a
// program that takes no care: the sandbox must be gone all the same.
func TestBrokenPipe(t *testing.T) {
	w := newWorld(t)
	cmd := exec.Command(os.Args[0], "run", "--rm", "--", "ticks", "100000")
	cmd.Env = append(os.Environ(), asProgram+"=1", "SANDBOX_HOST="+w.host)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "0\n" {
		t.Errorf("%q %v", line, err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	exit, _ := errors.AsType[*exec.ExitError](cmd.Wait())
	if exit == nil || exit.ExitCode() != exitPipe {
		t.Errorf("%v, want exit %d by itself", exit, exitPipe)
	}
	if n := w.living(); n != 0 {
		t.Errorf("%d sandboxes left", n)
	}
}
