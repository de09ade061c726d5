//go:build root

package integration

import (
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestBootID wants a boot id that is not the host's, that nobody inside can
// change, and that is another one after each start.
func TestBootID(t *testing.T) {
	d := install(t, "")
	const path = "/proc/sys/kernel/random/boot_id"
	host, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	box := string(d.create(t, sandbox.Spec{}).ID)
	first := d.sh(t, box, "cat "+path)
	if again := d.sh(t, box, "cat "+path); again != first {
		t.Errorf("the boot id changed from %s to %s", first, again)
	}
	if out := d.sh(t, box, "(echo x > "+path+") 2>/dev/null || echo refused"); out != "refused" {
		t.Errorf("writing it: %q", out)
	}
	if _, err := d.Reset(t.Context(), box); err != nil {
		t.Fatal(err)
	}
	if again := d.sh(t, box, "cat "+path); again != first {
		t.Errorf("the boot id changed with a reset from %s to %s: PID 1 is the same", first, again)
	}
	if _, err := d.Stop(t.Context(), box); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Start(t.Context(), box); err != nil {
		t.Fatal(err)
	}
	second := d.sh(t, box, "cat "+path)
	if first == second || first == strings.TrimSpace(string(host)) || len(first) != 36 || len(second) != 36 {
		t.Errorf("boot ids %s and %s, the host's %s", first, second, host)
	}
}
