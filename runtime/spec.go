package runtime

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
)

// complete fills the defaults in and checks the spec against the host.
func (m *Manager) complete(ctx context.Context, asked sandbox.Spec, base *sandbox.Image) (sandbox.Spec, sandbox.Image, error) {
	if err := asked.Validate(); err != nil {
		return asked, sandbox.Image{}, err
	}
	s := asked.Clone()
	image, err := m.madeOf(ctx, &s, base)
	if err != nil {
		return s, image, err
	}
	if s.ImageDigest != "" && s.ImageDigest != image.Digest {
		return s, image, sandbox.Errorf(sandbox.ErrConflict, "image_digest_mismatch", "image %q now is %s, not %.80s: import the one you mean, or leave image_digest out", s.Image, image.Digest, s.ImageDigest)
	}
	s.Image, s.ImageDigest = image.Name, image.Digest // the name may have been a short one
	if s.Capabilities == "" {
		s.Capabilities = sandbox.CapabilitiesRoot
	}
	if s.Network, err = m.networkOf(s.Network); err != nil {
		return s, image, err
	}
	if s.TTLSeconds == 0 {
		s.TTLSeconds = int64(m.cfg.DefaultTTL / time.Second)
	}
	if s.IdleTimeoutSeconds == 0 {
		s.IdleTimeoutSeconds = int64(m.cfg.DefaultIdle / time.Second)
	}
	s.Limits = withDefaults(s.Limits, m.cfg.Defaults)
	if most := m.shells.MaxOpenFiles(); s.Limits.OpenFiles > most {
		return s, image, sandbox.Errorf(sandbox.ErrInvalid, "invalid_limits", "limit open_files %d: this host gives at most %d", s.Limits.OpenFiles, most)
	}
	return s, image, nil
}

// madeOf is what a sandbox will be made of: base, an image, or a snapshot's
// layers.
func (m *Manager) madeOf(ctx context.Context, s *sandbox.Spec, base *sandbox.Image) (sandbox.Image, error) {
	if base != nil {
		return *base, nil
	}
	if s.Snapshot != "" {
		return m.imageOfSnapshot(ctx, s)
	}
	s.Image = first(s.Image, m.cfg.DefaultImage)
	return m.Image(ctx, s.Image)
}

func withDefaults(l, d sandbox.Limits) sandbox.Limits {
	return sandbox.Limits{
		CPUs: first(l.CPUs, d.CPUs), CPUWeight: first(l.CPUWeight, d.CPUWeight), MemoryBytes: first(l.MemoryBytes, d.MemoryBytes),
		PIDs: first(l.PIDs, d.PIDs), IOReadBPS: first(l.IOReadBPS, d.IOReadBPS), IOWriteBPS: first(l.IOWriteBPS, d.IOWriteBPS),
		IOReadIOPS: first(l.IOReadIOPS, d.IOReadIOPS), IOWriteIOPS: first(l.IOWriteIOPS, d.IOWriteIOPS),
		OpenFiles: first(l.OpenFiles, d.OpenFiles), DiskBytes: first(l.DiskBytes, d.DiskBytes), DiskInodes: first(l.DiskInodes, d.DiskInodes),
	}
}

// first returns the first value that is not zero.
func first[T comparable](values ...T) T {
	var zero T
	for _, v := range values {
		if v != zero {
			return v
		}
	}
	return zero
}

// enforcement says for each limit whether this host enforces it.
func (m *Manager) enforcement(s sandbox.Spec) []sandbox.Enforcement {
	all := m.cgroup.Enforcement(s.Limits)
	all = append(all, m.roots.Enforcement(s.Limits)...)
	files := sandbox.Enforcement{Limit: "open_files", Asked: "none", Enforced: true}
	if s.Limits.OpenFiles > 0 {
		files.Asked = fmt.Sprint(s.Limits.OpenFiles)
	}
	return append(all, files, m.net.Enforcement(s.Network))
}

func (m *Manager) attachment(sb sandbox.Sandbox, shell *launch.Shell) netns.Attachment {
	return netns.Attachment{ID: sb.ID, Name: sb.Spec.Name, Slot: sb.Slot, NetNS: shell.NetNS, Policy: m.inForce(sb.Spec.Network)}
}

func (m *Manager) uidBase(slot int) uint32 { return m.cfg.UIDBase + uint32(slot)*idSpan }

// initID returns the host id of the PID 1 of a slot: one of the idSpan below
// the first slot's, of which there are more than slots.
func (m *Manager) initID(slot int) uint32 { return m.cfg.UIDBase - idSpan + uint32(slot) }

// environment lays the spec's variables over the image's.
func environment(image []string, spec map[string]string) map[string]string {
	env := map[string]string{}
	for _, kv := range image {
		if k, v, ok := strings.Cut(kv, "="); ok && k != "" {
			env[k] = v
		}
	}
	maps.Copy(env, spec)
	return env
}

// hostname makes a host name of a sandbox's name, or else of its id.
func hostname(name string, id sandbox.ID) string {
	h := strings.Trim(strings.NewReplacer(".", "-", "_", "-").Replace(name), "-")
	return first(h, string(id))
}

func hostsFile(host string, addr netip.Addr) string {
	return fmt.Sprintf("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n%s\t%s\n", addr, host)
}

// resolvConf names the daemon's own resolver, whatever the policy, which may
// change.
func (m *Manager) resolvConf() string { return fmt.Sprintf("nameserver %s\n", m.net.Gateway()) }

// specHash tells whether a repeated request asks for the same.
func specHash(s sandbox.Spec) (string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("encode spec: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}
