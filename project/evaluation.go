package project

import (
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Recommendation is what an evaluation comes to.
type Recommendation string

// The recommendations.
const (
	StronglyRecommend Recommendation = "STRONGLY_RECOMMEND" // all criteria pass and ROI > 300 %
	Recommend         Recommendation = "RECOMMEND"          // all pass, ROI > 0
	Consider          Recommendation = "CONSIDER"           // ROI > 0, some pass
	NotReady          Recommendation = "NOT_READY"
)

// strongROI is 300 % in basis points.
const strongROI = 30_000

// Criteria are what an evaluation asks for besides a positive ROI. Zero
// values mean the defaults.
type Criteria struct {
	MinProfit      cost.Nano `json:"min_profit,omitempty" doc:"Profitable means a profit above that."`
	MinActive      int       `json:"min_active,omitempty" minimum:"0" maximum:"100000" doc:"Active agents there must be; 0: 1."`
	MinAge         int64     `json:"min_age_seconds,omitempty" minimum:"-1" doc:"Sufficient data means the first agent was deployed that long ago; 0: an hour; -1: no matter."`
	MinExperiments int       `json:"min_experiments,omitempty" minimum:"-1" maximum:"100000" doc:"And that so many experiments were completed; 0: 1; -1: no matter."`
	Custom         []Rule    `json:"custom,omitempty" maxItems:"16"`
}

func (c Criteria) validate() error {
	if c.MinActive < 0 || c.MinAge < -1 || c.MinExperiments < -1 {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_criteria", "criteria: numbers must not be negative (but -1 for no matter)")
	}
	seen := map[string]bool{}
	for _, r := range c.Custom {
		if seen[r.Name] {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_criteria", "two criteria are named %s", r.Name)
		}
		seen[r.Name] = true
	}
	return nil
}

// The names of the built-in criteria.
const (
	CriterionROI    = "positive-roi"
	CriterionProfit = "profitable"
	CriterionActive = "active-agents"
	CriterionData   = "sufficient-data"
)

func builtin(name string) bool {
	return slices.Contains([]string{CriterionROI, CriterionProfit, CriterionActive, CriterionData}, name)
}

// Verdict is how one criterion came out.
type Verdict struct {
	Name   string `json:"name"`
	Pass   bool   `json:"pass"`
	Detail string `json:"detail" doc:"What was asked for and what there is."`
}

// Evaluation is a judgement of a project, with all it was judged by.
type Evaluation struct {
	ID             EvaluationID   `json:"id"`
	Project        ID             `json:"project"`
	At             time.Time      `json:"at"`
	Actor          string         `json:"actor,omitempty"`
	Recommendation Recommendation `json:"recommendation" enum:"STRONGLY_RECOMMEND,RECOMMEND,CONSIDER,NOT_READY"`
	Verdicts       []Verdict      `json:"verdicts"`
	Criteria       Criteria       `json:"criteria"`
	Inputs         Inputs         `json:"inputs"`
}

// Judge applies the built-in criteria, and custom ones through holds, and
// draws the conclusion. A custom criterion that cannot be computed does not
// pass, and says why.
func Judge(c Criteria, in Inputs, holds func(expression string, in Inputs) (bool, error)) ([]Verdict, Recommendation) {
	verdicts := []Verdict{
		{CriterionROI, in.Total.Rate() > 0, "ROI " + Percent(in.Total.Rate()) + ", more than 0 % is asked for"},
		{CriterionProfit, in.Total.Profit.Cmp(cost.SumOf(c.MinProfit)) > 0, fmt.Sprintf("profit %s, more than %s is asked for", in.Total.Profit, c.MinProfit)},
	}
	active, want := in.Count(AgentActive), int(or(int64(c.MinActive), 1))
	verdicts = append(verdicts, Verdict{CriterionActive, active >= want, fmt.Sprintf("%d active, %d asked for", active, want)}, sufficient(c, in))
	for _, r := range c.Custom {
		v := Verdict{Name: r.Name, Detail: r.When}
		var err error
		if v.Pass, err = holds(r.When, in); err != nil {
			v.Pass, v.Detail = false, clip(r.When+": "+err.Error(), 500)
		}
		verdicts = append(verdicts, v)
	}
	return verdicts, Conclude(verdicts, in.Total.Rate())
}

func sufficient(c Criteria, in Inputs) Verdict {
	age, experiments := max(or(c.MinAge, 3600), 0), max(int(or(int64(c.MinExperiments), 1)), 0)
	return Verdict{
		CriterionData, in.Age >= age && in.Experiments.Completed >= experiments && len(in.Agents) > 0,
		fmt.Sprintf("%d s of data and %d completed experiments, %d s and %d asked for", in.Age, in.Experiments.Completed, age, experiments),
	}
}

// Conclude draws the conclusion from how the criteria came out.
func Conclude(verdicts []Verdict, roi int64) Recommendation {
	passed := 0
	for _, v := range verdicts {
		if v.Pass {
			passed++
		}
	}
	all := passed == len(verdicts) && passed > 0
	switch {
	case all && roi > strongROI:
		return StronglyRecommend
	case all && roi > 0:
		return Recommend
	case passed > 0 && roi > 0:
		return Consider
	}
	return NotReady
}

// Percent writes basis points for people.
func Percent(bp int64) string {
	switch bp {
	case MaxROI:
		return "∞"
	case MinROI:
		return "-∞"
	}
	sign := ""
	abs := uint64(bp)
	if bp < 0 {
		abs, sign = -abs, "-"
	}
	return fmt.Sprintf("%s%d.%02d %%", sign, abs/100, abs%100)
}
