package sandbox

import (
	"maps"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Spec is what a caller asks for. Zero values mean the daemon's defaults,
// which are filled in before the spec is stored.
type Spec struct {
	Name               string            `json:"name,omitempty" maxLength:"63" doc:"Unique among the living sandboxes of one owner; empty for none."`
	Image              string            `json:"image,omitempty" maxLength:"512" doc:"Image name; empty means the daemon's default."`
	ImageDigest        string            `json:"image_digest,omitempty" maxLength:"80" doc:"Content of the image; when given it must match, and in a record it tells what was used."`
	Snapshot           SnapshotID        `json:"snapshot,omitempty" maxLength:"14" doc:"Begin with the files of this snapshot, on the image it was taken of; image must be empty or that one."`
	Hostname           string            `json:"hostname,omitempty" maxLength:"63" doc:"Host name inside; empty means the name, else the id."`
	Env                map[string]string `json:"env,omitempty" doc:"Environment of every process."`
	WorkDir            string            `json:"workdir,omitempty" maxLength:"4096" doc:"Working directory of processes that name none."`
	User               string            `json:"user,omitempty" maxLength:"64" doc:"User of processes that name none: a name or uid[:gid]."`
	Capabilities       Capabilities      `json:"capabilities,omitempty" enum:"root,none" doc:"root: eight capabilities inside the sandbox's own user namespace; none: no capability."`
	Limits             Limits            `json:"limits,omitempty"`
	Network            NetworkPolicy     `json:"network,omitempty"`
	TTLSeconds         int64             `json:"ttl_seconds,omitempty" minimum:"0" maximum:"31536000" doc:"Lifetime; 0 means the daemon's default, which may be none."`
	OnDeadline         DeadlineAction    `json:"on_deadline,omitempty" enum:"end,pause,stop" doc:"What becomes of it when its lifetime is over: end (default), pause (memory is kept) or stop (files are kept)."`
	IdleTimeoutSeconds int64             `json:"idle_timeout_seconds,omitempty" minimum:"0" maximum:"31536000" doc:"Ended after this long without a running process or a call; 0 means the daemon's default, which may be none."`
	Labels             map[string]string `json:"labels,omitempty"`
	CostEntries        bool              `json:"cost_entries,omitempty" doc:"Programs inside may enter costs and revenue of this sandbox."`
	Project            string            `json:"project,omitempty" maxLength:"63" doc:"Project its costs count for: prj_…."`
	AutoSnapshot       bool              `json:"auto_snapshot,omitempty" doc:"Take a restore point after each command that changed files."`
	Volumes            []VolumeMount     `json:"volumes,omitempty" maxItems:"32" doc:"Directories that outlive the sandbox."`
}

// VolumeMount puts a named volume, or a directory of the host, at a path.
type VolumeMount struct {
	Volume   string `json:"volume,omitempty" maxLength:"63" doc:"Name of a volume; it must exist."`
	HostPath string `json:"host_path,omitempty" maxLength:"4096" doc:"A directory of the host beneath one of the configured bind roots; for admins, in place of a volume."`
	Path     string `json:"path" maxLength:"4096" doc:"Where it appears inside; made if it is missing."`
	ReadOnly bool   `json:"read_only,omitempty"`
	Writable bool   `json:"writable,omitempty" doc:"Of a host path, which is read-only without it."`
}

// InitID is the user id of PID 1 inside a sandbox. It is mapped beside the
// sandbox's own 65,536, and nobody inside can become it: the system call filter
// refuses it, and user names resolve to no id above 65535. So the kernel
// refuses what asks for the same user: limits, affinity and priorities of PID 1.
const InitID = 65536

// Capabilities is a capability profile (see docs/SECURITY.md).
type Capabilities string

// The capability profiles.
const (
	CapabilitiesRoot Capabilities = "root"
	CapabilitiesNone Capabilities = "none"
)

// Limits bounds what a sandbox may use. Zero means no limit of that kind,
// except where the daemon's configuration sets a default.
type Limits struct {
	CPUs        float64 `json:"cpus,omitempty" minimum:"0" maximum:"4096" doc:"CPU time as a number of cores; whole numbers also pin to that many cpus so that nproc tells the truth."`
	CPUWeight   uint64  `json:"cpu_weight,omitempty" minimum:"0" maximum:"10000" doc:"Share against other sandboxes, 1 to 10000; 0 means 100."`
	MemoryBytes int64   `json:"memory_bytes,omitempty" minimum:"0" doc:"Memory of the workload; swap is always 0."`
	PIDs        int64   `json:"pids,omitempty" minimum:"0" maximum:"4194304" doc:"Tasks (processes and threads) of the workload."`
	IOReadBPS   uint64  `json:"io_read_bps,omitempty" doc:"Bytes read per second from the volume's disk."`
	IOWriteBPS  uint64  `json:"io_write_bps,omitempty" doc:"Bytes written per second to the volume's disk."`
	IOReadIOPS  uint64  `json:"io_read_iops,omitempty" doc:"Read operations per second."`
	IOWriteIOPS uint64  `json:"io_write_iops,omitempty" doc:"Write operations per second."`
	OpenFiles   uint64  `json:"open_files,omitempty" maximum:"1048576" doc:"RLIMIT_NOFILE of each process."`
	DiskBytes   int64   `json:"disk_bytes,omitempty" minimum:"0" doc:"Bytes the sandbox may write to its own layer."`
	DiskInodes  int64   `json:"disk_inodes,omitempty" minimum:"0" doc:"Files the sandbox may make in its own layer."`
}

// Bounds of a spec's open-ended fields.
const (
	maxEnvVars   = 1024
	maxEnvBytes  = 256 << 10
	maxLabels    = 64
	maxLabelLen  = 256
	minMemory    = 4 << 20
	minDisk      = 1 << 20
	minInodes    = 64
	minPIDs      = 1
	minOpenFiles = 512 // PID 1, whose limit its workloads inherit, needs some itself
	maxTTL       = 365 * 24 * time.Hour
)

// Clone returns a deep copy.
func (s Spec) Clone() Spec {
	s.Env = maps.Clone(s.Env)
	s.Labels = maps.Clone(s.Labels)
	s.Network = s.Network.Clone()
	s.Volumes = slices.Clone(s.Volumes)
	return s
}

// Validate checks everything that can be judged without a host. Its errors
// are of class ErrInvalid and name the field.
func (s Spec) Validate() error {
	bad := func(code, format string, args ...any) error { return Errorf(ErrInvalid, code, format, args...) }
	if s.Name != "" {
		if err := ValidateName(s.Name); err != nil {
			return err
		}
	}
	if s.Image != "" {
		if err := ValidateImageName(s.Image); err != nil {
			return err
		}
	}
	if s.Snapshot != "" {
		if _, err := ParseSnapshotID(string(s.Snapshot)); err != nil {
			return err
		}
	}
	if s.Hostname != "" && !hostnameOK(s.Hostname) {
		return bad("invalid_hostname", "hostname %.70q: use 1 to 63 letters, digits and '-', not at the ends", s.Hostname)
	}
	if err := ValidateEnv(s.Env); err != nil {
		return err
	}
	if err := ValidateWorkDir(s.WorkDir); err != nil {
		return err
	}
	if err := ValidateUser(s.User); err != nil {
		return err
	}
	switch s.Capabilities {
	case "", CapabilitiesRoot, CapabilitiesNone:
	default:
		return bad("invalid_capabilities", "capabilities %.40q: use root or none", s.Capabilities)
	}
	if err := s.Network.Validate(); err != nil {
		return err
	}
	for name, secs := range map[string]int64{"ttl_seconds": s.TTLSeconds, "idle_timeout_seconds": s.IdleTimeoutSeconds} {
		if secs < 0 || secs > int64(maxTTL/time.Second) {
			return bad("invalid_timeout", "%s %d: use 0 to %d", name, secs, int64(maxTTL/time.Second))
		}
	}
	if err := s.OnDeadline.validate(); err != nil {
		return err
	}
	if err := validateLabels(s.Labels); err != nil {
		return err
	}
	if err := validateVolumes(s.Volumes); err != nil {
		return err
	}
	if s.Project != "" {
		if err := ValidateProject(s.Project); err != nil {
			return err
		}
	}
	return s.Limits.Validate()
}

// ReservedLabels begin the keys of labels that the daemon itself finds
// sandboxes by: no caller may give or change one.
const ReservedLabels = "sandboxd."

// ValidateAsked is Validate of a spec as a caller sends it. Class ErrInvalid,
// with code label_reserved for labels that are the daemon's own.
func (s Spec) ValidateAsked() error {
	for k := range s.Labels {
		if strings.HasPrefix(k, ReservedLabels) {
			return Errorf(ErrInvalid, "label_reserved", "label %.40q: keys that begin with %s are the daemon's own: choose another", k, ReservedLabels)
		}
	}
	return s.Validate()
}

func validateLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return Errorf(ErrInvalid, "invalid_labels", "%d labels: at most %d", len(labels), maxLabels)
	}
	for k, v := range labels {
		if k == "" || len(k) > maxLabelLen || len(v) > maxLabelLen || strings.ContainsAny(k, "=,\x00\n") || strings.ContainsAny(v, "\x00\n") {
			return Errorf(ErrInvalid, "invalid_labels", "label %.40q: keys are 1 to %d bytes without '=' or ',', values at most %d bytes of one line", k, maxLabelLen, maxLabelLen)
		}
	}
	return nil
}

// Validate checks the limits against the smallest that can work.
func (l Limits) Validate() error {
	least := []struct {
		name     string
		value    int64
		min, max int64
	}{
		{"memory_bytes", l.MemoryBytes, minMemory, 1 << 50},
		{"disk_bytes", l.DiskBytes, minDisk, 1 << 50},
		{"disk_inodes", l.DiskInodes, minInodes, 1 << 40},
		{"pids", l.PIDs, minPIDs, 1 << 22},
		{"open_files", int64(min(l.OpenFiles, 1<<62)), minOpenFiles, 1 << 20},
		{"cpu_weight", int64(min(l.CPUWeight, 1<<62)), 1, 10000},
	}
	for _, f := range least {
		if f.value != 0 && (f.value < f.min || f.value > f.max) {
			return Errorf(ErrInvalid, "invalid_limits", "limit %s %d: use %d to %d, or 0 for the default", f.name, f.value, f.min, f.max)
		}
	}
	// The kernel's smallest quota is 1 ms a period of 100 ms.
	if l.CPUs != 0 && !(l.CPUs >= 0.01 && l.CPUs <= 4096) {
		return Errorf(ErrInvalid, "invalid_limits", "limit cpus %v: use 0.01 to 4096, or 0 for the default", l.CPUs)
	}
	return nil
}

// ValidateEnv checks an environment's names and size.
func ValidateEnv(env map[string]string) error {
	if len(env) > maxEnvVars {
		return Errorf(ErrInvalid, "invalid_env", "%d environment variables: at most %d", len(env), maxEnvVars)
	}
	total := 0
	for k, v := range env {
		total += len(k) + len(v) + 2
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return Errorf(ErrInvalid, "invalid_env", "environment variable %.40q: names must not be empty or hold '=', neither side a zero byte", k)
		}
	}
	if total > maxEnvBytes {
		return Errorf(ErrInvalid, "invalid_env", "environment of %d bytes: at most %d", total, maxEnvBytes)
	}
	return nil
}

// ValidateWorkDir accepts an absolute path, or none.
func ValidateWorkDir(dir string) error {
	if dir != "" && (!path.IsAbs(dir) || len(dir) > 4096 || strings.ContainsRune(dir, 0)) {
		return Errorf(ErrInvalid, "invalid_workdir", "working directory %.80q: use an absolute path", dir)
	}
	return nil
}

// ValidateFilePath accepts the path of a file in a sandbox. In listings, which
// are JSON, U+FFFD stands for each byte of a name that is no UTF-8: whoever acts
// on one must not meet another file that has it in its name. ErrInvalid
// invalid_path.
func ValidateFilePath(p string) error {
	switch {
	case !path.IsAbs(p) || len(p) > 4096 || strings.ContainsRune(p, 0):
		return Errorf(ErrInvalid, "invalid_path", "path %.100q: use an absolute path inside the sandbox, of at most 4096 bytes", p)
	case strings.ContainsRune(p, utf8.RuneError): // and what is no UTF-8
		return Errorf(ErrInvalid, "invalid_path", "path %.300q is not UTF-8, or holds the U+FFFD that listings show for what is not: reach it by its directory ('sandbox cp', the archive), or by a pattern in a shell inside", p)
	}
	return nil
}

// ValidateUser accepts a user name or uid[:gid] as the sandbox's own
// /etc/passwd will resolve it, or none.
func ValidateUser(u string) error {
	if len(u) > 64 || strings.ContainsAny(u, "\x00\n/ ") || strings.Count(u, ":") > 1 {
		return Errorf(ErrInvalid, "invalid_user", "user %.70q: use a name, a uid or uid:gid", u)
	}
	return nil
}

func hostnameOK(s string) bool {
	if len(s) > 63 || strings.HasPrefix(s, "-") || strings.HasSuffix(s, "-") {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return s != ""
}
