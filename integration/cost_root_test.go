//go:build root

package integration

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// books is a configuration with a book that makes a second of cpu cost one.
func books() string {
	from := time.Now().UTC().AddDate(0, 0, -2).Format(time.DateOnly)
	return `
usage:
  interval: 200ms
cost:
  books:
    - version: v1
      currency: EUR
      from: ` + from + `T00:00:00Z
      prices:
        cpu: {price: 1, unit: cpu-second}
        starts: {price: 0.25, unit: start}
        model.tokens: {price: 2, per: 1000, unit: token}
`
}

// TestCosts: what a sandbox burnt is what its owner is charged, to the nano,
// beside what came from outside, and the same after the daemon was killed and
// the sandbox removed.
func TestCosts(t *testing.T) {
	d := install(t, books())
	sb := d.create(t, sandbox.Spec{Project: "prj_it", Name: "it-costs"})
	d.sh(t, string(sb.ID), "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
	tokens := cost.EntryRequest{Kind: cost.KindCost, Sandbox: "it-costs", Meter: "model.tokens", Quantity: cost.Count(1500), Key: "once"}
	for range 2 {
		if p, err := d.PostEntry(t.Context(), tokens); err != nil || p.Charged != 3*cost.Unit {
			t.Fatalf("%+v, %v", p, err)
		}
		d.kill()
		d.start()
	}
	if _, err := d.PostEntry(t.Context(), cost.EntryRequest{Kind: cost.KindRevenue, Project: "prj_it", Amount: 10 * cost.Unit}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	s, err := d.Statement(t.Context(), cost.StatementQuery{By: "project"})
	if err != nil || len(s.Lines) != 1 || s.Lines[0].Key != "prj_it" {
		t.Fatalf("%+v, %v", s, err)
	}
	l := s.Lines[0]
	if want := cost.Nano(l.Meters.CPU)*1000 + cost.Unit/4; l.Meters.CPU < 50_000 || l.Usage != cost.SumOf(want) || l.Outside != cost.SumOf(3*cost.Unit) || l.Revenue != cost.SumOf(10*cost.Unit) {
		t.Errorf("%+v, want %s of usage", l, want)
	}
	d.kill()
	d.start()
	if again, err := d.Statement(t.Context(), cost.StatementQuery{By: "project"}); err != nil || again.Total.Cost != s.Total.Cost || again.Total.Profit != s.Total.Profit {
		t.Errorf("after another start %+v, %v; before %+v", again.Total, err, s.Total)
	}
	out, err := exec.Command(program(t, "sandbox"), "--host", d.host(), "cost", "report", "--by", "project").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "prj_it") || !strings.Contains(string(out), l.Cost.String()) {
		t.Errorf("report: %v, %s", err, out)
	}
}

// TestCostsFromInside: a program in a sandbox tells what it costs and earns, by
// the socket PID 1 offers there, also while the daemon restarts; one in a
// sandbox that was not made for it is refused, and one that has a network of
// its own finds nobody else's.
func TestCostsFromInside(t *testing.T) {
	d := install(t, books())
	sb, mute := d.create(t, sandbox.Spec{CostEntries: true, Project: "prj_it"}), d.create(t, sandbox.Spec{})
	ask := func(ref, line string) string {
		t.Helper()
		const script = `use Socket; $| = 1; socket(my $s, PF_UNIX, SOCK_STREAM, 0) or die $!;
			connect($s, pack_sockaddr_un("\0sandbox")) or die "connect: $!"; syswrite($s, "$ARGV[0]\n") or die $!; print scalar <$s>;`
		r := d.exec(t, ref, "perl", "-e", script, line)
		if r.exit.Code != 0 {
			t.Fatalf("asking %s: %+v", line, r)
		}
		return strings.TrimSpace(r.stdout)
	}
	if got := ask(string(sb.ID), `{"op":"cost","meter":"model.tokens","quantity":"1500","key":"a"}`); !strings.Contains(got, `"charged":"3"`) {
		t.Errorf("tokens: %s", got)
	}
	d.kill()
	d.start()
	for range 2 {
		if got := ask(string(sb.ID), `{"op":"revenue","amount":"10","key":"b"}`); !strings.Contains(got, `"charged":"10"`) {
			t.Errorf("revenue: %s", got)
		}
	}
	if got := ask(string(mute.ID), `{"op":"cost","amount":"1"}`); !strings.Contains(got, "entries_forbidden") {
		t.Errorf("of one that may not: %s", got)
	}
	s, err := d.Statement(t.Context(), cost.StatementQuery{Project: "prj_it"})
	if err != nil || s.Total.Outside != cost.SumOf(3*cost.Unit) || s.Total.Revenue != cost.SumOf(10*cost.Unit) {
		t.Errorf("%+v, %v", s.Total, err)
	}
}

// TestProgramInside: a plain shell enters what its sandbox costs and earns,
// any user of it may, also while there is no daemon for a moment, in each root
// the sandbox gets; one that was not made for it has no such program.
func TestProgramInside(t *testing.T) {
	d := install(t, books())
	sb, mute := d.create(t, sandbox.Spec{CostEntries: true, Project: "prj_it"}), d.create(t, sandbox.Spec{})
	dash := func(user, script string) result {
		t.Helper()
		r, err := d.try(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"dash", "-c", script}, User: user})
		if err != nil {
			t.Fatalf("%s: %v", script, err)
		}
		return r
	}
	tokens := "sbx cost add --meter model.tokens --qty 1500 --key a --note 'call 17'"
	for _, user := range []string{"", "nobody", ""} { // once for its key
		if r := dash(user, tokens); r.exit.Code != 0 || r.stdout != "3\n" {
			t.Fatalf("tokens, as %q: %+v", user, r)
		}
	}
	// Without a key each is another one.
	if r := dash("", "sbx revenue add --amount 4 && sbx revenue add --amount 4"); r.exit.Code != 0 || r.stdout != "4\n4\n" {
		t.Errorf("revenue: %+v", r)
	}
	for script, code := range map[string]int{"sbx cost add --meter cpu --qty 1": 1, "sbx cost add --amount -1": 1, "sbx cost": 2} {
		if r := dash("", script); r.exit.Code != code || r.stderr == "" {
			t.Errorf("%s: %+v", script, r)
		}
	}
	// What is begun while there is no daemon is told to the next one, once.
	p, err := d.StartProcess(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"dash", "-c", "sleep 1; sbx revenue add --amount 2"}})
	if err != nil {
		t.Fatal(err)
	}
	d.kill()
	<-time.After(1500 * time.Millisecond) // it asks meanwhile
	d.start()
	testenv.Eventually(t, 30*time.Second, "the entry of the time between is taken", func() bool {
		all, err := d.Processes(t.Context(), string(sb.ID))
		for _, x := range all {
			if x.ID == p.ID && x.Exit != nil && x.Exit.Code == 0 {
				return true
			}
		}
		return err != nil
	})
	// It can be neither read nor changed, and is there after a reset.
	if r := dash("", "cat /dev/sandbox/sbx >/dev/null || rm /dev/sandbox/sbx || echo x >/dev/sandbox/sbx"); r.exit.Code == 0 {
		t.Errorf("the program was read, or removed: %+v", r)
	}
	if _, err := d.Reset(t.Context(), string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	if r := dash("", "sbx revenue add --amount 1"); r.exit.Code != 0 {
		t.Errorf("after a reset: %+v", r)
	}
	if r := d.exec(t, string(mute.ID), "dash", "-c", "command -v sbx || /dev/sandbox/sbx --help"); r.exit.Code == 0 {
		t.Errorf("one that may not has it: %+v", r)
	}
	s, err := d.Statement(t.Context(), cost.StatementQuery{Project: "prj_it"})
	if err != nil || s.Total.Outside != cost.SumOf(3*cost.Unit) || s.Total.Revenue != cost.SumOf(11*cost.Unit) {
		t.Errorf("%+v, %v", s.Total, err)
	}
}
