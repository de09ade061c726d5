package lab

import (
	"maps"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The events of the lab.
const (
	eventCreated      = "project.created"
	eventChanged      = "project.changed"
	eventKilled       = "project.killed"
	eventEvaluated    = "project.evaluated"
	eventAlert        = "project.alert"
	eventPromoting    = "project.promotion_started"
	eventWatching     = "project.promotion_watching"
	eventPromoted     = "project.promoted"
	eventRollingBack  = "project.rolling_back"
	eventRolledBack   = "project.rolled_back"
	eventStarted      = "experiment.started"
	eventCompleted    = "experiment.completed"
	eventExpired      = "experiment.expired"
	eventDeployed     = "agent.deployed"
	eventAgentActive  = "agent.active"
	eventAgentPending = "agent.restarting"
	eventAgentPaused  = "agent.paused"
	eventAgentFailed  = "agent.failed"
	eventAgentStopped = "agent.stopped"
	eventUnhealthy    = "agent.unhealthy"
)

// newsOf is an event about a project: by its data the project's webhooks know
// it.
func newsOf(p project.Project, kind, actor string, data map[string]string) sandbox.Event {
	all := maps.Clone(data)
	if all == nil {
		all = map[string]string{}
	}
	all[project.EventProject], all["project_name"] = string(p.ID), p.Name
	return sandbox.Event{Time: time.Now().UTC(), Type: kind, Actor: actor, Data: all}
}
