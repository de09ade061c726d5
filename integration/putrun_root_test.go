//go:build root

package integration

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestPutAndRun: a program can be started once it has been put.
func TestPutAndRun(t *testing.T) {
	d := install(t, "")
	ref := string(d.create(t, sandbox.Spec{}).ID)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			path := fmt.Sprint("/tmp/program", i)
			for range soak(100, 2000) {
				if _, err := d.Files(ref).Write(t.Context(), "root", path, 0o755, strings.NewReader("#!/bin/sh\necho ran\n")); err != nil {
					t.Error(err)
					return
				}
				if r, err := d.try(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{path}}); err != nil || r.stdout != "ran\n" {
					t.Errorf("%q, %v", r.stdout, err)
					return
				}
			}
		})
	}
	wg.Wait()
}
