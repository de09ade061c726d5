package state

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// stepsVar makes the test binary roll up the database it names and kill itself
// at the step PATH|STEP says: each reading that goes is one, the note of it, and
// the commit.
const stepsVar = "SANDBOXD_STATE_ROLL_STEPS"

// rollVictim is that process.
func rollVictim(path string) error {
	at, err := strconv.Atoi(os.Getenv(stepsVar + "_AT"))
	if err != nil {
		return err
	}
	now, err := time.Parse(time.RFC3339, os.Getenv(stepsVar+"_NOW"))
	if err != nil {
		return err
	}
	d, err := Open(context.Background(), path)
	if err != nil {
		return err
	}
	n := 0
	step := func() int {
		if n++; n == at {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		return 0
	}
	if err := d.conn.lite.RegisterFunc("step", step, false); err != nil {
		return err
	}
	for _, trigger := range []string{
		`CREATE TEMP TRIGGER goes BEFORE DELETE ON main.readings BEGIN SELECT step(); END`,
		`CREATE TEMP TRIGGER noted AFTER UPDATE ON main.ledger BEGIN SELECT step(); END`,
	} {
		if _, err := d.conn.lite.Exec(trigger, nil); err != nil {
			return err
		}
	}
	d.conn.lite.RegisterCommitHook(step)
	_, err = d.Roll(context.Background(), now, DefaultRollUps(2))
	return err
}

// TestRollUpKilledAtEveryStep: whoever rolls up from raw readings to minutes,
// hours and days is killed at each of its steps. Every sum stays what it was,
// and doing it again, once it is done, changes nothing.
func TestRollUpKilledAtEveryStep(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openAt(t, path)
	rng := rand.New(rand.NewPCG(9, 9))
	now := ledgerStart.Add(96 * time.Hour)
	id := bornAt(t, d, ledgerStart, "uid:1", nil)
	all := []sandbox.Reading{{Sandbox: id, At: ledgerStart}}
	for _, c := range []struct {
		ago, apart time.Duration
		n          int
	}{{90 * time.Hour, time.Hour, 8}, {40 * time.Hour, 10 * time.Minute, 8}, {3 * time.Hour, 5 * time.Second, 14}} {
		for i := range c.n {
			r := all[len(all)-1]
			r.At, r.Status = now.Add(time.Duration(i)*c.apart-c.ago), sandbox.StatusRunning
			r.Meters.CPU += rng.Int64N(1e6) + 1
			r.Meters.Running += rng.Int64N(1e4)
			r.Meters.Memory += rng.Int64N(1e9)
			all = append(all, r)
		}
	}
	if err := d.PutReadings(t.Context(), all[1:]); err != nil {
		t.Fatal(err)
	}
	sum := use(t, d, id, time.Time{}, now)
	before := readings(t, d)
	steps := 0
	for ; ; steps++ {
		c := exec.Command("/proc/self/exe")
		c.Env = append(os.Environ(), stepsVar+"="+path, stepsVar+"_AT="+strconv.Itoa(steps+1), stepsVar+"_NOW="+now.Format(time.RFC3339))
		c.Stderr = os.Stderr
		err := c.Run()
		d := openAt(t, path)
		checkBounds(t, d, rng, now, DefaultRollUps(2), all, fmt.Sprintf("killed at step %d", steps+1))
		if got := use(t, d, id, time.Time{}, now); got != sum {
			t.Fatalf("killed at step %d: %+v in all, want %+v", steps+1, got, sum)
		}
		if err == nil {
			break
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("step %d: %v", steps+1, err)
		}
		if got := readings(t, d); !slices.Equal(got, before) {
			t.Fatalf("killed at step %d: %d readings, %d before: a part of it was done", steps+1, len(got), len(before))
		}
	}
	d = openAt(t, path)
	after := readings(t, d)
	if steps < 15 || len(after) != len(before)-steps+2 {
		t.Errorf("%d steps, %d readings before and %d after", steps, len(before), len(after))
	}
	rollAll(t, d, now, DefaultRollUps(2))
	if again := readings(t, d); !slices.Equal(again, after) {
		t.Errorf("done again: %d readings, %d before", len(again), len(after))
	}
	t.Logf("killed at each of %d steps, %d readings before and %d after", steps, len(before), len(after))
}
