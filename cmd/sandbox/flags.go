package main

import (
	"io"
	"math"
	"os"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

// specFlags are the flags that describe a sandbox.
type specFlags struct {
	spec            sandbox.Spec
	env, labels     []string
	memory, disk    sizeFlag
	ioRead, ioWrite sizeFlag
	timeout, idle   time.Duration
	net             netFlags
	capabilities    string
	onTimeout       string
	pull            string
	volumes         []string
	ports           []string
	publish         []sandbox.PortRequest // what build read of ports
}

func (f *specFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.SortFlags = false
	l := &f.spec.Limits
	fl.StringVar(&f.spec.Name, "name", "", "name, unique among living sandboxes")
	fl.StringVar(&f.spec.Image, "image", "", "image to start from ('sandbox image ls'); the daemon's default if not given")
	fl.StringVar((*string)(&f.spec.Snapshot), "snapshot", "", "begin with the files of the snapshot of this id, in place of an image ('sandbox fork' takes names, too)")
	fl.BoolVar(&f.spec.AutoSnapshot, "auto-snapshot", false, "take a restore point after each command that changed files ('sandbox undo')")
	fl.StringVar(&f.pull, "pull", "", "pull the image: missing, always or never (missing if its name says which registry has it, else never)")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "environment variable K=V, or K to pass on your own; repeatable")
	fl.BoolVar(&f.spec.CostEntries, "cost-entries", false, "programs inside may enter costs and revenue of this sandbox")
	fl.StringVar(&f.spec.Project, "project", "", "project its costs count for: prj_…")
	fl.StringArrayVarP(&f.labels, "label", "l", nil, "label k=v to find it by; repeatable")
	fl.Float64Var(&l.CPUs, "cpu", 0, "CPU cores, as 0.5 or 2")
	fl.Uint64Var(&l.CPUWeight, "cpu-weight", 0, "share of CPU against other sandboxes, 1 to 10000 (100)")
	fl.Var(&f.memory, "memory", "memory, as 512m or 2g")
	fl.Var(&f.disk, "disk", "bytes it may write, as 2g")
	fl.Int64Var(&l.DiskInodes, "inodes", 0, "files it may make")
	fl.Int64Var(&l.PIDs, "pids", 0, "processes and threads at one time")
	fl.Uint64Var(&l.OpenFiles, "open-files", 0, "open files of each process")
	fl.Var(&f.ioRead, "io-read", "disk bytes read a second, as 50m")
	fl.Var(&f.ioWrite, "io-write", "disk bytes written a second, as 50m")
	fl.Uint64Var(&l.IOReadIOPS, "io-read-iops", 0, "disk reads a second")
	fl.Uint64Var(&l.IOWriteIOPS, "io-write-iops", 0, "disk writes a second")
	fl.DurationVar(&f.timeout, "timeout", 0, "end the sandbox after this long, as 30m")
	fl.StringVar(&f.onTimeout, "on-timeout", "", "what then becomes of it: end (default), pause (keeps memory) or stop (keeps files)")
	fl.DurationVar(&f.idle, "idle-timeout", 0, "end it after this long without a running process or a call")
	f.net.add(cmd)
	fl.StringArrayVarP(&f.volumes, "volume", "v", nil, "mount volume NAME:/path[:ro], or as root /host/dir:/path[:rw], read-only without :rw; repeatable")
	fl.StringArrayVarP(&f.ports, "publish", "p", nil, "listen on this machine for a port inside: [[ADDRESS:]HOSTPORT:]PORT[/tcp|/udp]; repeatable (see 'sandbox port')")
	fl.StringVar(&f.spec.Hostname, "hostname", "", "host name inside")
	fl.StringVar(&f.capabilities, "capabilities", "", "root (default: eight capabilities inside) or none")
}

// build returns the spec the flags describe.
func (f *specFlags) build(getenv func(string) string, stdin io.Reader) (sandbox.Spec, error) {
	s := f.spec
	var err error
	switch f.pull {
	case "", pullMissing, pullAlways, pullNever:
	default:
		return s, usage("--pull %q: use missing, always or never", f.pull)
	}
	if f.publish, err = parsePublished(f.ports); err != nil {
		return s, err
	}
	if s.Env, err = parseEnv(f.env, getenv); err != nil {
		return s, err
	}
	if s.Labels, err = parseLabels(f.labels); err != nil {
		return s, err
	}
	s.Limits.MemoryBytes, s.Limits.DiskBytes = int64(f.memory), int64(f.disk)
	s.Limits.IOReadBPS, s.Limits.IOWriteBPS = uint64(f.ioRead), uint64(f.ioWrite)
	s.TTLSeconds, s.IdleTimeoutSeconds = seconds(f.timeout), seconds(f.idle)
	if s.Network, err = f.net.over(s.Network, stdin); err != nil {
		return s, err
	}
	s.Capabilities, s.OnDeadline = sandbox.Capabilities(f.capabilities), sandbox.DeadlineAction(f.onTimeout)
	if s.Volumes, err = parseMounts(f.volumes); err != nil {
		return s, err
	}
	return s, s.Validate()
}

// usage is an error about the command line.
func usage(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrInvalid, "usage", format, args...)
}

// seconds rounds up: a timeout of 500ms must not become none.
func seconds(d time.Duration) int64 { return int64(math.Ceil(d.Seconds())) }

// sizeFlag is a number of bytes given as 512m or 2g (powers of 1024).
type sizeFlag int64

func (s *sizeFlag) String() string {
	if *s == 0 {
		return ""
	}
	return units.BytesSize(float64(*s))
}

func (s *sizeFlag) Set(v string) error {
	n, err := units.RAMInBytes(v)
	if err != nil || n < 0 {
		return usage("%q is not a size: use a number and a unit, as 512m or 2g", v)
	}
	*s = sizeFlag(n)
	return nil
}

// Type names the value in --help.
func (s *sizeFlag) Type() string { return "size" }

// parseEnv reads K=V; a bare K passes the caller's own on, if set.
func parseEnv(pairs []string, getenv func(string) string) (map[string]string, error) {
	env := map[string]string{}
	for _, p := range pairs {
		k, v, ok := strings.Cut(p, "=")
		if !ok {
			if v = getenv(k); v == "" {
				if _, set := os.LookupEnv(k); !set {
					continue
				}
			}
		}
		if k == "" {
			return nil, usage("--env %q: use NAME=value", p)
		}
		env[k] = v
	}
	return env, nil
}

func parseLabels(pairs []string) (map[string]string, error) {
	labels := map[string]string{}
	for _, p := range pairs {
		k, v, ok := strings.Cut(p, "=")
		if !ok || k == "" {
			return nil, usage("--label %q: use key=value", p)
		}
		labels[k] = v
	}
	return labels, nil
}

// processFlags are the flags that describe how a command runs.
type processFlags struct {
	cwd, user        string
	tty, interactive bool
	detach           bool
	tag, key         string
	limit            time.Duration
	keep             sizeFlag
}

func (f *processFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal")
	fl.BoolVarP(&f.interactive, "interactive", "i", false, "pass standard input on (done anyway if it is no terminal, nor /dev/null)")
	fl.BoolVarP(&f.detach, "detach", "d", false, "start in the background and print its id")
	fl.StringVarP(&f.cwd, "cwd", "w", "", "working directory")
	fl.StringVarP(&f.user, "user", "u", "", "user: a name, a uid or uid:gid")
	fl.DurationVar(&f.limit, "time-limit", 0, "end the command after this long: TERM, and 5 s later KILL")
	fl.Var(&f.keep, "keep-output", "output kept for 'sandbox logs' and for a broken connection (1m)")
	fl.StringVar(&f.tag, "tag", "", "a word to find the process by")
	addKey(cmd, &f.key)
}

// addKey adds the flag of a command that can be repeated safely.
func addKey(cmd *cobra.Command, key *string) {
	cmd.Flags().StringVar(key, "idempotency-key", "", "repeating the command with the same key does nothing twice; a random one if not given")
}
