package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) projectExperimentCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "experiment", Short: "Start, complete and list experiments",
		Long: `An experiment is a hypothesis with a time limit. When the time is over before it was
completed it expires, and the agents it is about are stopped.`,
	}
	cmd.AddCommand(c.experimentStartCmd(), c.experimentCompleteCmd(), c.experimentLsCmd(), c.experimentTemplatesCmd())
	return cmd
}

func (c *cli) experimentStartCmd() *cobra.Command {
	var req project.ExperimentRequest
	var limit time.Duration
	var agents, config []string
	cmd := &cobra.Command{
		Use: "start [flags] PROJECT [HYPOTHESIS]", Short: "Begin an experiment", Args: cobra.RangeArgs(1, 2), ValidArgsFunction: c.completeProject,
		Example: `  sandbox project experiment start shop 'cheaper shipping sells more' --time-limit 24h --agent sandbox_prj_…
  sandbox project experiment start shop --template ab --set variants='["a","c"]'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if req.Config, err = parseObject("--set", config); err != nil {
				return err
			}
			for _, a := range agents {
				req.Agents = append(req.Agents, project.AgentID(a))
			}
			req.Seconds = seconds(limit)
			if len(args) > 1 {
				req.Hypothesis = args[1]
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			e, err := cl.StartExperiment(cmd.Context(), args[0], req)
			if err != nil {
				return err
			}
			return c.showLine(e, "%s", e.ID)
		},
	}
	cmd.Flags().StringVar(&req.Template, "template", "", "what to begin with ('sandbox project experiment templates')")
	cmd.Flags().DurationVar(&limit, "time-limit", 0, "when it expires, as 24h")
	cmd.Flags().StringArrayVar(&agents, "agent", nil, "an agent it is about, stopped when it expires; repeatable")
	cmd.Flags().StringArrayVar(&config, "set", nil, "KEY=VALUE of its config, the value as JSON or else text; repeatable")
	return cmd
}

// parseObject reads KEY=VALUE pairs; what is no JSON is text.
func parseObject(flag string, args []string) (map[string]any, error) {
	if len(args) == 0 {
		return nil, nil
	}
	m := map[string]any{}
	for _, a := range args {
		k, v, ok := strings.Cut(a, "=")
		if !ok || k == "" {
			return nil, usage("%s %q: use KEY=VALUE", flag, a)
		}
		var value any
		if json.Unmarshal([]byte(v), &value) != nil {
			value = v
		}
		m[k] = value
	}
	return m, nil
}

func (c *cli) experimentCompleteCmd() *cobra.Command {
	var o project.Outcome
	var failed bool
	var results []string
	cmd := &cobra.Command{
		Use: "complete [flags] PROJECT EXPERIMENT", Short: "Write an experiment's outcome down", Args: cobra.ExactArgs(2), ValidArgsFunction: c.completeProject,
		Example: "  sandbox project experiment complete shop exp_… --success --result sold=17",
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.Success == failed {
				return usage("say how it came out: --success or --failure")
			}
			var err error
			if o.Results, err = parseObject("--result", results); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			e, err := cl.CompleteExperiment(cmd.Context(), args[0], project.ExperimentID(args[1]), o)
			if err != nil {
				return err
			}
			return c.showLine(e, "%s", e.ID)
		},
	}
	cmd.Flags().BoolVar(&o.Success, "success", false, "the hypothesis holds")
	cmd.Flags().BoolVar(&failed, "failure", false, "it does not")
	cmd.Flags().StringArrayVar(&results, "result", nil, "KEY=VALUE, the value as JSON or else text; repeatable")
	return cmd
}

func (c *cli) experimentLsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "ls PROJECT", Aliases: []string{"list"}, Short: "List a project's experiments", Example: "  sandbox project experiment ls shop", Args: cobra.ExactArgs(1),
		ValidArgsFunction: c.completeProject,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.Experiments(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.show(all, func(w printer) error { return experimentTable(w, all) })
		},
	}
}

func experimentTable(w printer, all []project.Experiment) error {
	return columns(w, "EXPERIMENT\tSTATUS\tSUCCESS\tSTARTED\tDEADLINE\tHYPOTHESIS", func(row func(string, ...any)) {
		for _, e := range all {
			success, deadline := "-", "-"
			if e.Success != nil {
				success = strconv.FormatBool(*e.Success)
			}
			if !e.Deadline.IsZero() {
				deadline = e.Deadline.Local().Format(time.DateTime)
			}
			row("%s\t%s\t%s\t%s\t%s\t%s", e.ID, e.Status, success, ago(e.StartedAt), deadline, clip(oneLine(e.Hypothesis), 60))
		}
	})
}

func (c *cli) experimentTemplatesCmd() *cobra.Command {
	return &cobra.Command{
		Use: "templates", Short: "List what experiments can begin with", Example: "  sandbox project experiment templates", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.ExperimentTemplates(cmd.Context())
			if err != nil {
				return err
			}
			return c.show(all, func(w printer) error {
				return columns(w, "NAME\tTIME LIMIT\tHYPOTHESIS", func(row func(string, ...any)) {
					for _, t := range all {
						row("%s\t%s\t%s", t.Name, time.Duration(t.Seconds)*time.Second, clip(oneLine(t.Hypothesis), 80))
					}
				})
			})
		},
	}
}

func (c *cli) projectEvalCmd() *cobra.Command {
	var history bool
	cmd := &cobra.Command{
		Use: "eval [flags] PROJECT", Short: "Judge a project by what it came to",
		Long: `Judge a project by its criteria and its ROI, and keep the judgement with all it was
judged by:

  STRONGLY_RECOMMEND  all criteria pass and the ROI is above 300 %
  RECOMMEND           all pass and the ROI is above 0
  CONSIDER            the ROI is above 0 and some pass
  NOT_READY           anything else`,
		Example: "  sandbox project eval shop\n  sandbox project eval shop --history", Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeProject,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			if history {
				all, err := cl.Evaluations(cmd.Context(), args[0], 0)
				if err != nil {
					return err
				}
				return c.show(all, func(w printer) error {
					return columns(w, "EVALUATION\tAT\tBY\tRECOMMENDATION\tPROFIT\tROI", func(row func(string, ...any)) {
						for _, e := range all {
							row("%s\t%s\t%s\t%s\t%s\t%s", e.ID, e.At.Local().Format(time.DateTime), e.Actor, e.Recommendation, e.Inputs.Total.Profit, percent(cost.ROI(e.Inputs.Total.Profit, e.Inputs.Total.Cost)))
						}
					})
				})
			}
			e, err := cl.Evaluate(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.show(e, func(w printer) error { return evaluationTable(w, e) })
		},
	}
	cmd.Flags().BoolVar(&history, "history", false, "show the last evaluations instead")
	return cmd
}

func evaluationTable(w printer, e project.Evaluation) error {
	err := columns(w, "CRITERION\tPASS\tDETAIL", func(row func(string, ...any)) {
		for _, v := range e.Verdicts {
			row("%s\t%t\t%s", v.Name, v.Pass, clip(oneLine(v.Detail), 100))
		}
	})
	if err != nil {
		return err
	}
	return line(w, string(e.Recommendation))
}

func (c *cli) projectCompareCmd() *cobra.Command {
	return &cobra.Command{
		Use: "compare PROJECT PROJECT…", Short: "Show projects side by side", Example: "  sandbox project compare shop market", Args: cobra.MinimumNArgs(2),
		ValidArgsFunction: c.completeProject,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			var views []project.View
			for _, a := range args {
				v, err := cl.Project(cmd.Context(), a)
				if err != nil {
					return err
				}
				views = append(views, v)
			}
			return c.show(views, func(w printer) error { return compareTable(w, views) })
		},
	}
}

func compareTable(w printer, views []project.View) error {
	rows := []struct {
		name string
		of   func(project.View) string
	}{
		{"", func(v project.View) string { return v.Name }},
		{"status", func(v project.View) string { return string(v.Status) }},
		{"cost", func(v project.View) string { return v.Metrics.Cost.String() }},
		{"revenue", func(v project.View) string { return v.Metrics.Revenue.String() }},
		{"profit", func(v project.View) string { return v.Metrics.Profit.String() }},
		{"ROI", func(v project.View) string { return percent(v.Metrics.ROI) }},
		{"agents", func(v project.View) string { return strconv.Itoa(len(v.Agents)) }},
		{"active", func(v project.View) string {
			n := 0
			for _, a := range v.Agents {
				if a.Status == project.AgentActive {
					n++
				}
			}
			return strconv.Itoa(n)
		}},
		{"experiments", func(v project.View) string {
			n := project.CountExperiments(v.Experiments)
			return fmt.Sprintf("%d of %d succeeded", n.Succeeded, n.Completed)
		}},
		{"evaluated", func(v project.View) string {
			if v.Evaluation == nil {
				return "-"
			}
			return string(v.Evaluation.Recommendation)
		}},
	}
	return columns(w, "", func(row func(string, ...any)) {
		for _, r := range rows {
			cells := []any{r.name}
			for _, v := range views {
				cells = append(cells, r.of(v))
			}
			row(strings.Repeat("%s\t", len(cells)), cells...)
		}
	})
}

func (c *cli) projectPromoteCmd() *cobra.Command {
	var req project.PromotionRequest
	var yes, noWait bool
	var window time.Duration
	cmd := &cobra.Command{
		Use: "promote [flags] PROJECT", Short: "Move a project's agents into production",
		Long: `Evaluate a project and move its agents into the production world: those active or
paused whose ROI is not below zero. They get new ids and a clean config; what they
cost and earned stays with the project. If one of them ends or fails its health
check within the window, all are moved back.`,
		Example: "  sandbox project promote shop --window 30m\n  sandbox project promote shop --yes --force", Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeProject,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			e, err := cl.Evaluate(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if c.output == "table" {
				if err := evaluationTable(c.printer(c.err), e); err != nil {
					return err
				}
			}
			if e.Recommendation == project.NotReady {
				c.warn("the evaluation says NOT_READY")
				if !req.Force {
					return sandbox.Errorf(sandbox.ErrConflict, "not_ready", "project %s is NOT_READY: --force promotes it all the same", args[0])
				}
			}
			if err := c.confirm(cmd.Context(), yes, "Move the agents of %s into production?", args[0]); err != nil {
				return err
			}
			req.Window = window.Milliseconds()
			p, err := cl.Promote(cmd.Context(), args[0], req)
			if err == nil && !noWait {
				p, err = c.watchPromotion(cmd.Context(), cl, p)
			}
			if err != nil {
				return err
			}
			if err := c.show(p, func(w printer) error { return promotionTable(w, p) }); err != nil {
				return err
			}
			if p.Status == project.PromotionRolledBack {
				return sandbox.Errorf(sandbox.ErrConflict, "rolled_back", "the promotion was rolled back: %s", p.Detail)
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().BoolVar(&req.Force, "force", false, "also where the evaluation says NOT_READY")
	cmd.Flags().DurationVar(&window, "window", 0, "how long their health decides; the daemon's setting if not given")
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "return once it has begun")
	return cmd
}

// watchPromotion waits for the end of a promotion.
func (c *cli) watchPromotion(ctx context.Context, cl *client.Client, p project.Promotion) (project.Promotion, error) {
	told := project.PromotionStatus("")
	for {
		if p.Status != told && c.output == "table" {
			c.warn("promotion %s: %s", p.ID, p.Status)
			told = p.Status
		}
		if p.Status.Final() {
			return p, nil
		}
		select {
		case <-ctx.Done():
			return p, ctx.Err()
		case <-time.After(300 * time.Millisecond):
		}
		all, err := cl.Promotions(ctx, string(p.Project))
		if err != nil && !errors.Is(err, sandbox.ErrUnavailable) { // a daemon that starts again goes on with it
			return p, err
		}
		for _, now := range all {
			if now.ID == p.ID {
				p = now
			}
		}
	}
}

func promotionTable(w printer, p project.Promotion) error {
	if err := w.printf("%s  %s\n", p.ID, p.Status); err != nil {
		return err
	}
	return columns(w, "AGENT\tIN PRODUCTION\tWHY NOT", func(row func(string, ...any)) {
		for _, m := range p.Moves {
			row("%s\t%s\t", m.From, m.To)
		}
		for _, l := range p.Left {
			row("%s\t-\t%s", l.Agent, l.Why)
		}
	})
}

func (c *cli) projectKillCmd() *cobra.Command {
	var yes, workspace bool
	cmd := &cobra.Command{
		Use: "kill [flags] PROJECT", Short: "End a project: agents, experiments, sandboxes",
		Long: `End a project: its agents are stopped and their sandboxes removed, its experiments
cancelled. Its record stays, and so does its workspace unless --delete-workspace is
given. What it promoted goes on in production.`,
		Example: "  sandbox project kill shop --delete-workspace", Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeProject,
		RunE: func(cmd *cobra.Command, args []string) error {
			what := "Kill project %s?"
			if workspace {
				what = "Kill project %s and delete all files of its workspace?"
			}
			if err := c.confirm(cmd.Context(), yes, what, args[0]); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			p, err := cl.KillProject(cmd.Context(), args[0], workspace)
			if err != nil {
				return err
			}
			return c.showLine(p, "%s", p.ID)
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().BoolVar(&workspace, "delete-workspace", false, "delete the files of its workspace")
	return cmd
}

func (c *cli) projectRmCmd() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "rm [flags] PROJECT…", Short: "Forget killed projects", Example: "  sandbox project rm shop", Args: cobra.MinimumNArgs(1), ValidArgsFunction: c.completeProject,
		Long: "Forget killed projects: their records, evaluations and workspaces.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.confirm(cmd.Context(), yes, "Forget %s with all records and files?", strings.Join(args, ", ")); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(ref string) error { return cl.RemoveProject(cmd.Context(), ref) })
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

// addWorld lets a command that looks at sandboxes look into production.
func (c *cli) addWorld(cmds ...*cobra.Command) {
	for _, cmd := range cmds {
		cmd.PersistentFlags().StringVar(&c.world, "world", "lab", "lab or production: where promoted agents run")
	}
}
