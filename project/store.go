package project

import (
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Tx is one transaction over the lab's rows in one database: all of it comes
// to be, or nothing. Reads see what the transaction wrote. Nobody else writes
// meanwhile, so what was read may be decided on. Missing rows are of class
// ErrNotFound.
type Tx interface {
	Project(ID) (Project, error)
	// PutProject writes a new project or a changed one. ErrConflict with code
	// project_exists where another one that was not killed has the name.
	PutProject(Project) error
	// DeleteProject forgets a project with all that belongs to it.
	DeleteProject(ID) error
	Agent(AgentID) (Agent, error)
	Agents(ID) ([]Agent, error)
	PutAgent(Agent) error
	// DeleteAgent forgets an agent; one that is not there is no error.
	DeleteAgent(AgentID) error
	Experiment(ExperimentID) (Experiment, error)
	Experiments(ID) ([]Experiment, error)
	PutExperiment(Experiment) error
	PutEvaluation(Evaluation) error
	Promotion(PromotionID) (Promotion, error)
	// PutPromotion is ErrConflict with code promotion_running where another
	// promotion of the project has not ended.
	PutPromotion(Promotion) error
	// Tell appends an event, and leaves the notices to be sent.
	Tell(News) error
}

// News is an event and who is to be notified of it.
type News struct {
	Event   sandbox.Event
	Notices []Notice
}

// Notice is one delivery to one webhook, until it worked or was given up.
type Notice struct {
	ID       int64     `json:"id"`
	Project  ID        `json:"project"`
	URL      string    `json:"url"`
	Secret   string    `json:"secret,omitempty"`
	Type     string    `json:"type"`
	Body     string    `json:"body"`
	At       time.Time `json:"at"`
	Next     time.Time `json:"next"`
	Attempts int       `json:"attempts"`
}

// maxAttempts is how often a notice is tried; with the waits between, over
// some six hours.
const maxAttempts = 10

// Failed returns a notice whose delivery did not work, and whether it is
// given up.
func (n Notice) Failed(now time.Time) (next Notice, givenUp bool) {
	n.Attempts++
	n.Next = now.Add(min(time.Hour, 5*time.Second<<(2*min(n.Attempts-1, 10))))
	return n, n.Attempts >= maxAttempts
}
