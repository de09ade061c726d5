package project

import (
	"crypto/rand"
	"encoding/base32"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ID names a project: "prj_" and 12 lowercase base32 characters.
type ID string

// AgentID names an agent: sandbox_PROJECT_TYPE_RANDOM in the lab, TYPE_RANDOM
// in production. It is also the name of the agent's sandbox.
type AgentID string

// ExperimentID names an experiment: "exp_" and 12 characters.
type ExperimentID string

// EvaluationID names an evaluation: "evl_" and 12 characters.
type EvaluationID string

// PromotionID names a promotion: "prm_" and 12 characters.
type PromotionID string

const (
	idRandom    = 12
	agentRandom = 8
	labPrefix   = "sandbox_"
)

var lower = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// random returns n characters from the system's random source.
func random(n int) string {
	b := make([]byte, (n*5+7)/8)
	_, _ = rand.Read(b) // never fails since Go 1.24
	return lower.EncodeToString(b)[:n]
}

// NewID returns a fresh project id.
func NewID() ID { return ID("prj_" + random(idRandom)) }

// NewExperimentID returns a fresh experiment id.
func NewExperimentID() ExperimentID { return ExperimentID("exp_" + random(idRandom)) }

// NewEvaluationID returns a fresh evaluation id.
func NewEvaluationID() EvaluationID { return EvaluationID("evl_" + random(idRandom)) }

// NewPromotionID returns a fresh promotion id.
func NewPromotionID() PromotionID { return PromotionID("prm_" + random(idRandom)) }

// NewAgentID returns a fresh id of a lab agent. The type is a valid one.
func NewAgentID(p ID, kind string) AgentID {
	return AgentID(labPrefix + string(p) + "_" + kind + "_" + random(agentRandom))
}

// ParseID returns s as a project id. Class ErrInvalid.
func ParseID(s string) (ID, error) {
	rest, ok := strings.CutPrefix(s, "prj_")
	if !ok || len(rest) != idRandom || strings.Trim(rest, "abcdefghijklmnopqrstuvwxyz234567") != "" {
		return "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_project_id", "%.40q is not a project id: want prj_ and %d characters of a-z and 2-7", s, idRandom)
	}
	return ID(s), nil
}

// Promoted is the id of the same agent in production: without sandbox and
// project. An id that is no lab agent's stays as it is.
func (a AgentID) Promoted() AgentID {
	rest, ok := strings.CutPrefix(string(a), labPrefix)
	if !ok || len(rest) <= len("prj_")+idRandom+1 {
		return a
	}
	return AgentID(rest[len("prj_")+idRandom+1:])
}

// maxType leaves room for the rest of an agent's id in a sandbox's name.
const maxType = 24

// ValidateType checks an agent's type, a part of its id. Class ErrInvalid.
func ValidateType(s string) error {
	if s == "" || len(s) > maxType || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || strings.HasPrefix(s, "-") || s == "sandbox" {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_agent_type", "agent type %.40q: use 1 to %d of a-z, 0-9 and '-', beginning with a letter or digit, and not 'sandbox'", s, maxType)
	}
	return nil
}
