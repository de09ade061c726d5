package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/build"
	"github.com/sandboxd/sandboxd/cgroup"
	"github.com/sandboxd/sandboxd/cmd/sandboxd/initbin"
	"github.com/sandboxd/sandboxd/guard"
	"github.com/sandboxd/sandboxd/ingress"
	"github.com/sandboxd/sandboxd/internal/initd"
	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/resolver"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
	"github.com/sandboxd/sandboxd/webhook"
)

// The fits of the packages that must not know each other.
var (
	_ runtime.Cgroups = (*cgroup.Tree)(nil)
	_ runtime.Network = (*netns.Host)(nil)
	_ runtime.Roots   = (*rootfs.Store)(nil)
	_ runtime.Shells  = (*launch.Launcher)(nil)
	_ server.Manager  = (*service)(nil)
)

// shutdownTimeout bounds an orderly end; systemd waits longer.
const shutdownTimeout = 20 * time.Second

// service is the manager and the doctor as one object for the API.
type service struct {
	*runtime.Manager
	doctor  *doctor
	builder *build.Builder
	ingress *ingress.Ingress
	hooks   *webhook.Desk
}

// Sandbox is what people see of a sandbox: its counters are those of now.
func (s *service) Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return s.Inspect(ctx, ref)
}

// Build makes an image of a Dockerfile.
func (s *service) Build(ctx context.Context, req sandbox.BuildRequest, files io.Reader, tell func(sandbox.BuildEvent) error) (sandbox.Image, error) {
	return s.builder.Build(ctx, req, files, tell)
}

// Pool tells how the pool of shells does.
func (s *service) Pool(context.Context) (sandbox.PoolStats, error) { return s.Manager.Pool(), nil }

// Doctor checks the host.
func (s *service) Doctor(ctx context.Context) []sandbox.Check { return s.doctor.Checks(ctx) }

// serve runs the daemon until ctx ends.
func serve(ctx context.Context, c config, log *slog.Logger, stopSandboxes bool) (err error) {
	unlock, err := lockAll(c, log)
	if err != nil {
		return err
	}
	defer unlock()
	var opened closers
	defer func() { err = errors.Join(err, opened.close()) }()

	m, parts, err := assemble(ctx, c, log, &opened)
	if err != nil {
		return err
	}
	both := newWorlds(c, m, parts, log)
	defer func() { err = errors.Join(err, both.close(ctx)) }()
	in := newIngress(c, m, log)
	if err := both.recover(ctx); err != nil {
		return fmt.Errorf("put the house in order after the last run: %w", err)
	}
	if err := openServices(ctx, c, &parts, m, parts.news.tell, log, &opened); err != nil {
		return err
	}
	office, journal, err := openAccess(ctx, c, parts.db, log, &opened)
	if err != nil {
		return err
	}
	all := &service{Manager: m, doctor: newDoctor(c, parts), ingress: in}
	guarded := newGuard(c, all, m.Crowded, parts.db, office)
	m.GuardSpace(func(owner string) bool {
		q, err := office.Quota(ctx, owner)
		return err == nil && q.DiskBytes > 0
	})
	projects, err := both.openLab(ctx, guarded)
	if err != nil {
		return err
	}
	hooks, err := openWebhooks(ctx, c, parts.db, office, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, hooks.close(ctx)) }()
	defer in.Close()
	if err := startIngress(ctx, c, in, log); err != nil {
		return err
	}
	tells, err := parts.telemetry.open(ctx, c, both, hooks.Desk)
	if err != nil {
		return err
	}
	defer tells()
	lns, err := listenAll(c, log)
	if err != nil {
		return err
	}
	if all.builder, err = newBuilder(c, guarded.Workshop(m), log); err != nil {
		return err
	}
	all.hooks = hooks.Desk
	dialect, err := openE2B(ctx, c, m, guarded, in, office, journal, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dialect.close(ctx)) }()
	handler := server.New(server.Config{
		Manager: guarded, Log: log, Version: version, Lab: guarded.Lab(projects), Production: both.guardedView,
		Office: office, Audit: journal, Watcher: watcher{parts.telemetry}, Metrics: parts.telemetry.metrics.Handler(),
	})
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		log.WarnContext(ctx, "tell systemd that sandboxd is ready", "err", err)
	}
	go feedWatchdog(ctx, log, coreAnswers(c.socketPath(), both))
	log.InfoContext(ctx, "ready", "socket", c.socketPath(), "version", version, "state_dir", c.StateDir)
	asked := context.WithoutCancel(ctx)
	serveErr := serveAll(delayed(ctx, func() {
		defer moreTime()()
		if _, err := both.stopFor(asked, stopSandboxes); err != nil {
			log.WarnContext(asked, "stop every sandbox: tried again soon", "err", err)
		}
	}), handler, lns)
	in.Close()

	_, _ = daemon.SdNotify(false, daemon.SdNotifyStopping)
	defer moreTime()()
	stopped, err := both.stopFor(asked, stopSandboxes) // of those made meanwhile, too
	serveErr = errors.Join(serveErr, err)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	log.InfoContext(ctx, "ended; sandboxes that run go on", "stopped_sandboxes", stopped)
	return errors.Join(serveErr, both.close(end), m.Close(end))
}

// delayed returns a context that ends once ctx has and first was called then:
// who watches a command hears that its sandbox was stopped, before the
// connections are closed.
func delayed(ctx context.Context, first func()) context.Context {
	later, end := context.WithCancel(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() {
		first()
		end()
	})
	return later
}

// parts are what others need besides the manager: the doctor, the services.
type parts struct {
	tree    *cgroup.Tree
	roots   *rootfs.Store
	network *netns.Host
	names   *resolver.Server

	db    *state.DB // of the lab's world
	whose identity
	links *sharedNetwork
	news  *newsDesk

	telemetry *telemetry
}

// assemble opens every package and hands them to the manager.
func assemble(ctx context.Context, c config, log *slog.Logger, opened *closers) (*runtime.Manager, parts, error) {
	var p parts
	bestEffort := c.Cgroup == cgroupBestEffort
	filter, err := seccomp.Compile()
	if err != nil {
		return nil, p, fmt.Errorf("compile the seccomp filter: %w", err)
	}
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, p, fmt.Errorf("read the host's boot id: %w", err)
	}
	removeMatching(filepath.Join(c.StateDir, "*.db"+restoredEnd+"*")) // of a restore that was killed
	if err := state.MakeRoom(c.StateDir); err != nil {
		return nil, p, err
	}
	db, err := state.Open(ctx, filepath.Join(c.StateDir, "sandboxd.db"))
	if err != nil {
		return nil, p, err
	}
	opened.add(db.Close)
	if err := db.KeepBallast(); err != nil {
		log.Warn("keep space in reserve for a full disk: tried again", "err", err)
	}
	p.db = db
	p.roots, err = rootfs.Open(ctx, rootfs.Config{
		Dir: c.StateDir, VolumeBytes: int64(c.Volume.Size), BestEffort: bestEffort,
		ImportMaxBytes: int64(c.Volume.MaxBytes), ImportMaxFiles: c.Volume.MaxFiles,
		BindRoots: c.BindRoots,
	})
	if err != nil {
		return nil, p, err
	}
	opened.add(p.roots.Close)
	library, err := openLibrary(c, p.roots, log)
	if err != nil {
		return nil, p, err
	}
	p.tree, err = cgroup.Open(cgroup.Config{
		Mount: "/sys/fs/cgroup", Parent: c.CgroupRoot, BestEffort: bestEffort, Log: log,
		IODevices:     func() []string { return disksOf(filepath.Join(c.StateDir, "volume")) },
		IOReadDevices: func() []string { return disksBeneath(c.StateDir, filepath.Join(c.StateDir, "volume")) },
	})
	if err == nil {
		err = launch.Shield(c.CgroupRoot)
	}
	if err != nil {
		return nil, p, err
	}
	if p.whose, err = identify(db, p.roots, p.tree); err != nil {
		return nil, p, err
	}
	if p.telemetry, err = newTelemetry(ctx, c, log); err != nil {
		return nil, p, err
	}
	opened.add(p.telemetry.close)
	p.links = &sharedNetwork{}
	p.news = &newsDesk{own: p.links.inProduction}
	network, err := netns.Open(ctx, netns.Config{
		Pool: c.Network.Pool, Deny: c.Network.Deny, Admit: c.Network.Admit, Tell: p.news.tell, Log: log,
		Installation: p.whose.id, Alone: p.whose.sure(),
	})
	if err != nil {
		return nil, p, err
	}
	opened.add(network.Close)
	p.whose.meet(network, p.roots)
	p.network, p.links.Host = network, network
	shells, err := openLauncher(c.RunDir, log) // after the network: its modules add to /proc/net
	if err != nil {
		return nil, p, err
	}
	opened.add(shells.Close)
	opened.add(keepWhole(log, c.RunDir, shells.Restore))
	warnUnenforced(log, p, c)
	m := runtime.New(runtime.Config{
		DefaultImage: c.Image, Defaults: c.limits(), DefaultTTL: time.Duration(c.TTL), DefaultIdle: time.Duration(c.Idle),
		Slots: c.Slots, UIDBase: c.UIDBase, Seccomp: filter, Quarantine: p.whose.why,
		BootID: strings.TrimSpace(string(bootID)), KeepEnded: c.KeepEnded, KeepEvents: c.KeepEvents, Log: log, Library: library,
		Usage:   runtime.UsageConfig{Interval: time.Duration(c.Usage.Interval), Daily: c.Usage.DailyDays},
		Prices:  c.Cost.Books,
		Network: runtime.NetworkConfig{Default: c.Network.Default.NetworkPolicy, Most: c.Network.Most},
		Pool:    runtime.PoolConfig{Size: c.Pool.Size, CPUShare: c.Pool.CPUShare}, Observer: observer{p.telemetry},
	}, db, p.tree, p.links.view(false, 0), p.roots, shells)
	p.news.to.Store(m)
	return m, p, nil
}

func openLauncher(runDir string, log *slog.Logger) (*launch.Launcher, error) {
	first, err := initbin.Init()
	if err != nil {
		return nil, fmt.Errorf("find sandbox-init in this program: %w; build it with make build", err)
	}
	shell, err := initbin.Shell()
	if err != nil {
		return nil, fmt.Errorf("find sandbox-shell in this program: %w; build it with make build", err)
	}
	c := launch.Config{RunDir: runDir, InitBinary: first, ShellBinary: shell}
	if modes, err := freshNetModes(); err != nil {
		log.Warn("look at a new network namespace: each sandbox does so itself now", "err", err)
	} else {
		c.InitEnv = []string{initd.NetModesEnv + "=" + modes}
	}
	if settings, err := freshSettings(); err != nil {
		log.Warn("look at a new ipc namespace: each sandbox does so itself now", "err", err)
	} else {
		c.InitEnv = append(c.InitEnv, initd.SettingsEnv+"="+settings)
	}
	return launch.New(c)
}

// freshNetModes asks a network namespace that nobody has used.
func freshNetModes() (modes string, err error) {
	err = linux.OnThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		modes, err = initd.NetModes()
		return err
	})
	return modes, err
}

// freshSettings asks an ipc namespace that nobody has used.
func freshSettings() (settings string, err error) {
	err = linux.OnThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWIPC); err != nil {
			return fmt.Errorf("make an ipc namespace: %w", err)
		}
		settings, err = initd.Settings()
		return err
	})
	return settings, err
}

// newBuilder makes what builds images in the manager's sandboxes.
func newBuilder(c config, m guard.Workshop, log *slog.Logger) (*build.Builder, error) {
	return build.New(build.Config{
		Dir: filepath.Join(c.StateDir, "builds"), Sandboxes: m, Images: m, Cache: m, Log: log, AtOnce: c.Build.AtOnce,
		ContextBytes: int64(c.Build.ContextMax), ContextFiles: c.Build.MaxFiles, TimeLimit: time.Duration(c.Build.TimeLimit),
	})
}

// warnUnenforced says loudly which limits this host will not keep.
func warnUnenforced(log *slog.Logger, p parts, c config) {
	all := append(p.tree.Enforcement(c.limits()), p.roots.Enforcement(c.limits())...)
	for _, e := range all {
		if !e.Enforced {
			log.Warn("LIMIT NOT ENFORCED on this host", "limit", e.Limit, "why", e.Why)
		}
	}
}

// closers runs clean-ups in reverse order.
type closers struct{ list []func() error }

func (c *closers) add(f func() error) { c.list = append(c.list, f) }

func (c *closers) close() error {
	var errs []error
	for _, f := range slices.Backward(c.list) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// listen makes the API's socket: root and the group may use it, nobody else.
func listen(c config, log *slog.Logger) (*net.UnixListener, error) {
	path := c.socketPath()
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, fmt.Errorf("make the socket's directory: %w", err)
	}
	// We hold its lock: a socket that is there belongs to nobody.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the old socket: %w", err)
	}
	// The mode before the name (unix(7)): by umask(2), files that others make
	// meanwhile, as the /dev of a shell, would get it, too.
	var own net.ListenConfig
	own.Control = func(_, _ string, c syscall.RawConn) error {
		var merr error
		err := c.Control(func(fd uintptr) { merr = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, merr)
	}
	l, err := own.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	ln, ok := l.(*net.UnixListener)
	if !ok {
		return nil, fmt.Errorf("listen on %s: it is a %T", path, l)
	}
	ln.SetUnlinkOnClose(false) // the path may be another's by then
	g, err := user.LookupGroup(c.SocketGroup)
	if err != nil {
		log.Info("only root may use the socket: no such group", "group", c.SocketGroup)
		return ln, nil
	}
	gid, err := strconv.Atoi(g.Gid)
	if err == nil {
		err = errors.Join(os.Chown(path, 0, gid), os.Chmod(path, 0o660))
	}
	if err != nil {
		ln.Close()
		return nil, fmt.Errorf("give the socket to group %s: %w", c.SocketGroup, err)
	}
	return ln, nil
}

// disksOf names the disk under the volume as MAJ:MIN, for io limits. Where the
// volume is an image that is its loop device: a sandbox must wait there, and
// not below, where it would hold the loop device's requests and with them
// everyone else's.
func disksOf(volume string) []string {
	if disk := diskOf(volume); disk != "" {
		return []string{disk}
	}
	return nil
}

// disksBeneath names the disk that carries the volume's image, where there is
// one. Host images are read from the root disk, past the volume: usually this.
func disksBeneath(stateDir, volume string) []string {
	if disk := diskOf(stateDir); disk != "" && disk != diskOf(volume) {
		return []string{disk}
	}
	return nil
}

// diskOf names the disk under dir; none where dir lies on no disk of its own.
func diskOf(dir string) string {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil || unix.Major(st.Dev) == 0 {
		return ""
	}
	dev := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	// io.max takes whole disks: a partition's parent stands one up in sysfs.
	if _, err := os.Stat("/sys/dev/block/" + dev + "/partition"); err == nil {
		b, err := os.ReadFile("/sys/dev/block/" + dev + "/../dev")
		if err == nil {
			dev = strings.TrimSpace(string(b))
		}
	}
	return dev
}
