package runtime

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// Create makes a sandbox and returns when PID 1 is ready for work. A caller
// that goes away does not stop it: the work is the daemon's from the moment
// it began. With an idempotency key a repeated call returns the sandbox of the
// first.
func (m *Manager) Create(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
	sb, _, err := m.createOnce(ctx, req)
	return sb, err
}

// createOnce is Create; existed reports that the idempotency key had made the
// sandbox before.
func (m *Manager) createOnce(ctx context.Context, req sandbox.CreateRequest) (sb sandbox.Sandbox, existed bool, err error) {
	type result struct {
		sb      sandbox.Sandbox
		existed bool
		err     error
	}
	done := make(chan result, 1)
	m.spawn(func() {
		work, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
		defer cancel()
		m.creating.Add(1)
		defer m.creating.Add(-1)
		sb, existed, err := m.createPatiently(work, req)
		done <- result{sb, existed, err}
	})
	select {
	case r := <-done:
		return r.sb, r.existed, r.err
	case <-ctx.Done():
		return sandbox.Sandbox{}, false, sandbox.Errorf(sandbox.ErrUnavailable, "create_abandoned", "the caller went away while a sandbox was being created: it goes on: %w", ctx.Err())
	}
}

// createPatiently waits a little for a slot that something on its way out
// still has: who removes a sandbox may make another at once.
func (m *Manager) createPatiently(ctx context.Context, req sandbox.CreateRequest) (sb sandbox.Sandbox, existed bool, err error) {
	for deadline := time.Now().Add(slotPatience); ; pause(ctx, slotPoll) {
		coming := m.leaving.Load() > 0 || m.pool.building.Load()
		sb, existed, err = m.create(ctx, req)
		if !coming || sandbox.CodeOf(err) != codeNoSlot || time.Now().After(deadline) {
			return sb, existed, err
		}
	}
}

// create gives a shell of the pool what was asked for, or builds one where
// the pool has none or its shell was no good.
func (m *Manager) create(ctx context.Context, req sandbox.CreateRequest) (sb sandbox.Sandbox, existed bool, err error) {
	// The image keeps its layers until the row names them.
	m.imports.RLock()
	unlock := sync.OnceFunc(m.imports.RUnlock)
	defer unlock()
	p, err := m.plan(ctx, req)
	if err != nil {
		return sandbox.Sandbox{}, false, err
	}
	spoken, err := m.state.Spoken(ctx, p.sb.Owner, p.key, p.sb.Spec.Name)
	if err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if s := m.takeUnless(spoken); s != nil {
		sb, existed, err := m.claim(ctx, s, p)
		if !errors.Is(err, errUnfit) {
			return sb, existed, err
		}
		m.log.Warn("a shell of the pool was no good: building another", "shell", s.b.id, "err", err)
	}
	b, sb, err := m.intend(ctx, p)
	unlock()
	if err != nil {
		return sb, false, err
	}
	if b == nil {
		sb, err = m.settled(ctx, sb)
		return sb, true, err
	}
	defer b.unlock()
	sb, err = m.build(ctx, b, sb, p)
	return sb, false, err
}

// takeUnless takes a shell from the pool, but not for a request that will be
// refused, or answered with what an earlier one made.
func (m *Manager) takeUnless(spoken bool) *pooled {
	if spoken {
		return nil
	}
	return m.pool.take()
}

// codeNoSlot is the code of the error for a host that is full.
const codeNoSlot = "slots_exhausted"

// intention is what a create request comes to.
type intention struct {
	sb    sandbox.Sandbox // without an id and what follows from it
	image sandbox.Image
	key   string // for idempotency
	hash  string
}

// plan completes and checks a request.
func (m *Manager) plan(ctx context.Context, req sandbox.CreateRequest) (intention, error) {
	spec, image, err := m.complete(ctx, req.Spec)
	if err != nil {
		return intention{}, err
	}
	hash, err := specHash(req.Spec)
	return intention{
		sb:    sandbox.Sandbox{Owner: req.Actor, Spec: spec, CreatedAt: time.Now().UTC()},
		image: image, key: req.IdempotencyKey, hash: hash,
	}, err
}

// named is the intention's sandbox once it has an id.
func (p intention) named(id sandbox.ID) sandbox.Sandbox {
	sb := p.sb
	sb.ID = id
	if sb.Spec.Hostname == "" {
		sb.Spec.Hostname = hostname(sb.Spec.Name, id)
	}
	return sb
}

func (m *Manager) params(p intention, sb sandbox.Sandbox) state.CreateParams {
	return state.CreateParams{
		Sandbox: sb, Slots: m.cfg.Slots, UIDBase: m.cfg.UIDBase, Actor: sb.Owner, Image: p.image,
		IdempotencyKey: p.key, RequestHash: p.hash,
	}
}

// errUnfit is wrapped by the error of a claim that another shell may serve.
var errUnfit = errors.New("shell unfit")

// claim makes a pooled shell a sandbox. Its row is written last, running, in
// the one commit of this path, while PID 1 takes its root: what a crash leaves
// before that is a shell without a row, which the next start sweeps away, and
// between the two a PID 1 that says it has no configuration.
func (m *Manager) claim(ctx context.Context, s *pooled, p intention) (row sandbox.Sandbox, existed bool, err error) {
	b := s.b
	b.op <- struct{}{} // nobody knows the box yet
	defer b.unlock()
	sb := p.named(b.id)
	sb.Slot = s.slot
	o, ch, err := m.dress(ctx, b, sb, p.image, s)
	if err != nil {
		m.spawn(func() { m.scrap(s) })
		return sb, false, fmt.Errorf("%w: %w", errUnfit, err)
	}
	configured := make(chan error, 1)
	m.spawn(func() {
		defer o.Close()
		configured <- b.guest.Configure(ctx, o.config)
	})
	params := m.params(p, sb)
	params.Slot, params.Status, params.Change = &s.slot, sandbox.StatusRunning, ch
	// The box stands before the row, so that nobody finds a row without one.
	m.keepBox(b)
	row, existed, err = m.state.CreateSandbox(ctx, params)
	unconfigured := <-configured
	switch {
	case err == nil && !existed && unconfigured == nil:
		b.setStatus(row.Status)
		m.watch(b, row, b.present(), 0)
		return row, false, nil
	case err == nil && !existed:
		m.failed(ctx, b, unconfigured)
		return row, false, unconfigured
	}
	m.dropBox(b.id)
	m.spawn(func() { m.scrap(s) })
	if err == nil {
		row, err = m.settled(ctx, row)
	}
	return row, existed, err
}

// settled waits for a creation another request began and returns its outcome.
func (m *Manager) settled(ctx context.Context, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
	if b := m.box(sb.ID); b != nil {
		if err := b.lock(ctx); err != nil {
			return sb, err
		}
		b.unlock()
	}
	return m.state.Sandbox(ctx, sb.ID)
}

// intend writes the intent of a new sandbox and returns its box, locked; no
// box where an idempotency key led to a sandbox made before.
func (m *Manager) intend(ctx context.Context, p intention) (*box, sandbox.Sandbox, error) {
	id := sandbox.NewID()
	b := newBox(id, m.dial(m.shells.SocketPath(id)))
	b.op <- struct{}{}
	m.keepBox(b)
	params := m.params(p, p.named(id))
	params.Status = sandbox.StatusCreating
	sb, existed, err := m.state.CreateSandbox(ctx, params)
	if err != nil || existed {
		m.dropBox(id)
		return nil, sb, err
	}
	b.setStatus(sb.Status)
	return b, sb, nil
}

// build takes a sandbox in status creating to running, or tears it down.
func (m *Manager) build(ctx context.Context, b *box, sb sandbox.Sandbox, p intention) (sandbox.Sandbox, error) {
	row, err := m.bringUp(ctx, b, sb, p.image, sb.Owner)
	if err != nil {
		m.failed(ctx, b, err)
		return sb, err
	}
	return row, nil
}

// failed ends a sandbox that has a row and came to nothing.
func (m *Manager) failed(ctx context.Context, b *box, err error) {
	m.log.Error("create sandbox", "sandbox", b.id, "err", err)
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	_ = m.endLocked(clean, b, ending{reason: sandbox.ReasonCreateFailed, detail: explain(err), actor: "daemon"})
}

// bringUp gives a sandbox in status creating its kernel objects and moves it
// to running. What it made before an error, the one teardown takes away.
func (m *Manager) bringUp(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image, actor string) (sandbox.Sandbox, error) {
	shell, err := m.raise(ctx, b, sb.Slot)
	if err != nil {
		return sb, err
	}
	o, ch, err := m.dress(ctx, b, sb, image, nil)
	if err != nil {
		return sb, err
	}
	defer o.Close()
	if err := b.guest.Configure(ctx, o.config); err != nil {
		return sb, err
	}
	ch.Actor = actor
	row, err := m.move(ctx, b.id, sandbox.StatusRunning, ch, sandbox.StatusCreating)
	if err != nil {
		return sb, err
	}
	m.watch(b, row, shell, 0)
	return row, nil
}

// raise builds a shell: cgroup, namespaces, PID 1 on its skeleton root.
func (m *Manager) raise(ctx context.Context, b *box, slot int) (*launch.Shell, error) {
	b.mu.Lock()
	b.counted = false
	b.mu.Unlock()
	if err := m.cgroup.Create(b.id); err != nil {
		return nil, err
	}
	uidBase := m.uidBase(slot)
	shell, err := m.shells.Start(ctx, launch.ShellSpec{ID: b.id, CgroupPath: m.cgroup.Path(b.id), UIDBase: uidBase})
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	b.shell, b.expected, b.oomKills, b.oomAt = shell, false, 0, time.Time{}
	b.mu.Unlock()
	return shell, m.cgroup.Settle(ctx, b.id, shell.PID, uidBase)
}

// dress gives a sandbox's shell its limits, files and network. It returns what
// PID 1 must be told and what the row of the running sandbox must say. ready
// tells what a pooled shell has already; nil of any other.
func (m *Manager) dress(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image, ready *pooled) (*outfit, state.Change, error) {
	shell, uidBase := b.present(), m.uidBase(sb.Slot)
	if ready == nil || ready.limits != sb.Spec.Limits {
		if err := m.cgroup.SetLimits(b.id, sb.Spec.Limits); err != nil {
			return nil, state.Change{}, err
		}
		if err := m.roots.CreateUpper(b.id, sb.Slot, sb.Spec.Limits); err != nil {
			return nil, state.Change{}, err
		}
	}
	if ready == nil || sb.Spec.Network.Mode != sandbox.NetworkOff {
		if err := m.net.Attach(ctx, m.attachment(sb, shell)); err != nil {
			return nil, state.Change{}, err
		}
	}
	furnished := false
	if sb.StartedAt == nil { // nobody has been in these files yet
		var had rootfs.Identity
		if ready != nil {
			had = ready.wrote
		}
		want, err := m.identity(sb)
		if err != nil {
			return nil, state.Change{}, err
		}
		if furnished, err = m.roots.Furnish(b.id, image, had, want); err != nil {
			return nil, state.Change{}, err
		}
	}
	addr, err := m.net.Address(sb.Slot)
	if err != nil {
		return nil, state.Change{}, err
	}
	ch := state.Change{
		InitPID: &shell.PID, InitStart: &shell.StartTime, BootID: &m.cfg.BootID, Address: &addr, UIDBase: &uidBase,
		Enforcement: m.enforcement(sb.Spec), Actor: sb.Owner,
	}
	if sb.StartedAt == nil {
		now := time.Now().UTC()
		ch.StartedAt = &now
		if sb.Spec.TTLSeconds > 0 {
			deadline := now.Add(time.Duration(sb.Spec.TTLSeconds) * time.Second)
			ch.Deadline = &deadline
		}
	}
	o, err := m.outfit(ctx, b, sb, image, given{files: furnished, prepared: ready != nil})
	return o, ch, err
}

// identity is what the files of a sandbox say about it.
func (m *Manager) identity(sb sandbox.Sandbox) (rootfs.Identity, error) {
	addr, err := m.net.Address(sb.Slot)
	if err != nil {
		return rootfs.Identity{}, err
	}
	return rootfs.Identity{
		Hostname: sb.Spec.Hostname, Hosts: hostsFile(sb.Spec.Hostname, addr), ResolvConf: m.resolvConf(sb.Spec.Network),
	}, nil
}

// given is what a configuration need not bring any more.
type given struct {
	files    bool // the root tells the sandbox's identity already
	prepared bool // PID 1 has its filter and cgroup
}

// outfit is a mounted root and everything else PID 1 must be told.
type outfit struct {
	config guest.Config
	root   *rootfs.Root
}

// Close lets go of the descriptors; what PID 1 took it keeps.
func (o *outfit) Close() {
	_ = o.root.Close() // descriptors of mounts: nothing to lose
	if o.config.Work != nil {
		_ = o.config.Work.Close()
	}
}

// outfit mounts the root of a sandbox.
func (m *Manager) outfit(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image, has given) (*outfit, error) {
	identity, err := m.identity(sb)
	if err != nil {
		return nil, err
	}
	var last int64
	if sb.StartedAt != nil { // numbers go on after those of earlier shells
		if last, err = m.state.LastProcess(ctx, b.id); err != nil {
			return nil, err
		}
	}
	o := &outfit{config: guest.Config{
		Hostname: sb.Spec.Hostname, Env: environment(image.Config.Env, sb.Spec.Env),
		WorkDir: first(sb.Spec.WorkDir, image.Config.WorkDir), User: first(sb.Spec.User, image.Config.User),
		Capabilities: sb.Spec.Capabilities, OpenFiles: sb.Spec.Limits.OpenFiles,
		Hosts: identity.Hosts, ResolvConf: identity.ResolvConf, Furnished: has.files, LastProcess: last,
	}}
	o.root, err = m.roots.Mount(ctx, rootfs.MountSpec{
		ID: b.id, Slot: sb.Slot, Image: image, UserNS: b.present().UserNS, UIDBase: m.uidBase(sb.Slot),
	})
	if err != nil {
		return nil, err
	}
	o.config.Root = &guest.RootMount{Root: o.root.Mount}
	for _, e := range o.root.Extra {
		o.config.Root.Extra = append(o.config.Root.Extra, guest.ExtraMount{File: e.File, Path: e.Path})
	}
	if has.prepared {
		return o, nil
	}
	o.config.Seccomp = m.cfg.Seccomp
	if o.config.Work, err = m.cgroup.WorkDir(b.id); err != nil {
		o.Close()
		return nil, err
	}
	return o, nil
}

// complete fills the defaults in and checks the spec against the host.
func (m *Manager) complete(ctx context.Context, asked sandbox.Spec) (sandbox.Spec, sandbox.Image, error) {
	if err := asked.Validate(); err != nil {
		return asked, sandbox.Image{}, err
	}
	s := asked.Clone()
	s.Image = first(s.Image, m.cfg.DefaultImage)
	image, err := m.Image(ctx, s.Image)
	if err != nil {
		return s, image, err
	}
	if s.ImageDigest != "" && s.ImageDigest != image.Digest {
		return s, image, sandbox.Errorf(sandbox.ErrConflict, "image_digest_mismatch", "image %q now is %s, not %.80s: import the one you mean, or leave image_digest out", s.Image, image.Digest, s.ImageDigest)
	}
	s.ImageDigest = image.Digest
	if s.Capabilities == "" {
		s.Capabilities = sandbox.CapabilitiesRoot
	}
	if s.Network.Mode == "" {
		s.Network.Mode = sandbox.NetworkOff
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
	return netns.Attachment{ID: sb.ID, Slot: sb.Slot, NetNS: shell.NetNS, Policy: m.policy(sb.Spec.Network)}
}

// policy names the resolvers a sandbox may ask.
func (m *Manager) policy(p sandbox.NetworkPolicy) sandbox.NetworkPolicy {
	if p.Mode == sandbox.NetworkOpen && len(p.DNS) == 0 {
		p.DNS = m.cfg.Resolvers
	}
	return p
}

func (m *Manager) uidBase(slot int) uint32 { return m.cfg.UIDBase + uint32(slot)*idSpan }

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

func (m *Manager) resolvConf(p sandbox.NetworkPolicy) string {
	if p.Mode != sandbox.NetworkOpen {
		return "# no network\n"
	}
	var b strings.Builder
	for _, a := range m.policy(p).DNS {
		fmt.Fprintf(&b, "nameserver %s\n", a)
	}
	return b.String()
}

// specHash tells whether a repeated request asks for the same.
func specHash(s sandbox.Spec) (string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("encode spec: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// explain is an error as the record of an ended sandbox tells it.
func explain(err error) string { return clip(err.Error(), 500) }
