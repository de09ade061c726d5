package state

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// writerVar makes the test binary a writer of the database it names, to be
// killed in the middle of its work.
const writerVar = "SANDBOXD_STATE_WRITER"

func TestMain(m *testing.M) {
	if path := os.Getenv(writerVar); path != "" {
		if err := writeForever(path); err != nil {
			fmt.Fprintln(os.Stderr, "writer:", err)
			os.Exit(1)
		}
	}
	if path := os.Getenv(stepsVar); path != "" {
		if err := rollVictim(path); err != nil {
			fmt.Fprintln(os.Stderr, "victim:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if path := os.Getenv(rollerVar); path != "" {
		if err := rollForever(path); err != nil {
			fmt.Fprintln(os.Stderr, "roller:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// writeForever runs whole lives of sandboxes, two at a time, and says on
// standard output what was committed: the id and the status.
func writeForever(path string) error {
	ctx := context.Background()
	d, err := Open(ctx, path)
	if err != nil {
		return err
	}
	errs := make(chan error, 2)
	for range cap(errs) {
		go func() { errs <- liveForever(ctx, d) }()
	}
	return <-errs
}

func liveForever(ctx context.Context, d *DB) error {
	for {
		p := CreateParams{Sandbox: sandbox.Sandbox{ID: sandbox.NewID()}, Slots: 4, Actor: "writer"}
		p.Sandbox.Spec.Name = "n" + string(p.Sandbox.ID[2:6])
		sb, _, err := d.CreateSandbox(ctx, p)
		if err != nil {
			if sandbox.CodeOf(err) != "slots_exhausted" { // left living by writers before
				return err
			}
			rows, err := d.Living(ctx)
			if err != nil || len(rows) == 0 {
				return err
			}
			sb = rows[0].Sandbox
			if sb, err = d.Move(ctx, sb.ID, []sandbox.Status{sb.Status}, sandbox.StatusFailed, Change{}); err != nil && sandbox.CodeOf(err) != "wrong_state" {
				return err
			}
			continue
		}
		fmt.Printf("%s %s\n", sb.ID, sb.Status)
		for _, next := range []sandbox.Status{sandbox.StatusCreating, sandbox.StatusRunning, sandbox.StatusCompleting, sandbox.StatusCompleted} {
			sb, err = d.Move(ctx, sb.ID, []sandbox.Status{sb.Status}, next, Change{LastOutput: make([]byte, 8<<10)})
			if err != nil {
				if sandbox.CodeOf(err) == "wrong_state" { // the other half took it for left over
					break
				}
				return err
			}
			fmt.Printf("%s %s\n", sb.ID, sb.Status)
		}
	}
}

// TestKilledWriter kills a writer again and again, and asks whether what it
// had said was kept and whether all rows still fit together.
func TestKilledWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	for round := range 8 {
		said := runAndKill(t, path, 20+13*round)
		d := openAt(t, path)
		for id, status := range said {
			got, err := d.Sandbox(t.Context(), id)
			if err != nil || rank(got.Status) < rank(status) {
				t.Fatalf("round %d: %s was committed as %s, reads %s, %v", round, id, status, got.Status, err)
			}
		}
		if found := broken(t, d); found != nil {
			t.Fatalf("round %d: %v", round, found)
		}
	}
}

// rank orders the statuses of a writer's life.
func rank(s sandbox.Status) int {
	for i, t := range sandbox.Statuses() {
		if s == t {
			return i
		}
	}
	return -1
}

// runAndKill starts a writer and kills it after so many of its reports; it
// returns the last status reported of each sandbox.
func runAndKill(t *testing.T, path string, reports int) map[sandbox.ID]sandbox.Status {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), writerVar+"="+path)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	said := map[sandbox.ID]sandbox.Status{}
	lines := bufio.NewScanner(out)
	for n := 0; lines.Scan(); n++ {
		if id, status, ok := strings.Cut(lines.Text(), " "); ok && sandbox.Status(status).Valid() {
			said[sandbox.ID(id)] = sandbox.Status(status)
		}
		if n == reports {
			_ = c.Process.Signal(syscall.SIGKILL)
		}
	}
	_ = c.Wait()
	if st := c.ProcessState.Sys().(syscall.WaitStatus); st.Signal() != syscall.SIGKILL {
		t.Fatalf("the writer ended by itself: %v", c.ProcessState)
	}
	return said
}

// broken asks what must hold after every commit, and returns what does not.
func broken(t *testing.T, d *DB) (found []string) {
	t.Helper()
	for what, query := range map[string]string{
		"a living sandbox without the lease of its slot": `SELECT count(*) FROM sandboxes s WHERE status NOT IN ('completed', 'failed')
			AND NOT EXISTS (SELECT 1 FROM slots WHERE slot = s.slot AND sandbox = s.id)`,
		"a lease of no living sandbox": `SELECT count(*) FROM slots WHERE sandbox IS NOT NULL
			AND sandbox NOT IN (SELECT id FROM sandboxes WHERE status NOT IN ('completed', 'failed'))`,
		"an end at the wrong time": `SELECT count(*) FROM sandboxes WHERE (status IN ('completed', 'failed')) <> (ended_at IS NOT NULL)`,
		"a status that no event tells": `SELECT count(*) FROM sandboxes s WHERE 'sandbox.' || status IS NOT
			(SELECT type FROM events WHERE sandbox = s.id ORDER BY seq DESC LIMIT 1)`,
		"a broken reference": `SELECT count(*) FROM pragma_foreign_key_check`,
	} {
		var n int
		if err := d.reader.QueryRow(query).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n != 0 {
			found = append(found, what)
		}
	}
	var integrity string
	if err := d.reader.QueryRow(`PRAGMA integrity_check`).Scan(&integrity); err != nil || integrity != "ok" {
		t.Fatalf("integrity: %s, %v", integrity, err)
	}
	slices.Sort(found)
	return found
}

// TestBrokenIsFound is the control: harm done is seen.
func TestBrokenIsFound(t *testing.T) {
	for harm, want := range map[string][]string{
		`SELECT 1`:                        nil,
		`UPDATE slots SET sandbox = NULL`: {"a living sandbox without the lease of its slot"},
		`UPDATE sandboxes SET status = 'failed', ended_at = 1`: {"a lease of no living sandbox", "a status that no event tells"},
		`UPDATE sandboxes SET ended_at = 1`:                    {"an end at the wrong time"},
		`DELETE FROM events`:                                   {"a status that no event tells"},
		`PRAGMA foreign_keys = off; DELETE FROM sandboxes`:     {"a broken reference", "a lease of no living sandbox"},
	} {
		d := open(t)
		create(t, d, "")
		if _, err := d.writer.ExecContext(t.Context(), harm); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, broken(t, d)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", harm, diff)
		}
	}
}

// TestLastEventAndProcess: what a new daemon asks of the one before it.
func TestLastEventAndProcess(t *testing.T) {
	d := open(t)
	sb, other := create(t, d, "a"), create(t, d, "b")
	last := func() string {
		e, err := d.LastEvent(t.Context(), sb.ID, "process.exited", "sandbox.creating")
		if sandbox.CodeOf(err) == "event_not_found" {
			return ""
		}
		if err != nil {
			t.Fatal(err)
		}
		return e.Data["n"]
	}
	for _, step := range []struct {
		id   sandbox.ID
		kind string
		n    string
		want string
	}{
		{other.ID, "process.exited", "0", ""},
		{sb.ID, "process.exited", "1", "1"},
		{sb.ID, "process.exited", "2", "2"},
		{sb.ID, "sandbox.running", "", "2"},
		{sb.ID, "sandbox.creating", "", ""},
		{sb.ID, "process.exited", "3", "3"},
	} {
		if _, err := d.AppendEvent(t.Context(), sandbox.Event{Sandbox: step.id, Type: step.kind, Data: map[string]string{"n": step.n}}); err != nil {
			t.Fatal(err)
		}
		if got := last(); got != step.want {
			t.Errorf("after %s %s: %q, want %q", step.kind, step.n, got, step.want)
		}
	}
	for _, id := range []sandbox.ProcessID{"p9", "p12", "p3"} {
		if err := d.PutProcess(t.Context(), sb.ID, sandbox.Process{ID: id}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for id, want := range map[sandbox.ID]int64{sb.ID: 12, other.ID: 0} {
		if got, err := d.LastProcess(t.Context(), id); err != nil || got != want {
			t.Errorf("last process %d, %v; want %d", got, err, want)
		}
	}
}
