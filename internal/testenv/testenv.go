package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// promises names the environment variable that lists the promised features.
const promises = "SANDBOXD_TEST_PROMISES"

// Feature is something a test may need of the machine.
type Feature struct {
	name  string
	probe func() error // nil when the machine has it
}

// String returns the name used in SANDBOXD_TEST_PROMISES.
func (f *Feature) String() string { return f.name }

// Missing returns nil if the machine has the feature, else why not. The
// answer of the first call is kept.
func (f *Feature) Missing() error { return f.probe() }

// feature makes a Feature whose probe runs once.
func feature(name string, probe func() error) *Feature {
	return &Feature{name, sync.OnceValue(probe)}
}

// The features. Names stand in the order of All.
var (
	Root              = feature("root", probeRoot)          // effective uid 0 with CAP_SYS_ADMIN
	Cgroup2           = feature("cgroup2", probeCgroup2)    // a cgroup v2 tree to make cgroups in
	CgroupControllers = feature("cgroup", probeControllers) // cpu, cpuset, memory, pids, io in that tree
	Userns            = feature("userns", probeUserns)      // a user namespace with 65,536 mapped ids
	Overlay           = feature("overlay", probeOverlay)    // overlay over idmapped lower and upper
	XFS               = feature("xfs", probeXFS)            // XFS with reflinks on a loop image
	Quota             = feature("quota", probeQuota)        // XFS project quotas that hold on a loop image
	Landlock          = feature("landlock", probeLandlock)  // Landlock, ABI 2 or later
	NFT               = feature("nft", probeNFT)            // an nftables inet table in a new network namespace
	Netem             = feature("netem", probeNetem)        // sch_netem, which delays and loses packets
	Compiler          = feature("compiler", probeCompiler)  // gcc in /usr, where the host image shows it
	Systemd           = feature("systemd", probeSystemd)    // systemd as process 1, and dpkg
	all               = []*Feature{Root, Cgroup2, CgroupControllers, Userns, Overlay, XFS, Quota, Landlock, NFT, Netem, Compiler, Systemd}
)

// All returns every feature.
func All() []*Feature { return slices.Clone(all) }

// Need skips the test unless the machine has every feature, and fails it if
// a missing one was promised.
func Need(t testing.TB, features ...*Feature) {
	t.Helper()
	promised, err := parsePromises(os.Getenv(promises))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range features {
		err := f.Missing()
		switch {
		case err == nil:
		case promised[f.name]:
			t.Fatalf("this run promised %q (%s), but: %v", f.name, promises, err)
		default:
			t.Skipf("needs %s: %v", f.name, err)
		}
	}
}

// parsePromises reads a comma list of feature names. An unknown name is an
// error: a promise with a typing mistake would promise nothing.
func parsePromises(list string) (map[string]bool, error) {
	promised := map[string]bool{}
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if name == "" {
			continue
		}
		if !slices.ContainsFunc(all, func(f *Feature) bool { return f.name == name }) {
			return nil, fmt.Errorf("%s: no feature is called %q; there are %v", promises, name, all)
		}
		promised[name] = true
	}
	return promised, nil
}

// Binary returns the path of a built program ("sandboxd", "sandbox"). It
// looks in the directory SANDBOXD_BIN, else in bin/ of the module the test
// stands in. A missing program fails the test: nothing may pass unbuilt.
func Binary(t testing.TB, name string) string {
	t.Helper()
	dir := os.Getenv("SANDBOXD_BIN")
	if dir == "" {
		dir = filepath.Join(moduleRoot(t), "bin")
	}
	path, err := filepath.Abs(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode()&0o111 == 0 {
		t.Fatalf("program %s is not built: run make build, or set SANDBOXD_BIN", path)
	}
	return path
}

// moduleRoot walks up from the working directory to the one with go.mod.
func moduleRoot(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d
		}
		if d == filepath.Dir(d) {
			t.Fatalf("no go.mod above %s: set SANDBOXD_BIN", dir)
		}
	}
}

// Cycles returns how often a repeated test should repeat: few in ordinary
// runs, soak when SANDBOXD_SOAK is set (make soak), or what
// SANDBOXD_SOAK_CYCLES says.
func Cycles(t testing.TB, few, soak int) int {
	t.Helper()
	if s := os.Getenv("SANDBOXD_SOAK_CYCLES"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			t.Fatalf("SANDBOXD_SOAK_CYCLES=%q: want a number of at least 1", s)
		}
		return n
	}
	if os.Getenv("SANDBOXD_SOAK") != "" {
		return soak
	}
	return few
}

// Eventually calls cond until it returns true and fails the test if that has
// not happened within limit. Give limits for a slow, loaded machine: a true
// condition costs no more for it.
func Eventually(t testing.TB, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	if !Within(limit, cond) {
		t.Fatalf("not within %v: %s", limit, what)
	}
}

// Within is Eventually for a caller who tells of the failure: it reports
// whether cond came true.
func Within(limit time.Duration, cond func() bool) bool {
	deadline := time.Now().Add(limit)
	for pause := time.Millisecond; !cond(); pause = min(2*pause, 50*time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(pause)
	}
	return true
}
