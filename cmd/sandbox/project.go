package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
)

func (c *cli) projectCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "project", Short: "Run projects: agents, experiments, evaluation, promotion",
		Long: `A project is a question with agents that are to answer it: long-running workloads,
each in a sandbox of its own, started again when they end. What they cost and earn
decides, in an evaluation, whether they are moved into the production world.

  PROJECT  is an id (prj_…) or a name.`,
	}
	cmd.AddCommand(c.projectCreateCmd(), c.projectLsCmd(), c.projectShowCmd(), c.projectSummaryCmd(), c.projectSetCmd(), c.projectDeployCmd(), c.projectAgentCmd(),
		c.projectExperimentCmd(), c.projectEnterCmd(), c.projectEvalCmd(), c.projectCompareCmd(), c.projectPromoteCmd(), c.projectKillCmd(), c.projectRmCmd())
	return cmd
}

// settingFlags are the flags of a project's settings.
type settingFlags struct {
	goal, cron, minProfit     string
	minActive, minExperiments int
	minAge                    time.Duration
	criteria, alerts          []string
	webhooks                  []string
	secret                    string
	events                    []string
}

func (f *settingFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.StringVar(&f.goal, "goal", "", "what it is to find out")
	fl.StringVar(&f.minProfit, "min-profit", "", "criterion: a profit above that")
	fl.IntVar(&f.minActive, "min-active", 0, "criterion: so many active agents; 0: 1")
	fl.DurationVar(&f.minAge, "min-age", 0, "criterion: data of so long; 0: 1h; -1s: no matter")
	fl.IntVar(&f.minExperiments, "min-experiments", 0, "criterion: so many completed experiments; 0: 1; -1: no matter")
	fl.StringArrayVar(&f.criteria, "criterion", nil, "NAME=CEL: a criterion of your own, as 'cheap=cost < 5 * unit'; repeatable")
	fl.StringArrayVar(&f.alerts, "alert", nil, "NAME=CEL: told when it comes true; repeatable")
	fl.StringVar(&f.cron, "evaluate", "", "cron expression of evaluations, as @daily")
	fl.StringArrayVar(&f.webhooks, "webhook", nil, "URL told of what happens; repeatable")
	fl.StringVar(&f.secret, "webhook-secret", "", "key of the webhooks' signatures")
	fl.StringSliceVar(&f.events, "webhook-event", nil, "only these types of events")
}

// change returns the settings that were given.
func (f *settingFlags) change(cmd *cobra.Command, now project.Settings) (project.Change, error) {
	var ch project.Change
	given := cmd.Flags().Changed
	if given("goal") {
		ch.Goal = &f.goal
	}
	if given("evaluate") {
		ch.Cron = &f.cron
	}
	if given("webhook") {
		hooks := []project.Hook{}
		for _, u := range f.webhooks {
			if u != "" {
				hooks = append(hooks, project.Hook{URL: u, Secret: f.secret, Events: f.events})
			}
		}
		ch.Webhooks = &hooks
	}
	var err error
	if given("alert") {
		var rules []project.Rule
		if rules, err = parseRules("--alert", f.alerts); err != nil {
			return ch, err
		}
		ch.Alerts = &rules
	}
	k := now.Criteria
	if given("min-profit") {
		if k.MinProfit, err = cost.ParseAmount("--min-profit", f.minProfit, cost.MinNano, cost.MaxNano); err != nil {
			return ch, err
		}
	}
	if given("min-active") {
		k.MinActive = f.minActive
	}
	if given("min-age") {
		if k.MinAge = seconds(f.minAge); f.minAge < 0 {
			k.MinAge = -1
		}
	}
	if given("min-experiments") {
		k.MinExperiments = f.minExperiments
	}
	if given("criterion") {
		if k.Custom, err = parseRules("--criterion", f.criteria); err != nil {
			return ch, err
		}
	}
	for _, name := range []string{"min-profit", "min-active", "min-age", "min-experiments", "criterion"} {
		if given(name) {
			ch.Criteria = &k
		}
	}
	return ch, nil
}

func parseRules(flag string, args []string) ([]project.Rule, error) {
	rules := []project.Rule{}
	for _, a := range args {
		if a == "" {
			continue
		}
		name, when, ok := strings.Cut(a, "=")
		if !ok || name == "" || when == "" {
			return nil, usage("%s %q: use NAME=EXPRESSION", flag, a)
		}
		rules = append(rules, project.Rule{Name: strings.TrimSpace(name), When: when})
	}
	return rules, nil
}

func (c *cli) projectCreateCmd() *cobra.Command {
	var f settingFlags
	var workspace sizeFlag
	cmd := &cobra.Command{
		Use: "create [flags] NAME", Short: "Make a project",
		Long:    "Make a project with a workspace: a volume that all its agents have at /workspace.",
		Example: "  sandbox project create shop --goal 'does it sell?' --workspace-size 5g --evaluate @daily",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			ch, err := f.change(cmd, project.Settings{})
			if err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			p, err := cl.CreateProject(cmd.Context(), project.Request{Name: args[0], Settings: ch.Apply(project.Settings{}), WorkspaceBytes: int64(workspace)})
			if err != nil {
				return err
			}
			return c.show(p, func(w printer) error { return line(w, string(p.ID)) })
		},
	}
	f.add(cmd)
	cmd.Flags().Var(&workspace, "workspace-size", "bytes the workspace may hold, as 10g")
	return cmd
}

func (c *cli) projectSetCmd() *cobra.Command {
	var f settingFlags
	cmd := &cobra.Command{
		Use: "set [flags] PROJECT", Short: "Change a project's settings",
		Long: `Change a project's settings: those that are given. Criteria, alerts and webhooks that
are given take the place of those there were; an empty one (--alert '') leaves none.`,
		Example: "  sandbox project set shop --min-profit 10 --criterion 'cheap=cost < 5 * unit'",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: c.completeProject,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			v, err := cl.Project(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			ch, err := f.change(cmd, v.Settings)
			if err != nil {
				return err
			}
			if ch == (project.Change{}) {
				return usage("nothing to change: give a flag")
			}
			p, err := cl.ChangeProject(cmd.Context(), args[0], ch)
			if err != nil {
				return err
			}
			return c.show(p, func(w printer) error { return line(w, string(p.ID)) })
		},
	}
	f.add(cmd)
	return cmd
}

func (c *cli) projectLsCmd() *cobra.Command {
	var all, quiet bool
	var status string
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"}, Short: "List the projects", Args: cobra.NoArgs, Example: "  sandbox project ls --status promoted",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			list, err := cl.Projects(cmd.Context(), project.Status(status), all)
			if err != nil {
				return err
			}
			if quiet {
				return names(c, list, func(p project.Project) string { return string(p.ID) })
			}
			return c.show(list, func(w printer) error {
				return columns(w, "ID\tNAME\tSTATUS\tOWNER\tCREATED", func(row func(string, ...any)) {
					for _, p := range list {
						row("%s\t%s\t%s\t%s\t%s", p.ID, p.Name, p.Status, dash(p.Owner), ago(p.CreatedAt))
					}
				})
			})
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "killed ones too")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "ids only")
	cmd.Flags().StringVar(&status, "status", "", "only those active, promoting, promoted or killed")
	return cmd
}

func (c *cli) projectShowCmd() *cobra.Command {
	return &cobra.Command{
		Use: "show PROJECT", Short: "Show a project: agents, experiments, money", Example: "  sandbox project show shop", Args: cobra.ExactArgs(1),
		ValidArgsFunction: c.completeProject,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			v, err := cl.Project(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.show(v, func(w printer) error { return projectTable(w, v) })
		},
	}
}

func projectTable(w printer, v project.View) error {
	err := w.printf("%s  %s  %s\n", v.ID, v.Name, v.Status)
	if v.Goal != "" {
		err = errors.Join(err, w.printf("goal       %s\n", oneLine(v.Goal)))
	}
	err = errors.Join(err, w.printf("workspace  %s\ncost %s  revenue %s  profit %s  ROI %s\n", dash(v.Workspace), v.Metrics.Cost, v.Metrics.Revenue, v.Metrics.Profit, percent(v.Metrics.ROI)))
	if e := v.Evaluation; e != nil {
		err = errors.Join(err, w.printf("evaluated  %s, %s\n", e.Recommendation, ago(e.At)))
	}
	if p := v.Promotion; p != nil {
		err = errors.Join(err, w.printf("promotion  %s %s %s\n", p.ID, p.Status, oneLine(p.Detail)))
	}
	if len(v.Agents) > 0 {
		err = errors.Join(err, line(w, ""), agentTable(w, v.Agents))
	}
	if len(v.Budgets) > 0 {
		err = errors.Join(err, line(w, ""), budgetTable(w, v.Budgets))
	}
	if len(v.Experiments) > 0 {
		err = errors.Join(err, line(w, ""), experimentTable(w, v.Experiments))
	}
	return err
}

func agentTable(w printer, agents []project.AgentView) error {
	return columns(w, "AGENT\tSTATUS\tRESTARTS\tCOST\tREVENUE\tROI\tDETAIL", func(row func(string, ...any)) {
		for _, a := range agents {
			detail := a.Detail
			if a.PromotedTo != "" {
				detail = "in production as " + string(a.PromotedTo)
			}
			row("%s\t%s\t%d\t%s\t%s\t%s\t%s", a.ID, a.Status, a.Restarts, a.Metrics.Cost, a.Metrics.Revenue, percent(a.Metrics.ROI), dash(clip(oneLine(detail), 60)))
		}
	})
}

func (c *cli) projectSummaryCmd() *cobra.Command {
	return &cobra.Command{
		Use: "summary [STATUS]", Short: "Sum up what the projects came to", Args: cobra.MaximumNArgs(1),
		Long:    "Sum up what the projects came to: all of them, or those active, promoting, promoted or killed.",
		Example: "  sandbox project summary active", ValidArgs: []string{"active", "promoting", "promoted", "killed"},
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.ProjectSummary(cmd.Context(), project.Status(append(args, "")[0]))
			if err != nil {
				return err
			}
			return c.show(s, func(w printer) error {
				return columns(w, "PROJECT\tNAME\tSTATUS\tAGENTS\tACTIVE\tCOST\tREVENUE\tPROFIT\tROI", func(row func(string, ...any)) {
					put := func(id, name, status, agents, active string, m project.Metrics) {
						row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", id, name, status, agents, active, m.Cost, m.Revenue, m.Profit, percent(m.ROI))
					}
					for _, p := range s.Projects {
						put(string(p.ID), p.Name, string(p.Status), fmt.Sprint(p.Agents), fmt.Sprint(p.Active), p.Metrics)
					}
					put("all", "", "", "", "", s.Total)
				})
			})
		},
	}
}

func (c *cli) projectDeployCmd() *cobra.Command {
	var kind, file string
	cmd := &cobra.Command{
		Use: "deploy [flags] PROJECT", Short: "Start an agent",
		Long: `Start an agent: a command in a sandbox of its own that is started again when it
ends. FILE is YAML or JSON:

  command: [python3, /workspace/bot.py]    the only thing it must have
  image: python                            as 'sandbox image ls' names it
  env: {LEVEL: info}
  limits: {memory_bytes: 268435456, cpus: 0.5}
  network: {mode: allow, allow: [{host: api.example.com}]}
  restart: {when: on-failure, max: 5, backoff_ms: 2000}
  health: {command: [curl, -fs, localhost:8080], interval_ms: 10000, retries: 3}
  config: {pair: EUR}                      found in the file that AGENT_CONFIG names`,
		Example: "  sandbox project deploy shop --type trader --config trader.yaml", Args: cobra.ExactArgs(1), ValidArgsFunction: c.completeProject,
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := c.readAgent(file)
			if err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			a, err := cl.Deploy(cmd.Context(), args[0], kind, spec)
			if err != nil {
				return err
			}
			if a.Status != project.AgentActive {
				c.warn("agent %s is %s: %s", a.ID, a.Status, dash(a.Detail))
			}
			return c.show(a, func(w printer) error { return line(w, string(a.ID)) })
		},
	}
	cmd.Flags().StringVar(&kind, "type", "", "what it is, a part of its id, as trader")
	cmd.Flags().StringVar(&file, "config", "", "file that describes it; - for standard input")
	_ = cmd.MarkFlagRequired("type")
	_ = cmd.MarkFlagRequired("config")
	return cmd
}

// readAgent reads the file of an agent, strictly.
func (c *cli) readAgent(file string) (spec project.AgentSpec, err error) {
	var b []byte
	if file == "-" {
		b, err = io.ReadAll(io.LimitReader(c.in, 1<<20))
	} else {
		b, err = os.ReadFile(file)
	}
	if err != nil {
		return spec, fmt.Errorf("read the agent's file: %w", err)
	}
	js, err := yaml.YAMLToJSON(b) // JSON is YAML
	if err == nil {
		d := json.NewDecoder(strings.NewReader(string(js)))
		d.DisallowUnknownFields()
		err = d.Decode(&spec)
	}
	if err != nil {
		return spec, usage("--config %s: %w", file, err)
	}
	return spec, spec.Validate()
}

func (c *cli) projectAgentCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "agent", Short: "Pause, resume, stop, start and list agents",
		Long: "Pause, resume, stop and start agents, of projects and of production, and list those of production.",
	}
	verbs := map[string]string{
		"pause": "Freeze agents; memory is kept", "resume": "Let paused agents go on", "stop": "End agents; files are kept", "start": "Start agents that stopped or failed",
	}
	for _, verb := range []string{"pause", "resume", "stop", "start"} {
		cmd.AddCommand(&cobra.Command{
			Use: verb + " AGENT…", Short: verbs[verb], Example: "  sandbox project agent " + verb + " sandbox_prj_…", Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
			RunE: func(cmd *cobra.Command, args []string) error {
				cl, err := c.client()
				if err != nil {
					return err
				}
				return each(c, args, func(id string) error {
					a, err := cl.SetAgent(cmd.Context(), project.AgentID(id), verb)
					if err != nil {
						return err
					}
					return c.showLine(a, "%s  %s", a.ID, a.Status)
				})
			},
		})
	}
	cmd.AddCommand(&cobra.Command{
		Use: "rm AGENT…", Short: "End agents of production for good, with their files", Example: "  sandbox project agent rm trader_4k2ab7cd", Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(id string) error { return cl.RemoveAgent(cmd.Context(), project.AgentID(id)) })
		},
	}, &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the agents of production", Example: "  sandbox project agent ls", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.ProductionAgents(cmd.Context())
			if err != nil {
				return err
			}
			return c.show(all, func(w printer) error {
				return columns(w, "AGENT\tTYPE\tSTATUS\tRESTARTS\tSINCE\tDETAIL", func(row func(string, ...any)) {
					for _, a := range all {
						row("%s\t%s\t%s\t%d\t%s\t%s", a.ID, a.Type, a.Status, a.Restarts, ago(a.CreatedAt), dash(clip(oneLine(a.Detail), 60)))
					}
				})
			})
		},
	})
	return cmd
}

func (c *cli) projectEnterCmd() *cobra.Command {
	var e project.Entry
	var agent string
	cmd := &cobra.Command{
		Use: "enter [flags] PROJECT cost|revenue AMOUNT", Short: "Enter a cost or a revenue from outside",
		Long: `Enter money the daemon cannot count: spent or earned by an agent, or by the project
as a whole. The same entry under the same key is taken once.`,
		Example: "  sandbox project enter shop revenue 12.50 --agent sandbox_prj_… --key order-4711", Args: cobra.ExactArgs(3), ValidArgsFunction: c.completeProject,
		RunE: func(cmd *cobra.Command, args []string) error {
			e.Kind, e.Agent = cost.Kind(args[1]), project.AgentID(agent)
			var err error
			if e.Amount, err = cost.ParseAmount("AMOUNT", args[2], -cost.MaxEntry, cost.MaxEntry); err != nil {
				return err
			}
			if err := e.Validate(); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			got, err := cl.EnterMoney(cmd.Context(), args[0], e)
			if err != nil {
				return err
			}
			return c.showLine(got, "%s", got.Key)
		},
	}
	cmd.Flags().StringVar(&agent, "agent", "", "whose it is; otherwise the project's")
	cmd.Flags().StringVar(&e.Key, "key", "", "new for each entry, the same when it is sent again")
	cmd.Flags().StringVar(&e.Note, "note", "", "what it was for")
	_ = cmd.MarkFlagRequired("key")
	return cmd
}

// completeProject offers the names of projects.
func (c *cli) completeProject(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	cl, err := c.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	all, err := cl.Projects(ctx, "", false)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, p := range all {
		names = append(names, p.Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// confirm asks on the terminal, until ctx ends; without one, --yes must have
// been given.
func (c *cli) confirm(ctx context.Context, yes bool, format string, args ...any) error {
	if yes {
		return nil
	}
	if !isTerminal(c.in) {
		return usage("nobody can be asked here: give --yes")
	}
	c.say(format+" [y/N] ", args...)
	answers := make(chan string, 1)
	go func() {
		answer, _ := bufio.NewReader(c.in).ReadString('\n') // nothing is no answer
		answers <- answer
	}()
	var answer string
	select {
	case answer = <-answers:
	case <-ctx.Done(): // the terminal goes on waiting for a line
		return ctx.Err()
	}
	if answer == "" {
		return usage("no answer: nothing was done")
	}
	if !slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(answer))) {
		return usage("not confirmed: nothing was done")
	}
	return nil
}
