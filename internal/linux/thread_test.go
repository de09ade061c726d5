package linux

import (
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestWaitsOf(t *testing.T) {
	c := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
	all := WaitsOf(os.Getpid())
	if !slices.ContainsFunc(all, func(w string) bool { return strings.HasPrefix(w, "child "+strconv.Itoa(c.Process.Pid)+" ") }) {
		t.Errorf("the child is not told: %q", all)
	}
	if !slices.ContainsFunc(all, func(w string) bool { return strings.HasPrefix(w, "thread "+strconv.Itoa(os.Getpid())+" ") }) {
		t.Errorf("no thread is told: %q", all)
	}
	if all := WaitsOf(1 << 30); len(all) != 0 {
		t.Errorf("of nobody: %q", all)
	}
}
