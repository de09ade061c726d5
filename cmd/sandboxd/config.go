package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/goccy/go-yaml"

	"github.com/sandboxd/sandboxd/certs"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// config is the daemon's configuration: built-in values, then the file, then
// flags. An unknown key in the file is an error.
type config struct {
	StateDir    string        `yaml:"state_dir"`
	RunDir      string        `yaml:"run_dir"`
	Socket      string        `yaml:"socket"`
	SocketGroup string        `yaml:"socket_group"`
	Listen      string        `yaml:"listen"` // for TLS; empty: the socket alone
	TLSCert     string        `yaml:"tls_cert"`
	TLSKey      string        `yaml:"tls_key"`
	Access      accessConfig  `yaml:"access"`
	Cgroup      string        `yaml:"cgroup"`
	CgroupRoot  string        `yaml:"cgroup_parent"`
	LogLevel    string        `yaml:"log_level"`
	LogFormat   string        `yaml:"log_format"`
	Slots       int           `yaml:"max_sandboxes"`
	UIDBase     uint32        `yaml:"uid_base"`
	KeepEnded   int           `yaml:"keep_ended"`
	KeepEvents  int           `yaml:"keep_events"`
	Usage       usageConfig   `yaml:"usage"`
	Cost        costConfig    `yaml:"cost"`
	Volume      volumeConfig  `yaml:"volume"`
	Network     networkConfig `yaml:"network"`
	Pool        poolConfig    `yaml:"pool"`
	Build       buildConfig   `yaml:"build"`
	Image       string        `yaml:"default_image"`
	Defaults    limitConfig   `yaml:"default_limits"`
	TTL         duration      `yaml:"default_ttl"`
	Idle        duration      `yaml:"default_idle_timeout"`
	BindRoots   []string      `yaml:"bind_roots"`
	ImageCache  size          `yaml:"image_cache"` // of layers whose transfer broke off

	Registries map[string]registryConfig `yaml:"registries"` // by host and port

	Lab        labConfig        `yaml:"lab"`
	Production productionConfig `yaml:"production"`

	Webhooks webhookConfig `yaml:"webhooks"`

	Telemetry telemetryConfig `yaml:"telemetry"`

	MetricsListen string `yaml:"metrics_listen"` // also served there, to whoever asks; an address of this machine

	E2B e2bConfig `yaml:"e2b"`

	Backup backupConfig `yaml:"backup"`
}

type volumeConfig struct {
	Size     size  `yaml:"size"`       // of the loop image, where one is needed
	MaxBytes size  `yaml:"import_max"` // most one import may unpack to
	MaxFiles int64 `yaml:"import_max_files"`
}

type networkConfig struct {
	Pool      netip.Prefix `yaml:"pool"`
	Resolvers []netip.Addr `yaml:"resolvers"`

	Deny    []netip.Prefix      `yaml:"deny"`    // to every sandbox, whatever its policy says
	Admit   []netip.Prefix      `yaml:"admit"`   // private ranges that allow rules may name
	Default networkPolicy       `yaml:"default"` // of specs that name no mode
	Most    sandbox.NetworkMode `yaml:"most"`    // the widest mode a sandbox may have

	PublishAddress netip.Addr `yaml:"publish_address"` // where published ports are listened for
	Domain         string     `yaml:"domain"`          // of host names of sandboxes
	IngressListen  string     `yaml:"ingress_listen"`  // where they are listened for; a path is a unix socket
}

// networkPolicy is a policy as the API spells it.
type networkPolicy struct{ sandbox.NetworkPolicy }

// UnmarshalYAML reads a policy, and no field it does not know.
func (p *networkPolicy) UnmarshalYAML(b []byte) error {
	text, err := yaml.YAMLToJSON(b)
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&p.NetworkPolicy); err != nil {
		return fmt.Errorf("network policy: %w", err)
	}
	return nil
}

// usageConfig is about the ledger of what sandboxes use.
type usageConfig struct {
	Interval  duration `yaml:"interval"`    // between two looks at the counters
	DailyDays int      `yaml:"daily_after"` // after so many days one reading a day is kept
}

// costConfig is about money.
type costConfig struct {
	Books []cost.Book `yaml:"books"` // versions of the prices
}

// poolConfig is about the shells kept ready.
type poolConfig struct {
	Size     int     `yaml:"size"`
	CPUShare float64 `yaml:"cpu_share"` // of one processor, for refilling
}

// buildConfig is about builds of images.
type buildConfig struct {
	AtOnce     int      `yaml:"at_once"`
	TimeLimit  duration `yaml:"time_limit"`
	ContextMax size     `yaml:"context_max"`
	MaxFiles   int      `yaml:"context_max_files"`
}

type limitConfig struct {
	CPUs      float64 `yaml:"cpus"`
	Memory    size    `yaml:"memory"`
	PIDs      int64   `yaml:"pids"`
	OpenFiles uint64  `yaml:"open_files"`
	Disk      size    `yaml:"disk"`
	Inodes    int64   `yaml:"inodes"`
}

// maxPool bounds the pool: a shell takes some 1.5 MiB.
const maxPool = 1000

// The modes of the cgroup setting.
const (
	cgroupEnforce    = "enforce"
	cgroupBestEffort = "best-effort"
)

// size is a number of bytes, written as 512m or 2GiB.
type size int64

// UnmarshalYAML reads a size.
func (s *size) UnmarshalYAML(b []byte) error {
	text := string(bytes.Trim(bytes.TrimSpace(b), `"'`))
	n, err := units.RAMInBytes(text)
	if err != nil {
		return fmt.Errorf("size %q: write it as 512m or 2g", text)
	}
	*s = size(n)
	return nil
}

// duration is a time.Duration, written as 30m or 24h.
type duration time.Duration

// UnmarshalYAML reads a duration.
func (d *duration) UnmarshalYAML(b []byte) error {
	text := string(bytes.Trim(bytes.TrimSpace(b), `"'`))
	v, err := time.ParseDuration(text)
	if err != nil || v < 0 {
		return fmt.Errorf("duration %q: write it as 90s, 30m or 24h", text)
	}
	*d = duration(v)
	return nil
}

func builtinConfig() config {
	return config{
		StateDir: "/var/lib/sandboxd", RunDir: "/run/sandboxd", SocketGroup: "sandbox",
		TLSCert: filepath.Join(tlsDir, certs.ServerFile), TLSKey: filepath.Join(tlsDir, certs.ServerKeyFile), Access: builtinAccess(),
		Cgroup: cgroupEnforce, CgroupRoot: "/sandboxd", LogLevel: "info", LogFormat: "text",
		Slots: 4096, UIDBase: 0x20000000, KeepEnded: 10000, KeepEvents: 1000000,
		Usage: usageConfig{Interval: duration(5 * time.Second), DailyDays: 30},
		Pool:  poolConfig{Size: min(8, 4*runtime.NumCPU()), CPUShare: 0.5},
		Build: buildConfig{AtOnce: 2, TimeLimit: duration(time.Hour), ContextMax: 2 << 30, MaxFiles: 100000},
		Network: networkConfig{
			Pool: netip.MustParsePrefix("10.213.0.0/16"), PublishAddress: netip.AddrFrom4([4]byte{127, 0, 0, 1}),
			Default: networkPolicy{sandbox.NetworkPolicy{Mode: sandbox.NetworkOff}}, Most: sandbox.NetworkOpen,
		},
		Image: "host", ImageCache: 4 << 30,
		Defaults:   limitConfig{CPUs: 1, Memory: 512 << 20, PIDs: 512, OpenFiles: 4096, Disk: 2 << 30, Inodes: 200000},
		Lab:        builtinLab(),
		Production: builtinProduction(),
		Webhooks:   webhookConfig{GiveUp: duration(24 * time.Hour), Refusals: 10},
		Telemetry:  telemetryConfig{Sample: 1},
		Backup:     builtinBackup(),
	}
}

// maxConfig bounds a configuration file, in bytes.
const maxConfig = 1 << 20

// loadConfig reads the file at path over the built-in values. The default
// path may be missing; one that was asked for may not.
func loadConfig(path string, required bool) (config, error) {
	c := builtinConfig()
	f, err := os.Open(path) // a pipe, too
	if errors.Is(err, os.ErrNotExist) && !required {
		return c, nil
	}
	var b []byte
	if err == nil {
		defer f.Close()
		b, err = io.ReadAll(io.LimitReader(f, maxConfig+1))
	}
	if err == nil && len(b) > maxConfig {
		err = fmt.Errorf("%s has more than %d bytes: name a configuration file", path, maxConfig)
	}
	if err != nil {
		return c, fmt.Errorf("read the configuration: %w", err)
	}
	return parseConfig(path, b)
}

// parseConfig decodes a configuration file strictly.
func parseConfig(path string, b []byte) (config, error) {
	c := builtinConfig()
	err := yaml.NewDecoder(bytes.NewReader(b), yaml.Strict(), yaml.DisallowUnknownField()).Decode(&c)
	if errors.Is(err, io.EOF) { // nothing in it but comments; the decoder has emptied c
		return builtinConfig(), nil
	}
	if err != nil {
		return c, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, nil
}

// check finds what cannot work before anything is touched.
func (c config) check() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for name, dir := range map[string]string{"state_dir": c.StateDir, "run_dir": c.RunDir} {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/" {
			bad("%s %q: use a clean absolute path", name, dir)
		}
	}
	if c.Socket != "" && !filepath.IsAbs(c.Socket) {
		bad("socket %q: use an absolute path", c.Socket)
	}
	if c.Cgroup != cgroupEnforce && c.Cgroup != cgroupBestEffort {
		bad("cgroup %q: use %s or %s", c.Cgroup, cgroupEnforce, cgroupBestEffort)
	}
	if !filepath.IsAbs(c.CgroupRoot) || filepath.Clean(c.CgroupRoot) != c.CgroupRoot || c.CgroupRoot == "/" {
		bad("cgroup_parent %q: use an absolute path below the cgroup2 mount, as /sandboxd", c.CgroupRoot)
	}
	if _, err := newLogger(c); err != nil {
		errs = append(errs, err)
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		bad("log_format %q: use text or json", c.LogFormat)
	}
	if !c.Network.Pool.IsValid() || !c.Network.Pool.Addr().Is4() || c.Network.Pool.Bits() < 8 || c.Network.Pool.Bits() > 28 || c.Network.Pool.Masked() != c.Network.Pool {
		bad("network.pool %s: use an IPv4 prefix of /8 to /28 without host bits, as 10.213.0.0/16", c.Network.Pool)
	}
	errs = append(errs, c.checkAccess()...)
	errs = append(errs, c.Network.check()...)
	errs = append(errs, c.E2B.check()...)
	if err := c.Backup.check(); err != nil {
		errs = append(errs, err)
	}
	if err := c.Network.checkIngress(); err != nil {
		errs = append(errs, err)
	}
	// The ids of the last slot must stay below the kernel's two reserved ones.
	if most := int((1<<32 - 2 - uint64(c.UIDBase)) >> 16); c.Slots < 1 || c.Slots > most || c.Slots > 57000 {
		bad("max_sandboxes %d: use 1 to %d with uid_base %d", c.Slots, min(most, 57000), c.UIDBase)
	}
	// The 65,536 ids below are those of PID 1, one for each slot.
	if c.UIDBase < 2*65536 || c.UIDBase%65536 != 0 {
		bad("uid_base %d: use a multiple of 65536, at least 131072, with this id and the 65536 below it above all ids of the host", c.UIDBase)
	}
	if c.Pool.Size < 0 || c.Pool.Size > maxPool {
		bad("pool.size %d: use 0 (no pool) to %d", c.Pool.Size, maxPool)
	}
	if c.Pool.CPUShare <= 0 || c.Pool.CPUShare > 1 {
		bad("pool.cpu_share %g: use more than 0 and at most 1", c.Pool.CPUShare)
	}
	if i := time.Duration(c.Usage.Interval); i < 100*time.Millisecond || i > time.Hour || c.Usage.DailyDays < 1 || c.Usage.DailyDays > 36500 {
		bad("usage: use an interval of 100ms to 1h and 1 to 36500 days daily_after")
	}
	if _, err := cost.Reopen(c.Cost.Books, nil); err != nil {
		bad("cost: %w", err)
	}
	if c.Volume.Size < 0 || c.Volume.MaxBytes < 0 || c.Volume.MaxFiles < 0 || c.KeepEnded < 0 || c.KeepEvents < 0 || c.ImageCache < 0 {
		bad("sizes and counts must not be negative")
	}
	if b := c.Build; b.AtOnce < 1 || b.AtOnce > 64 || b.TimeLimit <= 0 || b.ContextMax < 1<<20 || b.MaxFiles < 1 || b.MaxFiles > 5000000 {
		bad("build: use 1 to 64 at_once, a time_limit, a context_max of 1m or more and 1 to 5000000 context_max_files")
	}
	if err := c.limits().Validate(); err != nil {
		bad("default_limits: %w", err)
	}
	errs = append(errs, c.checkLab()...)
	errs = append(errs, c.Webhooks.check()...)
	errs = append(errs, c.checkTelemetry()...)
	if err := sandbox.ValidateImageName(c.Image); err != nil {
		bad("default_image: %w", err)
	}
	for _, root := range c.BindRoots {
		if err := c.checkBindRoot(root); err != nil {
			bad("bind_roots: %w", err)
		}
	}
	for host, r := range c.Registries {
		for _, h := range append([]string{host}, r.Mirrors...) {
			if !sandbox.NamesRegistry(h+"/x") || sandbox.ValidateImageName(h+"/x") != nil {
				bad("registries: %.100q: use a host name, with a port if it is not the usual one, as registry.example:5000", h)
			}
		}
		if r.CAFile != "" && !filepath.IsAbs(r.CAFile) {
			bad("registries: %s: ca_file %q: use an absolute path", host, r.CAFile)
		}
	}
	return errors.Join(errs...)
}

// check finds mistakes in what the operator says about networks.
func (c networkConfig) check() []error {
	var errs []error
	for name, list := range map[string][]netip.Prefix{"deny": c.Deny, "admit": c.Admit} {
		for _, p := range list {
			if !p.IsValid() || !p.Addr().Is4() || p.Masked() != p {
				errs = append(errs, fmt.Errorf("network.%s %s: use IPv4 prefixes without host bits, as 10.20.0.0/16", name, p))
			}
		}
	}
	if err := c.Default.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("network.default: %w", err))
	}
	switch c.Most {
	case "", sandbox.NetworkOff, sandbox.NetworkAllow, sandbox.NetworkOpen:
	default:
		errs = append(errs, fmt.Errorf("network.most %q: use off, allow or open", c.Most))
	}
	return errs
}

// checkBindRoot keeps the daemon's own directories out of sandboxes.
func (c config) checkBindRoot(root string) error {
	if !filepath.IsAbs(root) || filepath.Clean(root) != root || root == "/" {
		return fmt.Errorf("%q: use a clean absolute path, and not /", root)
	}
	beneath := func(a, b string) bool { return a == b || strings.HasPrefix(a, b+"/") }
	for _, own := range []string{c.StateDir, c.RunDir, "/proc", "/sys", "/dev"} {
		if beneath(root, own) || beneath(own, root) {
			return fmt.Errorf("%q: it and %s lie beneath one another", root, own)
		}
	}
	return nil
}

func (c config) limits() sandbox.Limits {
	d := c.Defaults
	return sandbox.Limits{
		CPUs: d.CPUs, MemoryBytes: int64(d.Memory), PIDs: d.PIDs, OpenFiles: d.OpenFiles,
		DiskBytes: int64(d.Disk), DiskInodes: d.Inodes,
	}
}

func (c config) socketPath() string {
	if c.Socket != "" {
		return c.Socket
	}
	return filepath.Join(c.RunDir, "sandboxd.sock")
}
