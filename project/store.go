package project

import "github.com/sandboxd/sandboxd/sandbox"

// Tx is one transaction over the lab's rows in one database: all of it comes
// to be, or nothing. Reads see what the transaction wrote. Nobody else writes
// meanwhile, so what was read may be decided on. Missing rows are of class
// ErrNotFound.
type Tx interface {
	Project(ID) (Project, error)
	// PutProject writes a new project or a changed one, and its webhooks.
	// ErrConflict with code
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
	// Tell appends an event; webhooks hear of it by that.
	Tell(sandbox.Event) error
}
