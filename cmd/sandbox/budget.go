package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/cost"
)

func (c *cli) budgetCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "budget", Short: "Limit what is spent, and stop it in time",
		Long: `A budget limits one meter of a sandbox, an agent, a project or an owner: money,
cpu, memory, storage, net, wall, or a custom meter as model.tokens. At thresholds it warns with
an event, pauses or stops. The daemon carries it out, whether anybody is connected
or not, and while it is spent nothing of its scope can be created, started or
resumed.`,
	}
	cmd.AddCommand(c.budgetSetCmd(), c.budgetLsCmd(), c.budgetShowCmd(), c.budgetRmCmd())
	return cmd
}

// budgetMeters are the meters that have a flag of their own.
var budgetMeters = []struct {
	flag  string
	meter cost.Meter
	help  string
}{
	{"money", cost.MeterMoney, "limit of money, as 25 or 0.5"},
	{"cpu", cost.MeterCPU, "limit of processor time, as 90m or '2 cpu-hour'"},
	{"memory", cost.MeterMemory, "limit of memory over time, as '1.5 gib-hour'"},
	{"net", cost.MeterNet, "limit of bytes in and out, as '20 gib'"},
	{"wall", cost.MeterWall, "limit of time running and paused, as 8h"},
}

func (c *cli) budgetSetCmd() *cobra.Command {
	var f targetFlags
	var period, meter, limit, agent string
	var at []string
	limits := make([]string, len(budgetMeters))
	cmd := &cobra.Command{
		Use: "set [flags] [SANDBOX]", Short: "Set a budget",
		Long: `Set a budget, in place of the one for the same meter and period. A higher limit
resumes what the budget has paused; what it has stopped can be started again.`,
		Example: `  sandbox budget set dev --cpu 90m
  sandbox budget set --project prj_shop --money 25 --per month --at 50=warn,90=pause,100=stop
  sandbox budget set --agent scraper_k3m5x7qa --meter tokens --limit 2000000 --per day
  sandbox budget set --owner uid:1000 --meter model.tokens --limit 1000000 --per day`,
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := cost.BudgetRequest{
				Sandbox: argOr(args), Agent: agent, Project: f.project, Owner: f.owner, Meter: cost.Meter(meter), Limit: limit, Period: cost.Period(period),
			}
			for i, m := range budgetMeters {
				if limits[i] == "" {
					continue
				}
				if req.Meter != "" {
					return usage("one budget has one meter: set %s and %s one after the other", req.Meter, m.meter)
				}
				req.Meter, req.Limit = m.meter, limits[i]
			}
			if req.Meter == "" {
				return usage("say what is limited: --money, --cpu, --memory, --net, --wall, or --meter with --limit")
			}
			var err error
			if req.At, err = parseThresholds(at); err != nil {
				return err
			}
			if _, err := req.Budget(); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.SetBudget(cmd.Context(), req)
			if err != nil {
				return err
			}
			return c.show(s, func(w printer) error { return line(w, s.Key) })
		},
	}
	f.add(cmd, "the budget is")
	fl := cmd.Flags()
	fl.StringVar(&agent, "agent", "", "the budget is of this agent, whatever sandboxes it gets")
	for i, m := range budgetMeters {
		fl.StringVar(&limits[i], m.flag, "", m.help)
	}
	fl.StringVar(&meter, "meter", "", "another meter: storage, net_in, net_out, starts, or a custom one")
	fl.StringVar(&limit, "limit", "", "limit of that meter")
	fl.StringVar(&period, "per", "", "total, day or month, in UTC (total)")
	fl.StringSliceVar(&at, "at", nil, "PERCENT=ACTION: warn, pause or stop; repeatable (80=warn,100=stop)")
	return cmd
}

// parseThresholds reads 80=warn, 100=stop.
func parseThresholds(words []string) ([]cost.Threshold, error) {
	var out []cost.Threshold
	for _, w := range words {
		percent, action, ok := strings.Cut(w, "=")
		n, err := strconv.Atoi(strings.TrimSuffix(percent, "%"))
		if !ok || err != nil {
			return nil, usage("--at %q: write it as 80=warn", w)
		}
		out = append(out, cost.Threshold{Percent: n, Action: cost.Action(action)})
	}
	return out, nil
}

func (c *cli) budgetLsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the budgets and what they have spent", Args: cobra.NoArgs,
		Example: "  sandbox budget ls", ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			all, err := cl.Budgets(cmd.Context())
			if err != nil {
				return err
			}
			return c.show(all, func(w printer) error { return budgetTable(w, all) })
		},
	}
}

func (c *cli) budgetShowCmd() *cobra.Command {
	return &cobra.Command{
		Use: "show BUDGET", Short: "Show one budget, and how long the rest lasts", Args: cobra.ExactArgs(1),
		Example: "  sandbox budget show bgq3k5m7xw2f4a", ValidArgsFunction: c.completeBudget,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.Budget(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.show(s, func(w printer) error {
				if err := budgetTable(w, []cost.BudgetState{s}); err != nil {
					return err
				}
				for _, t := range s.At {
					reached := ""
					for _, f := range s.Fired {
						if f == t {
							reached = ", reached"
						}
					}
					if err := line(w, fmt.Sprintf("%4d%% %s%s", t.Percent, t.Action, reached)); err != nil {
						return err
					}
				}
				return line(w, forecast(s))
			})
		},
	}
}

func budgetTable(w printer, all []cost.BudgetState) error {
	return columns(w, "BUDGET\tOF\tMETER\tSPENT\tLIMIT\tPER\t%\tHOLDS", func(row func(string, ...any)) {
		for _, s := range all {
			row("%s\t%s %s\t%s\t%s\t%s\t%s\t%d\t%s", s.Key, s.Scope, s.ID, s.Meter, s.Spent, s.Limit, s.Period, s.Percent, dash(holdsText(s)))
		}
	})
}

// holdsText says what a budget holds, and whether for what is not known.
func holdsText(s cost.BudgetState) string {
	if s.Unknown != "" {
		return strings.TrimSpace(string(s.Holds) + " (spent unknown)")
	}
	return string(s.Holds)
}

// forecast says in words how long the rest lasts.
func forecast(s cost.BudgetState) string {
	switch {
	case s.Unknown != "":
		return "it cannot be told what was spent: " + s.Unknown
	case s.ExhaustedIn == nil && !s.Until.IsZero():
		return "not exhausted before " + s.Until.UTC().Format(time.RFC3339) + " at this rate"
	case s.ExhaustedIn == nil:
		return "nothing is being spent"
	case *s.ExhaustedIn == 0:
		return "exhausted"
	}
	return "exhausted in " + (time.Duration(*s.ExhaustedIn) * time.Second).String() + " at this rate"
}

func (c *cli) budgetRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm BUDGET…", Short: "Remove budgets; what they have paused goes on", Args: cobra.MinimumNArgs(1),
		Example: "  sandbox budget rm bgq3k5m7xw2f4a", ValidArgsFunction: c.completeBudget,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			return each(c, args, func(key string) error { return cl.RemoveBudget(cmd.Context(), key) })
		},
	}
}

// completeBudget offers the ids of budgets.
func (c *cli) completeBudget(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	cl, err := c.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	all, err := cl.Budgets(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var words []string
	for _, s := range all {
		words = append(words, s.Key)
	}
	return words, cobra.ShellCompDirectiveNoFileComp
}
