package archtest

// module is the prefix of our own packages.
const module = "github.com/sandboxd/sandboxd/"

// anything, in place of a list, lifts the rule for a package.
var anything = []string{"*"}

// mayImport is the import table of docs/DESIGN.md, section 3, for files that
// are not tests: package -> our own packages it may import. A package that is
// not here fails the test: decide where it belongs, in both places.
var mayImport = map[string][]string{
	"cmd/sandboxd":          anything,
	"cmd/sandboxd/initbin":  {},
	"cmd/sandbox":           {"access", "api", "api/client", "api/mcp", "build/ignore", "cost", "internal/duplex", "internal/tarfile", "project", "sandbox"},
	"cmd/sandbox-init":      {"internal/initd", "internal/sbx"},
	"cmd/sandbox-shell":     {"runtime/launch/stage"},
	"access":                {"sandbox"},
	"certs":                 {"sandbox", "internal/linux"},
	"guard":                 {"access", "api/server", "cost", "project", "sandbox"}, // of api/server the interfaces alone
	"api/e2b":               {"access", "api", "sandbox"},
	"api/mcp":               {"api", "cost", "sandbox"},
	"api/server":            {"access", "api", "api/mcp", "cost", "project", "sandbox", "internal/duplex"},
	"api/server/servertest": {"access", "cost", "project", "sandbox"},
	"api/client":            {"access", "api", "cost", "project", "sandbox"},
	"api":                   {"access", "cost", "project", "sandbox"},
	"runtime":               {"cost", "sandbox", "state", "runtime/guest", "rootfs", "netns", "runtime/launch"}, // see typesOnly
	"runtime/launch":        {"sandbox", "internal/linux", "runtime/launch/stage"},
	"runtime/launch/stage":  {},
	"runtime/guest":         {"sandbox", "internal/initproto"},
	"rootfs":                {"sandbox", "internal/linux", "internal/tarfile"},
	"image":                 {"sandbox", "internal/linux", "internal/tarfile"},
	"image/imagetest":       {},
	"ingress":               {"api", "internal/duplex", "sandbox"},
	"netns":                 {"sandbox", "internal/linux"},
	"cgroup":                {"sandbox", "internal/linux"},
	"resolver":              {"sandbox"},
	"gate":                  {"sandbox", "internal/linux"},
	"build":                 {"sandbox", "build/ignore", "internal/tarfile"},
	"build/ignore":          {"sandbox"},
	"cost":                  {"sandbox"},
	"project":               {"cost", "sandbox"},
	"metrics":               {"cost", "sandbox"},
	"lab":                   {"cost", "project", "sandbox"},
	"state":                 {"access", "cost", "project", "sandbox"},
	"webhook":               {"sandbox", "internal/linux"},
	"sandbox":               {},
	"integration":           {"api/client", "cost", "project", "sandbox", "internal/testenv", "integration/harness"},
	"integration/harness":   {"api/client", "sandbox", "internal/linux", "internal/testenv"},
	"integration/escape":    {"api/client", "cost", "project", "sandbox", "internal/testenv", "integration/harness"},
	"integration/faults":    {"api/client", "cost", "project", "sandbox", "internal/linux", "internal/testenv", "integration/harness"},
	"bench":                 {"api/client", "api", "sandbox", "internal/linux", "bench/peer", "bench/report"},
	"bench/peer":            {"internal/seccomp"},
	"bench/report":          {},
	"internal/archtest":     {},
	"internal/sbx":          {},
	"internal/initd":        {"sandbox", "internal/initproto", "internal/linux", "internal/tarfile"},
	"internal/initproto":    {"sandbox"},
	"internal/linux":        {},
	"internal/duplex":       {},
	"internal/seccomp":      {"sandbox"},
	"internal/tarfile":      {"sandbox"},
	"internal/testenv":      {},
	"internal/trace":        {"sandbox"},
}

// testsMayImport adds, for test files, what any test may import.
var testsMayImport = []string{"internal/testenv", "internal/linux", "sandbox"}

// testsAlso adds what the tests of one package may import.
var testsAlso = map[string][]string{
	"api/server":         {"api/client", "api/server/servertest"},
	"api/e2b":            {"api/server/servertest"},
	"api/client":         {"api/server", "api/server/servertest"},
	"api/mcp":            {"api/client", "api/server", "api/server/servertest"},
	"cmd/sandbox":        {"api/server", "api/server/servertest"},
	"runtime":            {"build", "project"}, // that both use the same words; rows of projects, whose owners have budgets
	"runtime/guest":      {"internal/seccomp"},
	"metrics":            {"api/server", "api/server/servertest"}, // that no request makes a series
	"image":              {"image/imagetest"},
	"guard":              {"state"}, // what rows say of others is what is tested
	"webhook":            {"state"}, // as with the lab
	"lab":                {"state"}, // that a crash loses nothing is seen with real rows
	"integration/escape": {"api", "image/imagetest", "state"},
	"integration/faults": {"access", "api", "image/imagetest", "state"},
	"integration":        {"api", "api/server/servertest", "image/imagetest", "state"}, // the bad inputs that server is tested with
}

// typesOnly names the packages of which an importer may use the types alone:
// runtime names the arguments of its ports and gets the objects from
// cmd/sandboxd.
var typesOnly = map[string][]string{
	"runtime": {"rootfs", "netns", "runtime/launch"},
}

// foreign says who alone may import a third-party package or what is below
// it, tests included; nobody else gets its weight or its power.
var foreign = []struct {
	path string
	by   []string
	why  string
}{
	{"github.com/opencontainers/runc", []string{"runtime/launch", "runtime/launch/stage"}, "one package builds shells"},
	{"github.com/opencontainers/cgroups", []string{"runtime/launch"}, "limits go through package cgroup; libcontainer only needs its types"},
	{"github.com/containerd/cgroups", []string{"cgroup"}, "one package writes the cgroup tree"},
	{"github.com/mattn/go-sqlite3", []string{"state", "cmd/sandboxd"}, "one package holds rows; the doctor asks for the version"},
	{"github.com/google/nftables", []string{"netns", "internal/testenv"}, "one package changes the firewall"},
	{"github.com/vishvananda/netlink", []string{"netns"}, "one package changes links"},
	{"github.com/modelcontextprotocol/go-sdk", []string{"api/mcp", "integration", "integration/escape", "integration/faults"}, "agents' tools are spoken in one package; tests are its clients"},
	{"github.com/danielgtaylor/huma", []string{"api/server"}, "the framework stays behind the wire types"},
	{"github.com/seccomp/libseccomp-golang", []string{"internal/seccomp"}, "the filter is compiled in one place"},
	{"github.com/moby/buildkit", []string{"build"}, "its Dockerfile parser, and no more of it"},
	{"github.com/moby/patternmatcher", []string{"build/ignore"}, "one reading of .dockerignore"},
	{"github.com/google/go-containerregistry", []string{"image", "cmd/sandbox"}, "one package talks to registries; the command line reads the user's credentials"},
	{"github.com/google/cel-go", []string{"lab"}, "conditions are computed in one place"},
	{"github.com/robfig/cron", []string{"runtime"}, "schedules come due in one place"},
	{"github.com/prometheus", []string{"metrics"}, "one package counts; the others know interfaces of their own"},
	{"go.opentelemetry.io", []string{"internal/trace"}, "one package sends traces; the runtime and the API know interfaces of their own"},
	{"github.com/miekg/dns", []string{"resolver", "integration", "integration/escape", "integration/faults"}, "one package speaks DNS; tests play the servers"},
	{"github.com/spf13/cobra", []string{"cmd/sandbox", "cmd/sandboxd"}, "flags belong to programs"},
}

// links says what a program must not contain, however indirectly.
var links = map[string][]string{
	"cmd/sandbox": {"github.com/opencontainers/runc", "github.com/mattn/go-sqlite3", module + "runtime", module + "state", "github.com/vishvananda/netlink", "github.com/moby/buildkit"},
	// It starts for each shell: what it links it pays for each time.
	"cmd/sandbox-shell": {"github.com/mattn/go-sqlite3", "github.com/danielgtaylor/huma", "github.com/spf13/cobra", "github.com/klauspost/compress", "net/http"},
	"cmd/sandbox-init":  {"github.com/opencontainers/runc", "github.com/mattn/go-sqlite3", "net/http", "crypto/tls", "os/exec"},
}

// rawMountCalls are the system calls of x/sys/unix and syscall that change
// mounts or enter namespaces, and rawCallers who may make them: internal/linux
// for all others, and those who do it on ground of their own.
var (
	rawMountCalls = []string{
		"Mount", "Unmount", "OpenTree", "MoveMount", "MountSetattr", "PivotRoot", "Chroot",
		"Fsopen", "Fsconfig", "FsconfigCreate", "Fsmount", "Setns",
	}
	rawCallers = []string{
		"internal/linux",
		"internal/initd",   // inside the sandbox
		"internal/testenv", // probes that must not lean on what they vouch for
		"runtime/launch",   // the daemon's own mount namespace, the skeleton root
		"rootfs",           // mount(2) of an overlay by descriptor paths
	}
)

// emptyNames say nothing about what a package is for.
var emptyNames = []string{"util", "utils", "common", "types", "helpers", "helper", "misc", "base", "shared", "lib"}
