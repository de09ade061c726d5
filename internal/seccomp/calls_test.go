package seccomp

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	libseccomp "github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write testdata/calls.txt anew")

// TestEveryCall compares what the filter answers to each call from 0 to 1023,
// all arguments 0, with the table in testdata. PID 1 puts a rule before it by
// which clone3 answers ENOSYS to all but its own thread (linux.AllowClone3).
func TestEveryCall(t *testing.T) {
	prog, err := Compile()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	unknown := 0
	for nr := range uint32(1024) {
		got := name(verdict(t, prog, data{nr: nr, arch: unix.AUDIT_ARCH_X86_64}))
		if got == "ENOSYS" { // also what there is not, and calls of the future
			unknown++
			continue
		}
		call, err := libseccomp.ScmpSyscall(nr).GetName()
		if err != nil {
			t.Errorf("call %d has no name here and answers %s", nr, got)
		}
		fmt.Fprintln(&b, nr, call, got)
	}
	fmt.Fprintln(&b, unknown, "others ENOSYS")
	const path = "testdata/calls.txt"
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() == string(want) {
		return
	}
	was := strings.Split(string(want), "\n")
	for line := range strings.Lines(b.String()) {
		line = strings.TrimSpace(line)
		found := false
		for i, w := range was {
			if w == line {
				was[i], found = "", true
				break
			}
		}
		if !found {
			t.Errorf("now: %s", line)
		}
	}
	for _, line := range was {
		if line != "" {
			t.Errorf("was: %s", line)
		}
	}
}
