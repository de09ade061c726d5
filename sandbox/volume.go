package sandbox

import (
	"path"
	"strings"
	"time"
)

// Volume is a directory with a name and limits of its own. Sandboxes mount it;
// it stays when they are gone.
type Volume struct {
	Name        string            `json:"name"`
	Owner       string            `json:"owner,omitempty" doc:"Who made it."`
	Status      VolumeStatus      `json:"status" enum:"creating,ready,removing"`
	SizeBytes   int64             `json:"size_bytes" doc:"Most bytes it may hold; 0 means no limit of its own."`
	Inodes      int64             `json:"inodes" doc:"Most files it may hold; 0 means no limit of its own."`
	UsedBytes   uint64            `json:"used_bytes" doc:"Now."`
	UsedInodes  uint64            `json:"used_inodes" doc:"Files and directories, now."`
	Uncounted   bool              `json:"uncounted,omitempty" doc:"This host cannot count what it holds: used_bytes and used_inodes say nothing."`
	CreatedAt   time.Time         `json:"created_at"`
	Labels      map[string]string `json:"labels,omitempty"`
	UsedBy      []ID              `json:"used_by,omitempty" doc:"Living sandboxes that mount it, stopped ones too."`
	Enforcement []Enforcement     `json:"enforcement,omitempty" doc:"Each limit, and whether this host enforces it."`
}

// VolumeStatus is where a volume is between being made and being gone.
type VolumeStatus string

// The statuses of a volume.
//
//	creating → ready → removing → gone
//
// One found creating or removing at the start of the daemon is removed: nobody
// was told of it, or somebody asked for it.
const (
	VolumeCreating VolumeStatus = "creating"
	VolumeReady    VolumeStatus = "ready"
	VolumeRemoving VolumeStatus = "removing"
)

// VolumeRequest asks for a volume.
type VolumeRequest struct {
	Name      string            `json:"name" minLength:"1" maxLength:"63"`
	SizeBytes int64             `json:"size_bytes,omitempty" minimum:"0" doc:"Most bytes it may hold; 0 means the daemon's default for a sandbox's disk."`
	Inodes    int64             `json:"inodes,omitempty" minimum:"0" doc:"Most files it may hold; 0 means the daemon's default for a sandbox's disk."`
	Labels    map[string]string `json:"labels,omitempty"`
	Actor     string            `json:"-"`
}

// Validate checks what can be judged without a host. Class ErrInvalid.
func (r VolumeRequest) Validate() error {
	if err := ValidateName(r.Name); err != nil {
		return err
	}
	if err := validateLabels(r.Labels); err != nil {
		return err
	}
	return Limits{DiskBytes: r.SizeBytes, DiskInodes: r.Inodes}.Validate()
}

// VolumeChange changes a volume's limits. What it holds beyond a new one
// stays.
type VolumeChange struct {
	SizeBytes *int64 `json:"size_bytes,omitempty" minimum:"0" doc:"Most bytes it may hold; 0 means the daemon's default; left out: as it is."`
	Inodes    *int64 `json:"inodes,omitempty" minimum:"0" doc:"Most files it may hold; 0 means the daemon's default; left out: as it is."`
	Actor     string `json:"-"`
}

// Validate checks what can be judged without a host. Class ErrInvalid.
func (c VolumeChange) Validate() error {
	var l Limits
	if c.SizeBytes != nil {
		l.DiskBytes = *c.SizeBytes
	}
	if c.Inodes != nil {
		l.DiskInodes = *c.Inodes
	}
	return l.Validate()
}

// maxVolumes is how many mounts a sandbox may have beyond its root.
const maxVolumes = 32

// reservedMounts belong to the daemon, with all beneath them.
var reservedMounts = []string{"/proc", "/sys", "/dev"}

// validateVolumes checks where mounts are to stand. One may stand beneath
// another.
func validateVolumes(mounts []VolumeMount) error {
	if len(mounts) > maxVolumes {
		return Errorf(ErrInvalid, "invalid_volumes", "%d volumes: at most %d", len(mounts), maxVolumes)
	}
	seen := map[string]bool{}
	for _, m := range mounts {
		if err := m.validate(); err != nil {
			return err
		}
		if seen[m.Path] {
			return Errorf(ErrInvalid, "invalid_volumes", "two volumes at %.80q: give each a path of its own", m.Path)
		}
		seen[m.Path] = true
	}
	return nil
}

func (m VolumeMount) validate() error {
	bad := func(format string, args ...any) error {
		return Errorf(ErrInvalid, "invalid_volumes", format, args...)
	}
	switch {
	case (m.Volume == "") == (m.HostPath == ""):
		return bad("the mount at %.80q: name either a volume or a host path", m.Path)
	case m.Volume != "":
		if err := ValidateName(m.Volume); err != nil {
			return err
		}
		if m.Writable {
			return bad("volume %s: writable is for host paths; a volume is, unless it is read_only", m.Volume)
		}
	case !cleanPath(m.HostPath) || m.HostPath == "/":
		return bad("host path %.80q: use an absolute path without '.', '..', doubled or trailing slashes, and not / itself", m.HostPath)
	case m.ReadOnly && m.Writable:
		return bad("host path %.80q: either read_only or writable", m.HostPath)
	}
	if !cleanPath(m.Path) || m.Path == "/" {
		return bad("volume path %.80q: use an absolute path without '.', '..', doubled or trailing slashes, and not / itself", m.Path)
	}
	if m.Path == "/etc" {
		return bad("volume path /etc: the sandbox's own names are written there; mount below it, as /etc/app")
	}
	for _, r := range reservedMounts {
		if m.Path == r || strings.HasPrefix(m.Path, r+"/") {
			return bad("volume path %.80q: %s belongs to the sandbox itself, choose another place", m.Path, r)
		}
	}
	return nil
}

// cleanPath accepts absolute paths in their shortest form.
func cleanPath(p string) bool {
	if !path.IsAbs(p) || path.Clean(p) != p || len(p) > 4095 || strings.ContainsAny(p, "\x00\n") {
		return false
	}
	for part := range strings.SplitSeq(p, "/") {
		if len(part) > 255 {
			return false
		}
	}
	return true
}
