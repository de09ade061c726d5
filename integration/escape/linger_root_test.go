//go:build root

package escape

import (
	"context"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestDescriptorsSlowToClose sends PID 1's sockets, which anybody inside may
// connect to, descriptors whose last close waits for a day, and others: it goes on,
// and a reset leaves none of them.
func TestDescriptorsSlowToClose(t *testing.T) {
	d := harness.Install(t, "")
	try := func(name string, caps sandbox.Capabilities, user string, argv ...string) {
		t.Run(name, func(t *testing.T) {
			sb := d.New(t, sandbox.Spec{Capabilities: caps})
			ref := string(sb.ID)
			probe := giveProbe(t, d, ref)
			ctx, stop := context.WithTimeout(t.Context(), 70*time.Second)
			defer stop()
			run := func(user, want string, argv ...string) {
				t.Helper()
				r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: append([]string{probe}, argv...), User: user})
				if err != nil || r.Stdout != want+"\n" {
					t.Errorf("%q: %q %q, %v, want %q", argv, r.Stdout, r.Stderr, err, want)
				}
			}
			run(user, "sent", argv...)
			run("root", `{"exit":0}`, "ask-sudo")
			if _, err := d.Reset(ctx, ref); err != nil {
				t.Fatal(err)
			}
			probe = giveProbe(t, d, ref)
			run(user, "free", "linger-free")
			run("root", `{"exit":0}`, "ask-sudo")
			answers(t, d, sb)
		})
	}
	for _, who := range inmates {
		try(string(who.caps)+" "+who.user, who.caps, who.user, "linger", "80")
	}
	try("none 1000", sandbox.CapabilitiesNone, "1000", "linger", "80")
	try("control", sandbox.CapabilitiesRoot, "1000", "linger", "80", "now")
}

// TestQueuedRequestEndsWithItsRoot: what was asked of PID 1 before a reset, and
// waits, is not done after it. The control is the same request without a reset.
func TestQueuedRequestEndsWithItsRoot(t *testing.T) {
	d := harness.Install(t, "")
	for _, reset := range []bool{false, true} {
		sb := d.New(t, sandbox.Spec{})
		ref := string(sb.ID)
		p, err := d.Exec(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{giveProbe(t, d, ref), "queue-sudo", "/srv/late"}, Stdin: true})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		if o, err := p.Next(); err != nil || string(o.Data) != "queued\n" {
			t.Fatalf("%q, %v", o.Data, err)
		}
		made := func() bool {
			_, err := d.Files(ref).Stat(t.Context(), "root", "/srv/late")
			return err == nil
		}
		if made() {
			t.Fatal("the request was not queued")
		}
		if !reset {
			if _, err := p.WriteStdin([]byte("\n")); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, 30*time.Second, "the request's turn comes", made)
			continue
		}
		if _, err := d.Reset(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
		if testenv.Within(2*time.Second, made) {
			t.Error("a request from before the reset was done after it")
		}
	}
}
