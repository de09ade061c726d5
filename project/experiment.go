package project

import (
	"encoding/json"
	"maps"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ExperimentStatus is where an experiment stands.
type ExperimentStatus string

// The statuses of an experiment. All but running are final.
const (
	ExperimentRunning   ExperimentStatus = "running"
	ExperimentCompleted ExperimentStatus = "completed"
	ExperimentExpired   ExperimentStatus = "expired"   // its time was over first
	ExperimentCancelled ExperimentStatus = "cancelled" // its project was killed
)

// Experiment is a question put to a project's agents.
type Experiment struct {
	ID         ExperimentID     `json:"id"`
	Project    ID               `json:"project"`
	Status     ExperimentStatus `json:"status" enum:"running,completed,expired,cancelled"`
	Template   string           `json:"template,omitempty"`
	Hypothesis string           `json:"hypothesis"`
	Config     map[string]any   `json:"config,omitempty"`
	Agents     []AgentID        `json:"agents,omitempty" doc:"Those it is about: stopped when its time is over."`
	Actor      string           `json:"actor,omitempty"`
	StartedAt  time.Time        `json:"started_at"`
	Deadline   time.Time        `json:"deadline,omitzero"`
	EndedAt    time.Time        `json:"ended_at,omitzero"`
	Success    *bool            `json:"success,omitempty" doc:"Once it is completed."`
	Results    map[string]any   `json:"results,omitempty"`
}

// ExperimentRequest starts an experiment.
type ExperimentRequest struct {
	Template   string         `json:"template,omitempty" maxLength:"63" doc:"Name of a template; what is given besides replaces what it says."`
	Hypothesis string         `json:"hypothesis,omitempty" maxLength:"2000"`
	Config     map[string]any `json:"config,omitempty"`
	Agents     []AgentID      `json:"agents,omitempty" maxItems:"100"`
	Seconds    int64          `json:"seconds,omitempty" minimum:"0" maximum:"31536000" doc:"Time limit; 0: none."`
	Actor      string         `json:"-"`
}

// Outcome completes an experiment.
type Outcome struct {
	Success bool           `json:"success"`
	Results map[string]any `json:"results,omitempty"`
	Actor   string         `json:"-"`
}

// Template is the beginning of experiments of one kind.
type Template struct {
	Name       string         `json:"name" yaml:"name"`
	Hypothesis string         `json:"hypothesis" yaml:"hypothesis"`
	Config     map[string]any `json:"config,omitempty" yaml:"config"`
	Seconds    int64          `json:"seconds,omitempty" yaml:"seconds"`
}

// Templates returns those that are always there.
func Templates() []Template {
	return []Template{
		{Name: "smoke", Hypothesis: "the agents run for ten minutes without failing", Seconds: 600},
		{Name: "ab", Hypothesis: "variant B earns more than variant A", Config: map[string]any{"variants": []any{"a", "b"}}, Seconds: 24 * 3600},
		{Name: "cost-cut", Hypothesis: "the same revenue costs less", Config: map[string]any{"metric": "cost"}, Seconds: 7 * 24 * 3600},
	}
}

// Fill lays a request over its template. Class ErrInvalid.
func (r ExperimentRequest) Fill(all []Template) (ExperimentRequest, error) {
	if r.Template != "" {
		i := slices.IndexFunc(all, func(t Template) bool { return t.Name == r.Template })
		if i < 0 {
			return r, sandbox.Errorf(sandbox.ErrInvalid, "template_not_found", "no experiment template %.70q: 'sandbox project experiment templates' lists them", r.Template)
		}
		t := all[i]
		if r.Hypothesis == "" {
			r.Hypothesis = t.Hypothesis
		}
		if r.Seconds == 0 {
			r.Seconds = t.Seconds
		}
		config := maps.Clone(t.Config)
		if config == nil {
			config = r.Config
		} else {
			maps.Copy(config, r.Config)
		}
		r.Config = config
	}
	if r.Hypothesis == "" || len(r.Hypothesis) > 2000 || !utf8.ValidString(r.Hypothesis) {
		return r, sandbox.Errorf(sandbox.ErrInvalid, "invalid_experiment", "hypothesis: say in 1 to 2000 bytes what is expected, or name a template")
	}
	if r.Seconds < 0 || r.Seconds > 365*24*3600 {
		return r, sandbox.Errorf(sandbox.ErrInvalid, "invalid_experiment", "time limit of %d s: use 0 to a year", r.Seconds)
	}
	return r, checkObject("config", r.Config)
}

func checkObject(what string, m map[string]any) error {
	if b, err := json.Marshal(m); err != nil || len(b) > maxConfig {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_experiment", "%s: an object of at most %d bytes as JSON", what, maxConfig)
	}
	return nil
}

// Complete returns the experiment with its outcome. Class ErrConflict where
// it has ended already.
func (e Experiment) Complete(now time.Time, o Outcome) (Experiment, error) {
	if e.Status != ExperimentRunning {
		return e, sandbox.Errorf(sandbox.ErrConflict, "experiment_ended", "experiment %s is %s already", e.ID, e.Status)
	}
	if err := checkObject("results", o.Results); err != nil {
		return e, err
	}
	e.Status, e.EndedAt, e.Success, e.Results = ExperimentCompleted, now, &o.Success, o.Results
	return e, nil
}

// Overdue reports whether an experiment's time is over.
func (e Experiment) Overdue(now time.Time) bool {
	return e.Status == ExperimentRunning && !e.Deadline.IsZero() && !now.Before(e.Deadline)
}

// CountExperiments counts a project's experiments.
func CountExperiments(all []Experiment) (n Experiments) {
	for _, e := range all {
		switch e.Status {
		case ExperimentRunning:
			n.Running++
		case ExperimentCompleted:
			n.Completed++
			if e.Success != nil && *e.Success {
				n.Succeeded++
			}
		case ExperimentExpired:
			n.Expired++
		}
	}
	return n
}
