//go:build root

package integration

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
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
	if want := cost.Nano(l.Meters.CPU)*1000 + cost.Unit/4; l.Meters.CPU < 50_000 || l.Usage != want || l.Outside != 3*cost.Unit || l.Revenue != 10*cost.Unit {
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
	if err != nil || s.Total.Outside != 3*cost.Unit || s.Total.Revenue != 10*cost.Unit {
		t.Errorf("%+v, %v", s.Total, err)
	}
}
