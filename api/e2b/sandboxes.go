package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// defaultTimeout is a sandbox's lifetime where nobody says one, in seconds.
const defaultTimeout = 300

// maxTimeout is the longest there is, in seconds.
const maxTimeout = 365 * 24 * 3600

// clientID stands where E2B names a machine of its own. Old SDKs ask for one.
const clientID = "sandboxd"

type newSandbox struct {
	TemplateID      string            `json:"templateID"`
	Timeout         *int64            `json:"timeout"`
	Metadata        map[string]string `json:"metadata"`
	EnvVars         map[string]string `json:"envVars"`
	Internet        *bool             `json:"allow_internet_access"`
	Network         *networkConfig    `json:"network"`
	AutoPause       *bool             `json:"autoPause"`
	AutoPauseMemory *bool             `json:"autoPauseMemory"`
	AutoResume      *struct {
		Enabled bool `json:"enabled"`
	} `json:"autoResume"`
	MCP          json.RawMessage `json:"mcp"`
	IAM          json.RawMessage `json:"iam"`
	VolumeMounts []volumeMount   `json:"volumeMounts"`
}

type volumeMount struct {
	Name string `json:"name"`
	Path string `json:"path"`
}

// entry is what a client needs to work with a sandbox.
type entry struct {
	TemplateID         string  `json:"templateID"`
	SandboxID          string  `json:"sandboxID"`
	Alias              string  `json:"alias,omitempty"`
	ClientID           string  `json:"clientID"`
	EnvdVersion        string  `json:"envdVersion"`
	EnvdAccessToken    string  `json:"envdAccessToken"`
	TrafficAccessToken *string `json:"trafficAccessToken"`
	Domain             *string `json:"domain"`
}

func bad(code, format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrInvalid, code, format, args...)
}

// create makes a sandbox of a template.
func (s *Server) create(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	var req newSandbox
	if err := read(w, r, &req); err != nil {
		return 0, nil, err
	}
	t, err := s.template(r.Context(), req.TemplateID, actor)
	if err != nil {
		return 0, nil, err
	}
	spec, err := req.spec(t)
	if err != nil {
		return 0, nil, err
	}
	box, err := s.m.Create(r.Context(), sandbox.CreateRequest{Spec: spec, Actor: actor})
	if sandbox.CodeOf(err) == "network_mode_forbidden" && req.Internet == nil && req.Network == nil {
		// The caller asked for no network: it has what the operator gives.
		spec.Network = sandbox.NetworkPolicy{}
		box, err = s.m.Create(r.Context(), sandbox.CreateRequest{Spec: spec, Actor: actor})
	}
	if err != nil {
		return 0, nil, err
	}
	return http.StatusCreated, s.accessTo(r.Context(), box), nil
}

// spec is what a request asks for. What cannot be kept is refused.
func (req newSandbox) spec(t template) (spec sandbox.Spec, err error) {
	for name, v := range map[string]json.RawMessage{"mcp": req.MCP, "iam": req.IAM} {
		if given(v) {
			return spec, sandbox.Errorf(sandbox.ErrUnsupported, "not_offered", "%s is not offered by this daemon: leave it out", name)
		}
	}
	n := note{Internet: req.Internet, AutoResume: req.AutoResume != nil && req.AutoResume.Enabled}
	spec = sandbox.Spec{Image: t.image, Snapshot: t.snapshot, Limits: t.limits, Env: req.EnvVars}
	if spec.TTLSeconds, err = lifetime(req.Timeout); err != nil {
		return spec, err
	}
	memory := req.AutoPauseMemory == nil || *req.AutoPauseMemory
	switch pause := req.AutoPause != nil && *req.AutoPause; {
	case !pause && n.AutoResume:
		return spec, bad("invalid_lifecycle", "autoResume: needs autoPause, or there is nothing to resume")
	case !memory && n.AutoResume:
		return spec, bad("invalid_lifecycle", "autoResume: a sandbox paused without its memory is resumed by connect alone")
	case pause && memory:
		spec.OnDeadline = sandbox.DeadlinePause
	case pause:
		spec.OnDeadline = sandbox.DeadlineStop
	}
	var network networkConfig
	if req.Network != nil {
		network = *req.Network
	}
	if spec.Network, err = network.policy(req.Internet, sandbox.NetworkPolicy{}); err != nil {
		return spec, err
	}
	if n.Host, err = network.host(); err != nil {
		return spec, err
	}
	n.Private = network.AllowPublicTraffic != nil && !*network.AllowPublicTraffic
	for _, v := range req.VolumeMounts {
		spec.Volumes = append(spec.Volumes, sandbox.VolumeMount{Volume: v.Name, Path: v.Path})
	}
	if spec.Labels, err = labelsOf(req.Metadata, t.id, n); err != nil {
		return spec, err
	}
	return spec, spec.Validate()
}

// given reports whether a field of JSON says something.
func given(v json.RawMessage) bool {
	text := strings.TrimSpace(string(v))
	return text != "" && text != "null" && text != "{}"
}

// lifetime reads a timeout in seconds.
func lifetime(timeout *int64) (int64, error) {
	if timeout == nil {
		return defaultTimeout, nil
	}
	if *timeout < 0 || *timeout > maxTimeout {
		return 0, bad("invalid_timeout", "timeout %d: use 0 to %d seconds", *timeout, maxTimeout)
	}
	return max(*timeout, 1), nil // 0 means at once
}

// accessTo is the entry of who asks, whose right to act was judged.
func (s *Server) accessTo(ctx context.Context, box sandbox.Sandbox) entry {
	c, _ := access.Of(ctx)
	a := entry{
		TemplateID: templateOf(box), SandboxID: string(box.ID), Alias: aliasOf(box), ClientID: clientID,
		EnvdVersion: envdVersion, EnvdAccessToken: s.tokenOf(box.ID, c.Key), Domain: s.domainOrNil(),
	}
	if noteOf(box.Spec.Labels).Private {
		token := s.trafficTokenOf(box.ID)
		a.TrafficAccessToken = &token
	}
	return a
}

func (s *Server) domainOrNil() *string {
	if s.domain == "" {
		return nil
	}
	return &s.domain
}

// templateOf is what a sandbox was made of, as its maker named it.
func templateOf(box sandbox.Sandbox) string {
	switch t := box.Spec.Labels[templateLabel]; {
	case t != "":
		return t
	case box.Spec.Snapshot != "":
		return string(box.Spec.Snapshot)
	}
	return box.Spec.Image
}

// aliasOf is that name where it is not an id.
func aliasOf(box sandbox.Sandbox) string {
	t := templateOf(box)
	if _, err := sandbox.ParseSnapshotID(t); err == nil {
		return ""
	}
	return t
}

// shown is a sandbox in lists.
type shown struct {
	TemplateID   string            `json:"templateID"`
	SandboxID    string            `json:"sandboxID"`
	Alias        string            `json:"alias,omitempty"`
	ClientID     string            `json:"clientID"`
	StartedAt    time.Time         `json:"startedAt"`
	EndAt        time.Time         `json:"endAt"`
	State        string            `json:"state"`
	CPUCount     int64             `json:"cpuCount"`
	MemoryMB     int64             `json:"memoryMB"`
	DiskSizeMB   int64             `json:"diskSizeMB"`
	EnvdVersion  string            `json:"envdVersion"`
	Metadata     map[string]string `json:"metadata"`
	VolumeMounts []volumeMount     `json:"volumeMounts"`
}

// The two states of the dialect.
const (
	stateRunning = "running"
	statePaused  = "paused"
)

// stateOf maps a status; empty for one that the dialect does not know.
func stateOf(st sandbox.Status) string {
	switch st {
	case sandbox.StatusRunning:
		return stateRunning
	case sandbox.StatusPaused, sandbox.StatusStopped:
		return statePaused
	}
	return ""
}

func show(box sandbox.Sandbox) shown {
	l := box.Spec.Limits
	v := shown{
		TemplateID: templateOf(box), SandboxID: string(box.ID), Alias: aliasOf(box), ClientID: clientID,
		StartedAt: box.CreatedAt, State: stateOf(box.Status), EnvdVersion: envdVersion, Metadata: metadataOf(box.Spec.Labels),
		CPUCount: int64(math.Ceil(l.CPUs)), MemoryMB: l.MemoryBytes >> 20, DiskSizeMB: l.DiskBytes >> 20, VolumeMounts: []volumeMount{},
	}
	if box.StartedAt != nil {
		v.StartedAt = *box.StartedAt
	}
	switch {
	case box.Deadline != nil:
		v.EndAt = *box.Deadline
	case box.Spec.TTLSeconds > 0: // it rests: what it will have
		v.EndAt = time.Now().UTC().Add(time.Duration(box.Spec.TTLSeconds) * time.Second).Truncate(time.Second)
	default:
		v.EndAt = v.StartedAt.Add(maxTimeout * time.Second) // it has no end; clients want one
	}
	for _, m := range box.Spec.Volumes {
		if m.Volume != "" {
			v.VolumeMounts = append(v.VolumeMounts, volumeMount{m.Volume, m.Path})
		}
	}
	return v
}

type lifecycle struct {
	OnTimeout  string `json:"onTimeout"`
	AutoResume bool   `json:"autoResume"`
}

type details struct {
	shown
	EnvdAccessToken string         `json:"envdAccessToken,omitempty"` // for callers who may act
	Domain          *string        `json:"domain"`
	Internet        *bool          `json:"allowInternetAccess"`
	Network         *networkConfig `json:"network,omitempty"`
	Lifecycle       lifecycle      `json:"lifecycle"`
}

// detail tells of one sandbox.
func (s *Server) detail(_ http.ResponseWriter, r *http.Request, _ string) (int, any, error) {
	box, err := s.boxOf(r)
	if err != nil {
		return 0, nil, err
	}
	n := noteOf(box.Spec.Labels)
	d := details{
		shown: show(box), Domain: s.domainOrNil(),
		Internet: internetOf(n, box.Spec.Network), Network: networkOf(n, box.Spec.Network),
		Lifecycle: lifecycle{OnTimeout: "kill", AutoResume: n.AutoResume},
	}
	if c, ok := access.Of(r.Context()); ok && c.MayChange() { // who only looks gets nothing to act with
		d.EnvdAccessToken = s.tokenOf(box.ID, c.Key)
	}
	if box.Spec.OnDeadline.Rests() {
		d.Lifecycle.OnTimeout = "pause"
	}
	return http.StatusOK, d, nil
}

// boxOf is the living sandbox a path names. Others, and those of others, are
// missing.
func (s *Server) boxOf(r *http.Request) (sandbox.Sandbox, error) {
	return s.boxBy(r.Context(), r.PathValue("id"))
}

func (s *Server) boxBy(ctx context.Context, id string) (sandbox.Sandbox, error) {
	missing := sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "sandbox %.40q not found", id)
	whole, err := sandbox.ParseID(id)
	if err != nil {
		return sandbox.Sandbox{}, missing
	}
	box, err := s.m.Sandbox(ctx, string(whole))
	switch {
	case errors.Is(err, sandbox.ErrNotFound), err == nil && stateOf(box.Status) == "":
		return sandbox.Sandbox{}, missing
	}
	return box, err
}

// gone makes the error of work on a sandbox that ended meanwhile a 404.
func gone(err error) error {
	if sandbox.CodeOf(err) == "sandbox_ended" {
		return sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "%w", err)
	}
	return err
}

// kill ends a sandbox.
func (s *Server) kill(_ http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	box, err := s.boxOf(r)
	if err == nil {
		_, err = s.m.Remove(r.Context(), string(box.ID), actor)
	}
	return http.StatusNoContent, nil, gone(err)
}

type wakeRequest struct {
	Timeout *int64 `json:"timeout"`
	Memory  *bool  `json:"memory"`
}

// connectTries is how often connect wakes a sandbox that does not stay awake.
const connectTries = 3

// connect gives a sandbox at least some more time, and wakes one that rests.
func (s *Server) connect(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	var req wakeRequest
	if err := read(w, r, &req); err != nil {
		return 0, nil, err
	}
	ttl, err := lifetime(req.Timeout)
	if err != nil {
		return 0, nil, err
	}
	box, err := s.boxOf(r)
	if err != nil {
		return 0, nil, err
	}
	status := http.StatusOK
	for range connectTries {
		if box.Status != sandbox.StatusRunning {
			status = http.StatusCreated
			box, err = s.wake(r.Context(), box, actor, req.Memory == nil || *req.Memory)
			if err != nil {
				return 0, nil, gone(err)
			}
		}
		// One that was resumed has its old lifetime, which this may shorten.
		box, err = s.m.SetDeadline(r.Context(), string(box.ID), sandbox.DeadlineRequest{TTLSeconds: &ttl, AtLeast: status == http.StatusOK, Actor: actor})
		if err != nil {
			return 0, nil, gone(err)
		}
		if box.Status == sandbox.StatusRunning { // the old deadline did not come first
			return status, s.accessTo(r.Context(), box), nil
		}
	}
	return 0, nil, sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "sandbox %s is paused or stopped as soon as it runs: connect to it again", box.ID)
}

// changeToken makes every token of a sandbox's data plane and ports given out
// before open nothing any more, and answers with a new one.
func (s *Server) changeToken(_ http.ResponseWriter, r *http.Request, _ string) (int, any, error) {
	box, err := s.boxOf(r)
	if err != nil {
		return 0, nil, err
	}
	if c, ok := access.Of(r.Context()); !ok || !c.MayChange() {
		return 0, nil, sandbox.Errorf(sandbox.ErrForbidden, "role_forbidden", "the role %s only looks: this takes the role %s", c.Role, access.RoleDeveloper)
	}
	if err := s.rotated.change(box.ID); err != nil {
		return 0, nil, err
	}
	s.holds.cut(box.ID)
	return http.StatusCreated, s.accessTo(r.Context(), box), nil
}

// resume is connect as old clients call it.
func (s *Server) resume(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	box, err := s.boxOf(r)
	if err == nil && box.Status == sandbox.StatusRunning {
		err = sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "sandbox %s is running already", box.ID)
	}
	if err != nil {
		return 0, nil, err
	}
	return s.connect(w, r, actor)
}

// wake lets a sandbox that rests go on, with its memory if it has it and that
// is wanted. Two that do so at once both succeed.
func (s *Server) wake(ctx context.Context, box sandbox.Sandbox, actor string, memory bool) (_ sandbox.Sandbox, err error) {
	id := string(box.ID)
	switch {
	case box.Status == sandbox.StatusPaused && memory:
		box, err = s.m.Resume(ctx, id, actor)
	case box.Status == sandbox.StatusPaused:
		if box, err = s.m.Stop(ctx, id, actor); err != nil {
			break
		}
		fallthrough
	default:
		box, err = s.m.Start(ctx, id, actor)
	}
	if sandbox.CodeOf(err) == "wrong_state" {
		if now, again := s.m.Sandbox(ctx, id); again == nil && now.Status == sandbox.StatusRunning {
			return now, nil
		}
	}
	return box, err
}

// timeout says when a running sandbox's time is up, sooner or later than it was.
func (s *Server) timeout(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	return s.setTimeout(w, r, actor, false)
}

// refresh gives it more time.
func (s *Server) refresh(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	return s.setTimeout(w, r, actor, true)
}

func (s *Server) setTimeout(w http.ResponseWriter, r *http.Request, actor string, extend bool) (int, any, error) {
	var req struct {
		Timeout  *int64 `json:"timeout"`
		Duration *int64 `json:"duration"`
	}
	if err := read(w, r, &req); err != nil {
		return 0, nil, err
	}
	asked := req.Timeout
	if extend {
		asked = req.Duration
	} else if asked == nil {
		return 0, nil, bad("invalid_timeout", "no timeout given: send {\"timeout\": SECONDS}")
	}
	ttl, err := lifetime(asked)
	if err != nil {
		return 0, nil, err
	}
	box, err := s.boxOf(r)
	if err != nil {
		return 0, nil, err
	}
	if box.Status == sandbox.StatusRunning {
		box, err = s.m.SetDeadline(r.Context(), string(box.ID), sandbox.DeadlineRequest{TTLSeconds: &ttl, AtLeast: extend, Actor: actor})
		if err == nil && box.Status != sandbox.StatusRunning { // it came to rest first, and has no deadline there
			_, err = s.m.SetDeadline(r.Context(), string(box.ID), sandbox.DeadlineRequest{Hold: true, Actor: actor})
		}
	}
	if err == nil && box.Status != sandbox.StatusRunning {
		err = sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "sandbox %s is paused: connect to it first", box.ID)
	}
	return http.StatusNoContent, nil, gone(err)
}

// pause lets a sandbox rest, without a deadline: with its memory, or as a stop.
func (s *Server) pause(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	var req wakeRequest
	if err := read(w, r, &req); err != nil {
		return 0, nil, err
	}
	box, err := s.boxOf(r)
	if err != nil {
		return 0, nil, err
	}
	switch {
	case box.Status != sandbox.StatusRunning:
		err = sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "sandbox %s is paused already", box.ID)
	case req.Memory != nil && !*req.Memory:
		_, err = s.m.Stop(r.Context(), string(box.ID), actor)
	default:
		_, err = s.m.Pause(r.Context(), string(box.ID), actor)
	}
	if err == nil || sandbox.CodeOf(err) == "wrong_state" {
		_, held := s.m.SetDeadline(r.Context(), string(box.ID), sandbox.DeadlineRequest{Hold: true, Actor: actor})
		if err == nil {
			err = held
		}
	}
	return http.StatusNoContent, nil, gone(err)
}
