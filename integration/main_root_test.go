//go:build root

package integration

import (
	"context"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestMain(m *testing.M) { harness.Main(m) }

// daemon is the harness's daemon with the checks of this package.
type daemon struct{ *harness.Daemon }

func install(t testing.TB, config string, args ...string) *daemon {
	t.Helper()
	return &daemon{harness.Install(t, config, args...)}
}

func (d *daemon) host() string { return d.Host() }
func (d *daemon) start()       { d.Up() }
func (d *daemon) kill()        { d.Crash() }
func (d *daemon) stop()        { d.Shut() }

func (d *daemon) agree(t testing.TB) { t.Helper(); d.Agree(t) }

func (d *daemon) create(t testing.TB, spec sandbox.Spec) sandbox.Sandbox {
	t.Helper()
	return d.New(t, spec)
}

// result is what a finished command left.
type result struct {
	stdout, stderr string
	dropped        int64
	exit           sandbox.ExitStatus
}

func resultOf(r harness.Result) result {
	return result{stdout: r.Stdout, stderr: r.Stderr, dropped: r.Dropped, exit: r.Exit}
}

func (d *daemon) exec(t testing.TB, ref string, argv ...string) result {
	t.Helper()
	return resultOf(d.Command(t, ref, argv...))
}

func (d *daemon) sh(t testing.TB, ref, script string) string {
	t.Helper()
	return d.Sh(t, ref, script)
}

func (d *daemon) try(ctx context.Context, ref string, spec sandbox.ProcessSpec) (result, error) {
	r, err := d.Try(ctx, ref, spec)
	return resultOf(r), err
}

func collect(p sandbox.ProcessIO) (result, error) {
	r, err := harness.Collect(p)
	return resultOf(r), err
}

func (d *daemon) cli(t testing.TB, env []string, in string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return d.CLI(t, env, in, args...)
}

func (d *daemon) stateOf(parts ...string) string { return d.State(parts...) }

func (d *daemon) memory(t testing.TB, line string) int64 {
	t.Helper()
	return d.Memory(t, line)
}

func program(t testing.TB, name string) string {
	t.Helper()
	return harness.Program(t, name)
}

func names(t testing.TB, dir string) []string {
	t.Helper()
	return harness.Names(t, dir)
}

func soak(n, full int) int             { return harness.Soak(n, full) }
func cgroupRoot() string               { return harness.CgroupRoot() }
func lastLines(s string, n int) string { return harness.LastLines(s, n) }

func run(name string, args ...string) error { return harness.HostRun(name, args...) }
