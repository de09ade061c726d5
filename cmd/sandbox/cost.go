package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (c *cli) costCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "cost", Short: "Enter and report costs",
		Long: `Costs are what the daemon counted, rated with the price books of its
configuration, and what is entered from outside, as model tokens.`,
	}
	cmd.AddCommand(c.entryAddCmd(cost.KindCost), c.entryLsCmd(), c.entryCancelCmd(), c.costReportCmd(), c.pricesCmd())
	return cmd
}

func (c *cli) revenueCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "revenue", Short: "Enter what was earned",
		Long: "Enter what a sandbox, a project or an owner earned. 'sandbox cost report' sets it against the costs.",
	}
	cmd.AddCommand(c.entryAddCmd(cost.KindRevenue))
	return cmd
}

// targetFlags name a sandbox, a project or an owner.
type targetFlags struct{ project, owner string }

func (f *targetFlags) add(cmd *cobra.Command, what string) {
	cmd.Flags().StringVar(&f.project, "project", "", what+" of this project: prj_…")
	cmd.Flags().StringVar(&f.owner, "owner", "", what+" of this owner, as uid:1000")
}

// argOr returns the first argument, or nothing.
func argOr(args []string) string {
	if len(args) > 0 {
		return args[0]
	}
	return ""
}

func (c *cli) entryAddCmd(kind cost.Kind) *cobra.Command {
	var f targetFlags
	var amount, quantity, meter, key, note string
	cmd := &cobra.Command{
		Use: "add [flags] [SANDBOX]", Short: "Enter a cost: an amount, or a quantity of a custom meter",
		Long: `Enter a cost from outside, of a sandbox, a project or an owner: an amount, or a
quantity of a custom meter that the price book in force has a price for. Entries
stay: 'sandbox cost cancel' takes one back. With --key the same entry is taken
once, however often it is sent.`,
		Example: `  sandbox cost add dev --meter model.tokens --qty 1200
  sandbox cost add --project prj_shop --amount 4.99 --note 'domain name' --key order-1881`,
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := cost.EntryRequest{Kind: kind, Sandbox: argOr(args), Project: f.project, Owner: f.owner, Meter: cost.Meter(meter), Note: note, Key: key}
			if req.Key == "" {
				req.Key = "cli-" + string(sandbox.NewID()) // for the client's own second try
			}
			var err error
			if amount != "" {
				if req.Amount, err = cost.ParseAmount("--amount", amount, -cost.MaxEntry, cost.MaxEntry); err != nil {
					return err
				}
			}
			if quantity != "" {
				if req.Quantity, err = cost.ParseEntryQuantity("--qty", quantity); err != nil {
					return err
				}
			}
			if e, err := req.Entry(time.Time{}); err != nil {
				return err
			} else if err := e.Validate(); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			p, err := cl.PostEntry(cmd.Context(), req)
			if err != nil {
				return err
			}
			return c.show(p, func(w printer) error { return line(w, p.Charged.String()) })
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&amount, "amount", "", "in the currency of the price books, as 12.5")
	f.add(cmd, "the entry is")
	fl.StringVar(&key, "key", "", "idempotency key, the same when it is sent again")
	fl.StringVar(&note, "note", "", "a word on what it is")
	if kind == cost.KindCost {
		fl.StringVar(&meter, "meter", "", "a custom meter of the price book, as model.tokens, in place of an amount")
		fl.StringVar(&quantity, "qty", "", "how much of it")
		return cmd
	}
	cmd.Short = "Enter an amount earned"
	cmd.Long = `Enter what a sandbox, a project or an owner earned. Entries stay: an amount below
zero pays back, and 'sandbox cost cancel' takes one back. With --key the same entry is taken once, however often it is sent.`
	cmd.Example = "  sandbox revenue add dev --amount 12.5 --key invoice-7"
	return cmd
}

func (c *cli) entryLsCmd() *cobra.Command {
	var f targetFlags
	var from, to, kind string
	var most int
	cmd := &cobra.Command{
		Use: "ls [flags] [SANDBOX]", Aliases: []string{"list"}, Short: "List costs and revenue from outside, newest first",
		Example: "  sandbox cost ls --project prj_shop --from 720h", Args: cobra.MaximumNArgs(1), ValidArgsFunction: c.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			q := cost.EntryQuery{Sandbox: argOr(args), Project: f.project, Owner: f.owner, Kind: cost.Kind(kind), Limit: most}
			if kind != "" && q.Kind != cost.KindCost && q.Kind != cost.KindRevenue {
				return usage("--kind %q: use cost or revenue", kind)
			}
			var err error
			if q.From, q.To, err = parseSpan(from, to); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			var all []cost.Posted
			for e, err := range cl.Entries(cmd.Context(), q) {
				if err != nil {
					return err
				}
				all = append(all, e)
			}
			return c.show(all, func(w printer) error {
				return columns(w, "ENTRY\tWHEN\tKIND\tFOR\tAMOUNT\tOF\tSTATE\tNOTE", func(row func(string, ...any)) {
					for _, e := range all {
						of := ""
						if e.Meter != "" {
							of = e.Quantity.String() + " " + string(e.Meter)
						}
						row("%d\t%s\t%s\t%s %s\t%s\t%s\t%s\t%s", e.Number, ago(e.At), e.Kind, e.Scope, e.ID, e.Charged, dash(of), dash(entryState(e)), dash(e.Note))
					}
				})
			})
		},
	}
	f.add(cmd, "only those")
	cmd.Flags().StringVar(&kind, "kind", "", "cost or revenue (default: both)")
	spanFlags(cmd, &from, &to)
	cmd.Flags().IntVarP(&most, "limit", "n", 100, "at most this many; 0: all")
	return cmd
}

// entryState says what became of an entry.
func entryState(e cost.Posted) string {
	switch {
	case e.Cancels != 0:
		return fmt.Sprint("cancels ", e.Cancels)
	case e.CancelledBy != 0:
		return fmt.Sprint("cancelled by ", e.CancelledBy)
	case e.Quarantined:
		return "quarantined"
	}
	return ""
}

func (c *cli) entryCancelCmd() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "cancel --reason TEXT ENTRY", Short: "Cancel a cost or a revenue that was entered",
		Long: `Cancel an entry, cost or revenue, by its number: 'sandbox cost ls' shows them.
The entry stays in the ledger, and beside it its cancellation: the opposite
amount at the same time. Reports and budgets are as if it had not been. To
cancel it again changes nothing. Entries that others sent, or programs in a
sandbox, take the role operator.

An entry in quarantine is from before entries had bounds: no sum has it, and
the budgets it is of hold until it is cancelled.`,
		Example: "  sandbox cost cancel 1881 --reason 'entered in cents'",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			number, err := strconv.ParseInt(args[0], 10, 64)
			if err != nil || number < 1 {
				return usage("entry %q: give its number, as 'sandbox cost ls' shows it", args[0])
			}
			if err := cost.ValidateReason(reason); err != nil {
				return usage("--reason: say why, in at most %d bytes", cost.MaxNote)
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			p, err := cl.CancelEntry(cmd.Context(), number, reason)
			if err != nil {
				return err
			}
			return c.show(p, func(w printer) error { return line(w, p.Charged.String()) })
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why it is cancelled; kept with the cancellation")
	return cmd
}

// spanFlags adds the ends of a span of time.
func spanFlags(cmd *cobra.Command, from, to *string) {
	cmd.Flags().StringVar(from, "from", "", "begin then: a duration ago, as 24h, or a time, as 2026-01-31T12:00:00Z (default: the beginning)")
	cmd.Flags().StringVar(to, "to", "", "end before then, likewise (default: now)")
}

func parseSpan(from, to string) (a, b time.Time, err error) {
	now := time.Now()
	if a, err = parseBound("--from", from, now); err == nil {
		b, err = parseBound("--to", to, now)
	}
	return a, b, err
}

func (c *cli) pricesCmd() *cobra.Command {
	return &cobra.Command{
		Use: "prices", Short: "List the price books", Example: "  sandbox cost prices", Args: cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			books, err := cl.Prices(cmd.Context())
			if err != nil {
				return err
			}
			return c.show(books, func(w printer) error {
				return columns(w, "BOOK\tFROM\tMETER\tPRICE", func(row func(string, ...any)) {
					for _, b := range books {
						for _, m := range slices.Sorted(maps.Keys(b.Prices)) {
							p := b.Prices[m]
							per := p.Unit
							if p.Per > 1 {
								per = fmt.Sprint(p.Per, " ", p.Unit)
							}
							row("%s\t%s\t%s\t%s %s for each %s", b.Version, b.From.UTC().Format(time.DateOnly), m, p.Price, b.Currency, per)
						}
					}
				})
			})
		},
	}
}

func (c *cli) costReportCmd() *cobra.Command {
	var f targetFlags
	var from, to, by, book, page string
	var chart bool
	cmd := &cobra.Command{
		Use: "report [flags] [SANDBOX]", Short: "Report what was spent and earned",
		Long: `Report what was spent and earned from one time to another. Spans that meet leave
nothing out and count nothing twice. With --book everything is rated anew with
one price book, as if it had been in force all the time.

-o csv has a line for each, --chart draws bars, and --html writes a page with
plots over time that needs nothing else to be looked at.`,
		Example: `  sandbox cost report --by project --from 720h
  sandbox cost report --by owner -o csv > owners.csv
  sandbox cost report --by label:team --chart
  sandbox cost report --project prj_shop --from 720h --html shop.html
  sandbox cost report --by project --book 2027-01`,
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: c.completeSandbox, Annotations: map[string]string{outputCSV: "yes"},
		RunE: func(cmd *cobra.Command, args []string) error {
			q := cost.StatementQuery{By: by, Book: book, Sandbox: argOr(args), Project: f.project, Owner: f.owner}
			var err error
			if q.From, q.To, err = parseSpan(from, to); err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			if page != "" {
				return c.writePage(cmd.Context(), cl, q, page)
			}
			s, err := cl.Statement(cmd.Context(), q)
			if err != nil {
				return err
			}
			switch {
			case c.output == outputCSV:
				return statementCSV(c.out, s)
			case chart:
				return c.show(s, func(w printer) error { return statementChart(w, s) })
			}
			return c.show(s, func(w printer) error { return statementTable(w, s) })
		},
	}
	f.add(cmd, "only those")
	fl := cmd.Flags()
	fl.StringVar(&by, "by", "", "a line for each: sandbox, owner, project, image or label:KEY")
	fl.StringVar(&book, "book", "", "rate all with this price book")
	fl.BoolVar(&chart, "chart", false, "draw the costs as bars")
	fl.StringVar(&page, "html", "", "write a page with plots to this file")
	spanFlags(cmd, &from, &to)
	return cmd
}

func statementTable(w printer, s cost.Statement) error {
	return columns(w, "KEY\tSANDBOXES\tUSAGE\tOUTSIDE\tCOST\tREVENUE\tPROFIT\tROI", func(row func(string, ...any)) {
		show := func(key string, l cost.StatementLine) {
			row("%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s", key, l.Sandboxes, l.Usage, l.Outside, l.Cost, l.Revenue, l.Profit, percent(l.ROI))
		}
		for _, l := range s.Lines {
			if s.By != "" {
				show(dash(l.Key), l)
			}
		}
		show(strings.TrimSpace("total "+s.Currency), s.Total)
		for _, n := range s.Quarantined {
			row("entry %d is in quarantine and in no sum: 'sandbox cost cancel %d'", n, n)
		}
	})
}

// percent prints hundredths of a percent.
func percent(bp *int64) string {
	if bp == nil {
		return "-"
	}
	sign, n := "", uint64(*bp)
	if *bp < 0 {
		sign, n = "-", -n
	}
	return fmt.Sprintf("%s%d.%02d%%", sign, n/100, n%100)
}

// statementChart draws the cost of each line as a bar.
func statementChart(w printer, s cost.Statement) error {
	lines := slices.Clone(s.Lines)
	slices.SortStableFunc(lines, func(a, b cost.StatementLine) int { return b.Cost.Cmp(a.Cost) })
	var most cost.Nano
	for _, l := range lines {
		most = max(most, drawn(l.Cost))
	}
	return columns(w, "KEY\tCOST\t", func(row func(string, ...any)) {
		for _, l := range lines {
			row("%s\t%s\t%s", dash(l.Key), l.Cost, strings.Repeat("=", share(drawn(l.Cost), most)))
		}
		row("%s\t%s\t", strings.TrimSpace("total "+s.Currency), s.Total.Cost)
	})
}

// drawn is a sum for a drawing, which ends at the bounds of an amount.
func drawn(s cost.Sum) cost.Nano {
	n, _ := s.Nano()
	return n
}

// chartWidth is the length of the longest bar.
const chartWidth = 40

// share returns the length of the bar of n where most has the longest;
// something is never nothing.
func share(n, most cost.Nano) int {
	if n <= 0 || most <= 0 {
		return 0
	}
	return min(chartWidth, int(n/(most/chartWidth+1))+1)
}
