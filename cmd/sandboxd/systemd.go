package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/sandboxd/sandboxd/sandbox"
)

// exitConfig is the exit status for a configuration that is refused: the unit
// does not start the daemon again for one, as it does after every other end
// (EX_CONFIG of sysexits.h).
const exitConfig = 78

// refusal is an error of the configuration.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

// exitStatus is what the program ends with for an error.
func exitStatus(err error) int {
	if errors.As(err, &refusal{}) {
		return exitConfig
	}
	return 1
}

// A host that goes down gives its sandboxes this much time to stop in order,
// and systemd is asked for more of it in steps.
const (
	hostDownTimeout = 5 * time.Minute
	extendBy        = 30 * time.Second
)

// hostGoesDown reports whether systemd is about to power off, reboot or halt
// this machine: "stopping" is its state from the moment shutdown.target is
// queued (systemctl(1), is-system-running). A stop or restart of the daemon
// alone leaves it "running" or "degraded".
func hostGoesDown(ctx context.Context) bool {
	if _, err := os.Stat("/run/systemd/system"); err != nil { // sd_booted(3)
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, _ := exec.CommandContext(ctx, "systemctl", "is-system-running").Output() // its exit status says the same less exactly
	return strings.TrimSpace(string(out)) == "stopping"
}

// moreTime keeps systemd from killing the daemon until the returned function
// is called (sd_notify(3), EXTEND_TIMEOUT_USEC).
func moreTime() (enough func()) {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for {
			_, _ = daemon.SdNotify(false, fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", extendBy.Microseconds()))
			select {
			case <-ctx.Done():
				return
			case <-time.After(extendBy / 3):
			}
		}
	}()
	return cancel
}

// feedWatchdog tells systemd that the daemon is well, where it wants to hear
// so, as long as its core answers: the writer of each database, and the API on
// its socket. It returns when ctx ends.
func feedWatchdog(ctx context.Context, log *slog.Logger, core func(context.Context) error) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil || interval == 0 {
		return
	}
	for ctx.Err() == nil {
		look, cancel := context.WithTimeout(ctx, interval/2)
		err := core(look)
		cancel()
		if err == nil {
			_, err = daemon.SdNotify(false, daemon.SdNotifyWatchdog)
		}
		if err != nil && ctx.Err() == nil {
			log.ErrorContext(ctx, "the daemon's core does not answer: systemd will start it again", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(interval / 4):
		}
	}
}

// coreAnswers asks what the daemon cannot do without. A refusal is an answer:
// a full disk does not get better by a restart.
func coreAnswers(socket string, both *worlds) func(context.Context) error {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, // each time through the accept loop
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	return func(ctx context.Context) error {
		for _, db := range both.databases() {
			if err := db.Answers(ctx); err != nil && !errors.Is(err, sandbox.ErrExhausted) {
				return fmt.Errorf("ask the database: %w", err)
			}
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandboxd/v1/version", nil)
		if err != nil {
			return err
		}
		res, err := client.Do(req)
		if err != nil {
			return fmt.Errorf("ask the API: %w", err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		return res.Body.Close()
	}
}
