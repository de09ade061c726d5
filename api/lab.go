package api

import "github.com/sandboxd/sandboxd/project"

// PathProduction is what the routes of the production world begin with.
const PathProduction = "/worlds/production"

// ProjectList is a list of projects.
type ProjectList struct {
	Items []project.Project `json:"items"`
}

// AgentList is a list of agents.
type AgentList struct {
	Items []project.Agent `json:"items"`
}

// ExperimentList is a list of experiments.
type ExperimentList struct {
	Items []project.Experiment `json:"items"`
}

// EvaluationList is a list of evaluations.
type EvaluationList struct {
	Items []project.Evaluation `json:"items"`
}

// PromotionList is a list of promotions.
type PromotionList struct {
	Items []project.Promotion `json:"items"`
}

// TemplateList is a list of templates of experiments.
type TemplateList struct {
	Items []project.Template `json:"items"`
}

// DeployRequest asks for an agent.
type DeployRequest struct {
	Type string            `json:"type" minLength:"1" maxLength:"24"`
	Spec project.AgentSpec `json:"spec"`
}

// KillRequest ends a project.
type KillRequest struct {
	DeleteWorkspace bool `json:"delete_workspace,omitempty"`
}
