package project

import (
	"slices"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Status is where a project stands.
type Status string

// The statuses of a project.
//
//	active ⇄ promoting → promoted
//	   └──────────────────┴──→ killed
//
// A promotion that is rolled back leads back to active.
const (
	StatusActive    Status = "active"
	StatusPromoting Status = "promoting"
	StatusPromoted  Status = "promoted"
	StatusKilled    Status = "killed"
)

var projectMoves = map[Status][]Status{
	StatusActive:    {StatusPromoting, StatusKilled},
	StatusPromoting: {StatusActive, StatusPromoted},
	StatusPromoted:  {StatusKilled},
	StatusKilled:    nil,
}

// Statuses lists the statuses of a project in the order of its life.
func Statuses() []Status {
	return []Status{StatusActive, StatusPromoting, StatusPromoted, StatusKilled}
}

// Valid reports whether s is a status.
func (s Status) Valid() bool { _, ok := projectMoves[s]; return ok }

// CanMove reports whether a project may go from s to t.
func (s Status) CanMove(t Status) bool { return slices.Contains(projectMoves[s], t) }

// Project groups agents and experiments around one question.
type Project struct {
	ID        ID        `json:"id"`
	Name      string    `json:"name"`
	Owner     string    `json:"owner,omitempty"`
	Status    Status    `json:"status" enum:"active,promoting,promoted,killed"`
	CreatedAt time.Time `json:"created_at"`
	EndedAt   time.Time `json:"ended_at,omitzero" doc:"When it was killed."`
	Workspace string    `json:"workspace,omitempty" doc:"The volume its agents share at /workspace; empty once deleted."`
	Settings
	NextEvaluation time.Time       `json:"next_evaluation,omitzero"`
	Ending         bool            `json:"ending,omitempty" doc:"Killed, and what it had is still being removed."`
	DropWorkspace  bool            `json:"drop_workspace,omitempty" doc:"The workspace goes with that."`
	Fired          map[string]bool `json:"fired,omitempty" doc:"Alerts whose condition holds now."`
}

// Settings are what may be changed of a project.
type Settings struct {
	Goal     string   `json:"goal,omitempty" maxLength:"2000" doc:"What it is to find out, for people."`
	Criteria Criteria `json:"criteria,omitempty" doc:"What an evaluation asks for."`
	Cron     string   `json:"evaluate,omitempty" maxLength:"200" doc:"Cron expression of evaluations; empty: only when asked."`
	Webhooks []Hook   `json:"webhooks,omitempty" maxItems:"8"`
	Alerts   []Rule   `json:"alerts,omitempty" maxItems:"16" doc:"Told once each time the condition comes true."`
}

// Hook is a webhook as settings name it: it is told of a project's events.
type Hook struct {
	URL    string   `json:"url" maxLength:"2000" doc:"http:// or https://; redirects are not followed."`
	Secret string   `json:"secret,omitempty" maxLength:"200" doc:"Key of the signature. It is never shown again."`
	Events []string `json:"events,omitempty" maxItems:"32" doc:"Types of events, as project.promoted or agent.*; empty: all."`
}

// EventProject is the key of an event's data that names its project.
const EventProject = "project"

// Rule is a condition in CEL with a name.
type Rule struct {
	Name string `json:"name" minLength:"1" maxLength:"63"`
	When string `json:"when" minLength:"1" maxLength:"1000" doc:"CEL expression that is true or false; see docs/LAB.md for its variables."`
}

// Request asks for a project.
type Request struct {
	Name string `json:"name" minLength:"1" maxLength:"63"`
	Settings
	WorkspaceBytes int64  `json:"workspace_bytes,omitempty" minimum:"0" doc:"Most bytes of the workspace; 0: the daemon's default for a volume."`
	Actor          string `json:"-"`
}

// Change replaces those settings that are given.
type Change struct {
	Goal     *string   `json:"goal,omitempty" maxLength:"2000"`
	Criteria *Criteria `json:"criteria,omitempty"`
	Cron     *string   `json:"evaluate,omitempty" maxLength:"200"`
	Webhooks *[]Hook   `json:"webhooks,omitempty" maxItems:"8"`
	Alerts   *[]Rule   `json:"alerts,omitempty" maxItems:"16"`
	Actor    string    `json:"-"`
}

// Apply returns the settings with the change.
func (c Change) Apply(s Settings) Settings {
	set(&s.Goal, c.Goal)
	set(&s.Criteria, c.Criteria)
	set(&s.Cron, c.Cron)
	set(&s.Webhooks, c.Webhooks)
	set(&s.Alerts, c.Alerts)
	return s
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// Validate checks what can be judged without compiling an expression. Class
// ErrInvalid.
func (s Settings) Validate() error {
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_project", format, args...)
	}
	if len(s.Goal) > 2000 || !utf8.ValidString(s.Goal) {
		return bad("goal: at most 2000 bytes of UTF-8")
	}
	if len(s.Webhooks) > 8 || len(s.Alerts) > 16 || len(s.Criteria.Custom) > 16 {
		return bad("at most 8 webhooks, 16 alerts and 16 custom criteria")
	}
	for _, w := range s.Webhooks {
		r := sandbox.WebhookRequest{URL: w.URL, Filter: sandbox.WebhookFilter{Events: w.Events}}
		if err := r.Validate(); err != nil {
			return bad("%w", err)
		}
	}
	seen := map[string]bool{}
	for _, r := range slices.Concat(s.Alerts, s.Criteria.Custom) {
		if err := sandbox.ValidateName(r.Name); err != nil {
			return bad("rule: %w", err)
		}
		if builtin(r.Name) {
			return bad("rule %s: that is the name of a built-in criterion", r.Name)
		}
	}
	for _, r := range s.Alerts {
		if seen[r.Name] {
			return bad("two alerts are named %s", r.Name)
		}
		seen[r.Name] = true
	}
	return s.Criteria.validate()
}

// Shown leaves out what is not for callers' eyes.
func (p Project) Shown() Project {
	p.Webhooks = slices.Clone(p.Webhooks)
	for i := range p.Webhooks {
		p.Webhooks[i].Secret = ""
	}
	return p
}

// Money is what somebody spent and earned, in a currency's billionths.
type Money struct {
	Cost    cost.Sum `json:"cost"`
	Revenue cost.Sum `json:"revenue"`
}

// Add returns the sum.
func (m Money) Add(o Money) Money {
	return Money{m.Cost.Add(o.Cost), m.Revenue.Add(o.Revenue)}
}
