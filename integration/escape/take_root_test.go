//go:build root

package escape

import (
	"encoding/json"
	"os/exec"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestNeighbourKeepsItsShare: what one sandbox takes of resources that the
// kernel counts for a user or the whole host is missing neither to another nor
// to the host's root. The control is a sandbox beside which nobody takes
// anything: it gets as much.
func TestNeighbourKeepsItsShare(t *testing.T) {
	d := harness.Install(t, "")
	taker := d.New(t, sandbox.Spec{Capabilities: sandbox.CapabilitiesNone})
	neighbour := d.New(t, sandbox.Spec{})
	probe := giveProbe(t, d, string(taker.ID))
	giveProbe(t, d, string(neighbour.ID))
	hosts := harness.Probe(t)
	counts := func(out string) (got map[string]int) {
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return got
	}
	once := func() (inside, outside map[string]int) {
		r, err := d.Try(t.Context(), string(neighbour.ID), sandbox.ProcessSpec{Argv: []string{probe, "take", "8"}})
		if err != nil || r.Exit.Code != 0 {
			t.Fatalf("take beside it: %v, %+v", err, r)
		}
		out, err := exec.Command(hosts, "take", "8").Output()
		if err != nil {
			t.Fatal(err)
		}
		return counts(r.Stdout), counts(string(out))
	}
	quiet, quietHost := once()
	t.Logf("alone: a sandbox gets %v, the host %v", quiet, quietHost)
	for _, what := range []string{"inotify", "mqueue", "signals", "pty"} {
		if quiet[what] == 0 {
			t.Errorf("the neighbour got no %s even alone: does the probe take?", what)
		}
	}
	if quietHost["aio"] == 0 {
		t.Error("the host's root gets no aio context even alone: does the probe take?")
	}
	for range 2 {
		p, err := d.Exec(t.Context(), string(taker.ID), sandbox.ProcessSpec{Argv: []string{probe, "take", "200000"}, User: "1000", Stdin: true})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		o, err := p.Next()
		for err == nil && o.Stream == sandbox.Stderr {
			o, err = p.Next()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("the taker has %s", o.Data)
	}
	beside, besideHost := once()
	t.Logf("beside it: a sandbox gets %v, the host %v", beside, besideHost)
	for what := range quietHost {
		n := quiet[what]
		if beside[what] < n {
			t.Errorf("%s: a neighbour gets %d, alone %d", what, beside[what], n)
		}
		if h := quietHost[what]; besideHost[what] < h {
			t.Errorf("%s: the host's root gets %d, alone %d", what, besideHost[what], h)
		}
	}
}
