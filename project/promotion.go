package project

import (
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// PromotionStatus is where a promotion stands.
type PromotionStatus string

// The statuses of a promotion.
//
//	moving → watching → finishing → done
//	   └─────────┴────→ rolling_back → rolled_back
//
// The status is written before what it stands for is begun, so that a daemon
// that starts again knows which way to go.
const (
	PromotionMoving      PromotionStatus = "moving"       // agents are being stopped here and started there
	PromotionWatching    PromotionStatus = "watching"     // all run in production; their health decides
	PromotionFinishing   PromotionStatus = "finishing"    // it holds: the lab lets go
	PromotionDone        PromotionStatus = "done"         // final
	PromotionRollingBack PromotionStatus = "rolling_back" // production lets go, the lab starts them again
	PromotionRolledBack  PromotionStatus = "rolled_back"  // final
)

var promotionMoves = map[PromotionStatus][]PromotionStatus{
	PromotionMoving:      {PromotionWatching, PromotionRollingBack},
	PromotionWatching:    {PromotionFinishing, PromotionRollingBack},
	PromotionFinishing:   {PromotionDone},
	PromotionRollingBack: {PromotionRolledBack},
	PromotionDone:        nil,
	PromotionRolledBack:  nil,
}

// PromotionStatuses lists the statuses of a promotion.
func PromotionStatuses() []PromotionStatus {
	return []PromotionStatus{PromotionMoving, PromotionWatching, PromotionFinishing, PromotionDone, PromotionRollingBack, PromotionRolledBack}
}

// CanMove reports whether a promotion may go from s to t.
func (s PromotionStatus) CanMove(t PromotionStatus) bool {
	return slices.Contains(promotionMoves[s], t)
}

// Final reports whether nothing follows s.
func (s PromotionStatus) Final() bool { return s == PromotionDone || s == PromotionRolledBack }

// Promotion is the move of a project's agents to production: the plan, and
// how far it has come.
type Promotion struct {
	ID         PromotionID     `json:"id"`
	Project    ID              `json:"project"`
	Status     PromotionStatus `json:"status" enum:"moving,watching,finishing,done,rolling_back,rolled_back"`
	Detail     string          `json:"detail,omitempty" doc:"Why it was rolled back."`
	Actor      string          `json:"actor,omitempty"`
	Forced     bool            `json:"forced,omitempty"`
	Evaluation EvaluationID    `json:"evaluation"`
	Moves      []Move          `json:"moves"`
	Left       []Left          `json:"left,omitempty" doc:"Agents that do not move, and why."`
	StartedAt  time.Time       `json:"started_at"`
	Window     int64           `json:"window_ms" doc:"How long, in milliseconds, the health of the promoted agents decides."`
	Until      time.Time       `json:"until,omitzero" doc:"Of one that is watching: the end of the window."`
	EndedAt    time.Time       `json:"ended_at,omitzero"`
}

// Move is one agent's.
type Move struct {
	From   AgentID     `json:"from"`
	To     AgentID     `json:"to"`
	Was    AgentStatus `json:"was" doc:"What a rollback restores."`
	Type   string      `json:"type"`
	Image  string      `json:"image,omitempty" doc:"Name of the image it ran on, in the lab."`
	Digest string      `json:"digest,omitempty" doc:"Of that image."`
	Spec   AgentSpec   `json:"spec" doc:"Cleaned; its image is named as in production."`
}

// On names the image a moved agent ran on, and what it is called in
// production: by its content there, so that no later promotion changes what an
// earlier one runs on. The host's own image has the same name everywhere.
func (m Move) On(name, digest string, host bool) Move {
	m.Image, m.Digest, m.Spec.Image = name, digest, name
	if !host {
		_, hex, _ := strings.Cut(digest, ":")
		m.Spec.Image = "promoted-" + hex[:min(len(hex), 16)]
	}
	return m
}

// Left is an agent that does not move.
type Left struct {
	Agent AgentID `json:"agent"`
	Why   string  `json:"why"`
}

// PromotionRequest asks for a promotion.
type PromotionRequest struct {
	Force  bool   `json:"force,omitempty" doc:"Also where the evaluation says NOT_READY."`
	Window int64  `json:"window_ms,omitempty" minimum:"0" maximum:"604800000" doc:"How long the health of promoted agents decides; 0: the daemon's setting."`
	Actor  string `json:"-"`
}

// Plan tells which agents a promotion moves: those active or paused whose ROI
// is not below zero. Class ErrConflict where there are none.
func Plan(agents []Agent, roi map[AgentID]int64) (moves []Move, left []Left, err error) {
	for _, a := range agents {
		switch {
		case a.PromotedTo != "":
			left = append(left, Left{a.ID, "it is in production already"})
		case a.Status != AgentActive && a.Status != AgentPaused:
			left = append(left, Left{a.ID, "it is " + string(a.Status)})
		case roi[a.ID] < 0:
			left = append(left, Left{a.ID, "its ROI is " + Percent(roi[a.ID])})
		default:
			moves = append(moves, Move{From: a.ID, To: a.ID.Promoted(), Was: a.Status, Type: a.Type, Spec: a.Spec.Cleaned()})
		}
	}
	if len(moves) == 0 {
		return nil, left, sandbox.Errorf(sandbox.ErrConflict, "nothing_to_promote", "no agent is active or paused with an ROI of at least 0")
	}
	return moves, left, nil
}

// Agent is the agent a move makes in production.
func (m Move) Agent(p Promotion, owner string) Agent {
	return Agent{
		ID: m.To, Type: m.Type, Owner: owner, Status: AgentPending, CreatedAt: p.StartedAt, Spec: m.Spec, Volume: string(m.To),
		Detail: "promoted",
	}
}
