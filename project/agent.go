package project

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// AgentStatus is where an agent stands.
type AgentStatus string

// The statuses of an agent.
//
//	pending → active ⇄ paused      pending: to be started, or started again after a while
//	   ↑  ↖──────┘ │      │
//	   ├── failed ←┤      │        failed: gave up; somebody must look
//	   └── stopped ←──────┘        stopped: on request, or with its project
const (
	AgentPending AgentStatus = "pending"
	AgentActive  AgentStatus = "active"
	AgentPaused  AgentStatus = "paused"
	AgentFailed  AgentStatus = "failed"
	AgentStopped AgentStatus = "stopped"
)

var agentMoves = map[AgentStatus][]AgentStatus{
	AgentPending: {AgentActive, AgentFailed, AgentStopped},
	AgentActive:  {AgentPending, AgentPaused, AgentFailed, AgentStopped},
	AgentPaused:  {AgentActive, AgentPending, AgentFailed, AgentStopped},
	AgentFailed:  {AgentPending, AgentStopped},
	AgentStopped: {AgentPending, AgentPaused},
}

// AgentStatuses lists the statuses of an agent.
func AgentStatuses() []AgentStatus {
	return []AgentStatus{AgentPending, AgentActive, AgentPaused, AgentFailed, AgentStopped}
}

// Valid reports whether s is a status.
func (s AgentStatus) Valid() bool { _, ok := agentMoves[s]; return ok }

// CanMove reports whether an agent may go from s to t. stopped → paused is
// the way back of a promotion that was rolled back.
func (s AgentStatus) CanMove(t AgentStatus) bool { return slices.Contains(agentMoves[s], t) }

// Runs reports whether an agent is to have a sandbox.
func (s AgentStatus) Runs() bool {
	return s == AgentPending || s == AgentActive || s == AgentPaused
}

// Agent is a long-running workload in a sandbox of its own.
type Agent struct {
	ID        AgentID     `json:"id"`
	Project   ID          `json:"project,omitempty" doc:"Empty in production."`
	Type      string      `json:"type"`
	Owner     string      `json:"owner,omitempty"`
	Status    AgentStatus `json:"status" enum:"pending,active,paused,failed,stopped"`
	Detail    string      `json:"detail,omitempty" doc:"Why, in words."`
	CreatedAt time.Time   `json:"created_at"`
	StartedAt time.Time   `json:"started_at,omitzero" doc:"Its process, the last time."`
	Spec      AgentSpec   `json:"spec"`

	Sandbox   sandbox.ID        `json:"sandbox,omitempty" doc:"The one it runs in."`
	Process   sandbox.ProcessID `json:"process,omitempty"`
	Account   sandbox.ID        `json:"account,omitempty" doc:"Its first sandbox: money entered for the agent is booked there, however often it gets another."`
	Budget    string            `json:"budget,omitempty" doc:"The id of the budget it began with."`
	Volume    string            `json:"volume,omitempty" doc:"Mounted at /workspace."`
	Restarts  int               `json:"restarts" doc:"Since it was last started on request."`
	Failures  int               `json:"failures" doc:"Restarts in a row, for the backoff."`
	Next      time.Time         `json:"next_start,omitzero" doc:"Of a pending one: not before."`
	Unhealthy int               `json:"unhealthy,omitempty" doc:"Health checks failed in a row."`
	HealthyAt time.Time         `json:"healthy_at,omitzero" doc:"Of the last check that passed."`

	// Held is the promotion that keeps a lab agent from being started.
	Held       PromotionID `json:"held,omitempty"`
	PromotedTo AgentID     `json:"promoted_to,omitempty" doc:"Its id in production."`
}

// AgentSpec is what runs and how: the file of 'project deploy --config'.
type AgentSpec struct {
	Image   string                `json:"image,omitempty" maxLength:"512" doc:"Empty: the daemon's default."`
	Command []string              `json:"command" minItems:"1" maxItems:"4096" doc:"Program and arguments."`
	Env     map[string]string     `json:"env,omitempty"`
	WorkDir string                `json:"workdir,omitempty" maxLength:"4096" doc:"Empty: /workspace."`
	User    string                `json:"user,omitempty" maxLength:"64"`
	Limits  sandbox.Limits        `json:"limits,omitempty"`
	Network sandbox.NetworkPolicy `json:"network,omitempty"`
	Entries bool                  `json:"cost_entries,omitempty" doc:"Its programs may enter what they cost and earn: see sbx."`
	Restart RestartPolicy         `json:"restart,omitempty"`
	Health  *HealthCheck          `json:"health,omitempty"`
	Config  map[string]any        `json:"config,omitempty" doc:"Any object; the agent finds it in the file that AGENT_CONFIG names."`
}

// RestartPolicy says when an agent is started again.
type RestartPolicy struct {
	When       string `json:"when,omitempty" enum:"always,on-failure,never" doc:"always unless said otherwise."`
	Max        int    `json:"max,omitempty" minimum:"0" maximum:"1000000" doc:"Restarts in a row before it counts as failed; 0: 10."`
	BackoffMS  int64  `json:"backoff_ms,omitempty" minimum:"0" maximum:"3600000" doc:"Before the first restart, doubled with each in a row up to five minutes; 0: 1000."`
	HealthyFor int64  `json:"healthy_seconds,omitempty" minimum:"0" maximum:"86400" doc:"One that ran that long begins to count anew; 0: 60."`
}

// HealthCheck is a command run in the agent's sandbox now and then.
type HealthCheck struct {
	Command  []string `json:"command" minItems:"1" maxItems:"4096" doc:"Healthy where it exits with 0."`
	Interval int64    `json:"interval_ms,omitempty" minimum:"0" maximum:"3600000" doc:"0: 10000."`
	Timeout  int64    `json:"timeout_ms,omitempty" minimum:"0" maximum:"600000" doc:"0: 5000."`
	Retries  int      `json:"retries,omitempty" minimum:"0" maximum:"100" doc:"Failures in a row before it is restarted; 0: 3."`
	Grace    int64    `json:"grace_ms,omitempty" minimum:"0" maximum:"3600000" doc:"Failures within that time of a start do not count."`
}

// The values of RestartPolicy.When.
const (
	RestartAlways    = "always"
	RestartOnFailure = "on-failure"
	RestartNever     = "never"
)

// Where an agent finds things inside.
const (
	ConfigPath = "/run/agent/config.json"
	Workspace  = "/workspace"
)

// The keys the lab adds to an agent's config; a promotion takes them out.
const (
	KeySandboxMode = "sandbox_mode"
	KeyDepartment  = "department"
	KeyProject     = "project"
	KeyAgent       = "agent"
	KeyType        = "type"
)

// Department is that of every lab agent.
const Department = "sandbox"

// reservedKeys may not be in a config somebody gives.
var reservedKeys = []string{KeySandboxMode, KeyDepartment, KeyProject, KeyAgent, KeyType}

// reservedEnv is what the lab sets itself.
var reservedEnv = []string{"AGENT_CONFIG", "AGENT_ID", "AGENT_TYPE", "AGENT_DEPARTMENT", "PROJECT_ID", "SANDBOX_MODE"}

const maxConfig = 64 << 10

// Validate checks an agent's spec. Class ErrInvalid.
func (s AgentSpec) Validate() error {
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_agent", format, args...)
	}
	if err := s.process().Validate(); err != nil {
		return err
	}
	box := sandbox.Spec{Image: s.Image, Env: s.Env, WorkDir: s.WorkDir, User: s.User, Limits: s.Limits, Network: s.Network}
	if err := box.Validate(); err != nil {
		return err
	}
	for _, k := range reservedEnv {
		if _, ok := s.Env[k]; ok {
			return bad("env %s is set by the lab: leave it out", k)
		}
	}
	for _, k := range reservedKeys {
		if _, ok := s.Config[k]; ok {
			return bad("config key %s is set by the lab: leave it out", k)
		}
	}
	if b, err := json.Marshal(s.Config); err != nil || len(b) > maxConfig {
		return bad("config: an object of at most %d bytes as JSON", maxConfig)
	}
	switch s.Restart.When {
	case "", RestartAlways, RestartOnFailure, RestartNever:
	default:
		return bad("restart.when %.40q: use always, on-failure or never", s.Restart.When)
	}
	if r := s.Restart; r.Max < 0 || r.BackoffMS < 0 || r.BackoffMS > 3600_000 || r.HealthyFor < 0 {
		return bad("restart: numbers must not be negative, backoff_ms at most 3600000")
	}
	if h := s.Health; h != nil {
		if h.Interval < 0 || h.Timeout < 0 || h.Retries < 0 || h.Grace < 0 {
			return bad("health: numbers must not be negative")
		}
		if err := (sandbox.ProcessSpec{Argv: h.Command}).Validate(); err != nil {
			return bad("health: %w", err)
		}
	}
	return nil
}

// process is the command without its environment.
func (s AgentSpec) process() sandbox.ProcessSpec {
	return sandbox.ProcessSpec{Argv: s.Command, Env: s.Env, WorkDir: s.WorkDir, User: s.User}
}

// Sandboxed is the spec of a lab agent: with what the lab adds to the config.
func (s AgentSpec) Sandboxed(p ID) AgentSpec {
	s.Config = maps.Clone(s.Config)
	if s.Config == nil {
		s.Config = map[string]any{}
	}
	s.Config[KeySandboxMode], s.Config[KeyDepartment], s.Config[KeyProject] = true, Department, string(p)
	return s
}

// Cleaned is the spec of the same agent in production: without that.
func (s AgentSpec) Cleaned() AgentSpec {
	s.Config = maps.Clone(s.Config)
	for _, k := range reservedKeys {
		delete(s.Config, k)
	}
	if len(s.Config) == 0 {
		s.Config = nil
	}
	return s
}

// File is the config as the agent reads it.
func (a Agent) File() ([]byte, error) {
	m := maps.Clone(a.Spec.Config)
	if m == nil {
		m = map[string]any{}
	}
	m[KeyAgent], m[KeyType] = string(a.ID), a.Type
	return json.MarshalIndent(m, "", "  ")
}

// Environment is what the lab tells an agent by its environment.
func (a Agent) Environment() map[string]string {
	env := map[string]string{"AGENT_CONFIG": ConfigPath, "AGENT_ID": string(a.ID), "AGENT_TYPE": a.Type}
	if a.Project != "" {
		env["PROJECT_ID"], env["SANDBOX_MODE"], env["AGENT_DEPARTMENT"] = string(a.Project), "true", Department
	}
	return env
}

// The labels of an agent's sandboxes, by which money is told apart.
const (
	LabelAgent      = cost.AgentLabel
	LabelProject    = "project" // of a workspace
	LabelDepartment = "department"
)

// SandboxSpec is what an agent's sandbox is made of.
func (a Agent) SandboxSpec() sandbox.Spec {
	s := sandbox.Spec{
		Name: string(a.ID), Image: a.Spec.Image, Env: a.Environment(), User: a.Spec.User, Limits: a.Spec.Limits, Network: a.Spec.Network,
		CostEntries: a.Spec.Entries, Labels: map[string]string{LabelAgent: string(a.ID)},
	}
	maps.Copy(s.Env, a.Spec.Env)
	if a.Project != "" {
		s.Project, s.Labels[LabelDepartment] = string(a.Project), Department
	}
	if a.Volume != "" {
		s.Volumes = []sandbox.VolumeMount{{Volume: a.Volume, Path: Workspace}}
	}
	return s
}

// AgentTag marks the process that is the agent.
const AgentTag = "agent"

// ProcessSpec is the agent's command.
func (a Agent) ProcessSpec() sandbox.ProcessSpec {
	p := sandbox.ProcessSpec{Argv: a.Spec.Command, WorkDir: a.Spec.WorkDir, User: a.Spec.User, Tag: AgentTag}
	if p.WorkDir == "" && a.Volume != "" {
		p.WorkDir = Workspace
	}
	return p
}

// After returns the agent as it is after its process ended, or failed to
// start: pending until its backoff is over, or failed. ok tells an end
// without an error.
func (a Agent) After(now time.Time, ok bool, detail string) Agent {
	r := a.Spec.Restart
	a.Detail, a.Process, a.Unhealthy = clip(detail, 300), "", 0
	if r.When == RestartNever || r.When == RestartOnFailure && ok {
		a.Status = AgentFailed
		if ok {
			a.Status = AgentStopped
		}
		return a
	}
	if !a.StartedAt.IsZero() && now.Sub(a.StartedAt) >= time.Duration(or(r.HealthyFor, 60))*time.Second {
		a.Failures = 0
	}
	if a.Failures >= int(or(int64(r.Max), 10)) {
		a.Status = AgentFailed
		return a
	}
	a.Status, a.Next = AgentPending, now.Add(r.backoff(a.Failures))
	a.Failures++
	a.Restarts++
	return a
}

const maxBackoff = 5 * time.Minute

// backoff is the wait before the next restart after n in a row.
func (r RestartPolicy) backoff(n int) time.Duration {
	first := time.Duration(or(r.BackoffMS, 1000)) * time.Millisecond
	if n > 20 {
		n = 20
	}
	return min(first<<n, max(first, maxBackoff))
}

// Every is the time between two checks.
func (h HealthCheck) Every() time.Duration {
	return time.Duration(or(h.Interval, 10_000)) * time.Millisecond
}

// Within is the time a check may take.
func (h HealthCheck) Within() time.Duration {
	return time.Duration(or(h.Timeout, 5_000)) * time.Millisecond
}

// Limit is how many failures in a row make an agent unhealthy.
func (h HealthCheck) Limit() int { return int(or(int64(h.Retries), 3)) }

// GraceTime is how long after a start failures do not count.
func (h HealthCheck) GraceTime() time.Duration { return time.Duration(h.Grace) * time.Millisecond }

func or(n, otherwise int64) int64 {
	if n == 0 {
		return otherwise
	}
	return n
}

func clip(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}
