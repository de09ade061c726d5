package cost

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/sandboxd/sandboxd/sandbox"
)

func testBudget(limit uint64, period Period, at ...Threshold) Budget {
	return Budget{Scope: ScopeProject, ID: "p1", Meter: MeterMoney, Limit: Count(limit), Period: period, At: at}
}

var (
	warn80   = Threshold{80, ActionWarn}
	pause100 = Threshold{100, ActionPause}
	stop120  = Threshold{120, ActionStop}
)

// look is one look at a budget, and what must come of it.
type look struct {
	at    time.Time
	spent uint64
	fired []Threshold
	do    Action
}

// looks goes through looks one after another, the mark kept in between.
func looks(t *testing.T, b Budget, m Mark, all ...look) Mark {
	t.Helper()
	if err := b.Validate(); err != nil {
		t.Fatal(err)
	}
	for i, l := range all {
		d := b.Decide(m, l.at, Count(l.spent))
		if !slices.Equal(d.Fired, l.fired) || d.Do != l.do {
			t.Fatalf("look %d, %d spent: fired %v, do %q; want %v, %q", i, l.spent, d.Fired, d.Do, l.fired, l.do)
		}
		var kept Mark
		if text, err := json.Marshal(d.Mark); err != nil || json.Unmarshal(text, &kept) != nil {
			t.Fatalf("mark %s: %v", text, err)
		}
		if again := b.Decide(kept, l.at, Count(l.spent)); len(again.Fired) != 0 || again.Do != ActionNone || !reflect.DeepEqual(again.Mark, kept) {
			t.Fatalf("look %d after a restart: %+v", i, again)
		}
		m = kept
	}
	return m
}

func TestThresholdsFireOnce(t *testing.T) {
	b := testBudget(1000, Total, stop120, warn80, pause100)
	looks(t, b, Mark{},
		look{nov, 0, nil, ActionNone}, look{nov, 799, nil, ActionNone}, look{nov, 800, []Threshold{warn80}, ActionNone},
		look{nov, 999, nil, ActionNone}, look{nov.AddDate(5, 0, 0), 1000, []Threshold{pause100}, ActionPause},
		look{nov, 1199, nil, ActionNone}, look{nov, 1200, []Threshold{stop120}, ActionStop}, look{nov, 9999, nil, ActionNone})
	// All at once: an event each, the strongest is done.
	looks(t, b, Mark{}, look{nov, 5000, []Threshold{warn80, pause100, stop120}, ActionStop})
	// Shares of a limit are rounded up: 80% of 3 is reached by 3.
	looks(t, testBudget(3, Total, warn80), Mark{}, look{nov, 2, nil, ActionNone}, look{nov, 3, []Threshold{warn80}, ActionNone})
}

func TestRaisedBudget(t *testing.T) {
	b := testBudget(1000, Total, warn80, pause100, stop120)
	m := looks(t, b, Mark{}, look{nov, 1100, []Threshold{warn80, pause100}, ActionPause})
	raised := b
	raised.Limit = Count(1300) // warned about still, at 1040
	m = looks(t, raised, m, look{nov, 1100, nil, ActionResume}, look{nov, 1300, []Threshold{pause100}, ActionPause})
	raised.Limit = Count(10000)
	m = looks(t, raised, m, look{nov, 1300, nil, ActionResume}, look{nov, 8000, []Threshold{warn80}, ActionNone}, look{nov, 12000, []Threshold{pause100, stop120}, ActionStop})
	raised.Limit = Count(1e6) // what was stopped stays so
	m = looks(t, raised, m, look{nov, 12000, nil, ActionNone})
	// Lowered, it acts at the next look.
	m = looks(t, b, m, look{nov, 12000, []Threshold{warn80, pause100, stop120}, ActionStop})
	// A credit makes room, and paying again fires again.
	m = looks(t, b, m, look{nov, 700, nil, ActionNone}, look{nov, 1000, []Threshold{warn80, pause100}, ActionPause}, look{nov, 999, nil, ActionResume})
	// Without its threshold a pause ends.
	m = looks(t, b, m, look{nov, 1000, []Threshold{pause100}, ActionPause})
	b.At = []Threshold{warn80}
	looks(t, b, m, look{nov, 1000, nil, ActionResume})
}

func TestPeriodsBeginAnew(t *testing.T) {
	b := testBudget(1000, Day, warn80, pause100)
	day2 := nov.AddDate(0, 0, 1)
	m := looks(t, b, Mark{}, look{day2.Add(-time.Second), 1000, []Threshold{warn80, pause100}, ActionPause}, look{day2.Add(-1), 1000, nil, ActionNone},
		look{day2, 10, nil, ActionResume}, look{day2.Add(time.Hour), 900, []Threshold{warn80}, ActionNone})
	if !m.Start.Equal(day2) {
		t.Errorf("the mark is of %s", m.Start)
	}
	// The clock steps back over midnight: the day stays the later one.
	back := day2.Add(-10 * time.Minute)
	if s := b.Span(m, back); s != Day.Span(day2) {
		t.Errorf("span %v after a step back", s)
	}
	looks(t, b, m, look{back, 900, nil, ActionNone}, look{day2.Add(2 * time.Hour), 900, nil, ActionNone})
	// A clock that was wrong by more than a day is not believed for ever.
	far := looks(t, b, m, look{nov.AddDate(10, 0, 0), 900, []Threshold{warn80}, ActionNone})
	if s := b.Span(far, day2); s != Day.Span(day2) {
		t.Errorf("span %v after years back", s)
	}
	looks(t, b, far, look{day2, 900, []Threshold{warn80}, ActionNone})
	// Spent up in the new period as well: paused anew, not resumed.
	looks(t, b, Mark{Day, nov, []Threshold{warn80, pause100}, true}, look{day2, 1000, []Threshold{warn80, pause100}, ActionPause})
	// The period of the budget is changed.
	monthly := b
	monthly.Period = Month
	if s := monthly.Span(Mark{Period: Day, Start: nov}, nov.Add(-time.Minute)); s != Month.Span(nov.Add(-time.Minute)) {
		t.Errorf("a mark of days held back a month: %v", s)
	}
	looks(t, monthly, Mark{Day, nov, []Threshold{warn80}, false}, look{nov, 900, []Threshold{warn80}, ActionNone})
	looks(t, monthly, m, look{day2.Add(time.Hour), 900, []Threshold{warn80}, ActionNone}, look{day2.Add(48 * time.Hour), 900, nil, ActionNone})
}

// TestDecideModel runs random spending, limits and times past Decide, and
// checks after each look what must hold whatever came before.
func TestDecideModel(t *testing.T) {
	r := random(t)
	for range 300 {
		b := testBudget(1+r.Uint64N(1000), []Period{Total, Day, Month}[r.IntN(3)])
		for _, p := range r.Perm(15)[:1+r.IntN(4)] {
			b.At = append(b.At, Threshold{10 * (p + 1), []Action{ActionWarn, ActionPause, ActionStop}[r.IntN(3)]})
		}
		var m Mark
		now, spent, paused := nov, uint64(0), false // paused: a sandbox that does as it is told
		start := b.Span(m, now).Start
		fired := map[Threshold]bool{}
		for range 60 {
			now = now.Add(time.Duration(r.IntN(int(10 * time.Hour))))
			if s := b.Span(m, now).Start; !s.Equal(start) {
				start, spent = s, 0
				clear(fired)
			}
			if r.IntN(10) == 0 {
				b.Limit = Count(1 + r.Uint64N(1000))
			}
			spent += r.Uint64N(100)
			for th := range fired {
				if Count(spent).Cmp(b.at(th)) < 0 {
					delete(fired, th)
				}
			}
			d := b.Decide(m, now, Count(spent))
			m = d.Mark
			for _, th := range d.Fired {
				if fired[th] {
					t.Fatalf("%v fired twice", th)
				}
				fired[th] = true
			}
			switch d.Do {
			case ActionPause:
				paused = true
			case ActionResume:
				if !paused {
					t.Fatal("resumed what was not paused")
				}
				paused = false
			case ActionStop:
				paused = false
			}
			if holds := b.Holds(Count(spent)); holds == ActionNone && paused || paused != m.Paused {
				t.Fatalf("%d of %s, %v: paused %v, the mark says %v, holds %q", spent, b.Limit, b.At, paused, m.Paused, holds)
			}
			for _, th := range b.At {
				if (Count(spent).Cmp(b.at(th)) >= 0) != fired[th] {
					t.Fatalf("%d of %s: %v fired: %v", spent, b.Limit, th, fired[th])
				}
			}
		}
	}
}

func TestAllowAndHolds(t *testing.T) {
	b := testBudget(2e9, Day, warn80, pause100, stop120)
	for spent, want := range map[uint64]Action{0: ActionNone, 1_999_999_999: ActionNone, 2e9: ActionPause, 2_400_000_000: ActionStop} {
		if got := b.Holds(Count(spent)); got != want {
			t.Errorf("%d spent: holds %q, want %q", spent, got, want)
		}
		err := b.Allow(Mark{}, nov, Count(spent))
		if (want == ActionNone) != (err == nil) {
			t.Errorf("%d spent: %v", spent, err)
		}
		if err != nil && (!is(err, sandbox.ErrExhausted, "budget_exhausted") || !strings.Contains(err.Error(), "2026-11-02T00:00:00Z")) {
			t.Errorf("%d spent: %v", spent, err)
		}
	}
	if a := Strongest(ActionResume, ActionPause, ActionNone); a != ActionPause {
		t.Errorf("resume and pause: %s", a)
	}
	if a := Strongest(ActionWarn, ActionStop, ActionPause); a != ActionStop {
		t.Errorf("warn, stop and pause: %s", a)
	}
}

func TestBudgetValidate(t *testing.T) {
	ok := testBudget(1, Month, DefaultThresholds()...)
	if err := ok.Validate(); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(*Budget){
		"scope":      func(b *Budget) { b.Scope = "planet" },
		"id":         func(b *Budget) { b.ID = "" },
		"meter":      func(b *Budget) { b.Meter = "Money" },
		"no limit":   func(b *Budget) { b.Limit = Quantity{} },
		"much money": func(b *Budget) { b.Limit = Count(1 << 63) },
		"much":       func(b *Budget) { b.Meter, b.Limit = MeterMemory, MaxQuantity },
		"period":     func(b *Budget) { b.Period = "week" },
		"nothing":    func(b *Budget) { b.At = nil },
		"zero":       func(b *Budget) { b.At = []Threshold{{0, ActionWarn}} },
		"over":       func(b *Budget) { b.At = []Threshold{{1001, ActionWarn}} },
		"action":     func(b *Budget) { b.At = []Threshold{{10, ActionResume}} },
		"twice":      func(b *Budget) { b.At = []Threshold{warn80, stop120, warn80} },
		"many":       func(b *Budget) { b.At = slices.Repeat([]Threshold{warn80}, 17) },
	} {
		b := ok
		change(&b)
		if err := b.Validate(); !is(err, sandbox.ErrInvalid, "invalid_budget") {
			t.Errorf("%s: %v", what, err)
		}
	}
	large := ok
	large.Meter, large.Limit, large.At = MeterMemory, maxLimit, []Threshold{{1000, ActionStop}}
	if err := large.Validate(); err != nil || large.Holds(maxLimit) != ActionNone || large.Holds(MaxQuantity) != ActionStop {
		t.Errorf("the highest limit: %v", err)
	}
}

func TestSpans(t *testing.T) {
	utc := func(s string) time.Time {
		at, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	for _, c := range []struct {
		period         Period
		at, start, end string
	}{
		{Day, "2026-11-21T12:00:00Z", "2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z"},
		{Day, "2026-12-31T23:59:59.999999999Z", "2026-12-31T00:00:00Z", "2027-01-01T00:00:00Z"},
		{Day, "2028-02-28T10:00:00Z", "2028-02-28T00:00:00Z", "2028-02-29T00:00:00Z"},
		{Day, "2026-02-28T10:00:00Z", "2026-02-28T00:00:00Z", "2026-03-01T00:00:00Z"},
		{Month, "2028-02-29T23:59:59Z", "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z"},
		{Month, "2026-01-31T00:00:00Z", "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"},
		{Month, "2026-12-01T00:00:00Z", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z"},
		{Day, "2026-11-22T01:30:00+02:00", "2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z"},
		{Month, "2026-11-30T22:00:00-05:00", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z"},
	} {
		want := Span{utc(c.start).UTC(), utc(c.end).UTC()}
		if got := c.period.Span(utc(c.at)); got != want || !got.Contains(utc(c.at)) || got.Contains(got.End) || !got.Contains(got.Start) {
			t.Errorf("%s of %s: %v, want %v", c.period, c.at, got, want)
		}
	}
	if s := Total.Span(nov); s != (Span{}) || !s.Contains(nov) {
		t.Errorf("total: %v", s)
	}
	// The days on which a place changes its clocks have 23 and 25 hours there,
	// and 24 here; spans follow one another without a gap.
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for range 800 {
		s := Day.Span(at.In(berlin))
		if !s.Start.Equal(at) || s.End.Sub(s.Start) != 24*time.Hour || s.Start.Location() != time.UTC {
			t.Fatalf("day of %s: %v", at, s)
		}
		at = s.End
	}
}

func TestForecast(t *testing.T) {
	b := testBudget(1000, Total, stop120)
	s := func(sec int, spent uint64) Sample {
		return Sample{nov.Add(time.Duration(sec) * time.Second), Count(spent)}
	}
	for what, c := range map[string]struct {
		b       Budget
		samples []Sample
		want    time.Duration
		ok      bool
	}{
		"nothing":       {b, nil, 0, false},
		"one":           {b, []Sample{s(0, 10)}, 0, false},
		"over":          {b, []Sample{s(0, 1000)}, 0, true},
		"idle":          {b, []Sample{s(0, 10), s(60, 10)}, 0, false},
		"same moment":   {b, []Sample{s(0, 10), s(0, 20)}, 0, false},
		"steady":        {b, []Sample{s(0, 0), s(60, 100), s(90, 100), s(120, 200)}, 480 * time.Second, true},
		"thirds":        {b, []Sample{s(0, 0), s(1, 997)}, 3_009_027, true},
		"after a fall":  {b, []Sample{s(0, 900), s(10, 0), s(20, 100)}, 90 * time.Second, true},
		"clock back":    {b, []Sample{s(1000, 0), s(10, 0), s(20, 100)}, 90 * time.Second, true},
		"slow":          {testBudget(1<<62, Total, stop120), []Sample{s(0, 0), s(1e6, 1)}, 0, false},
		"within a day":  {testBudget(1000, Day, stop120), []Sample{s(0, 0), s(3600, 100)}, 9 * time.Hour, true},
		"past the day":  {testBudget(1000, Day, stop120), []Sample{s(0, 0), s(3600, 40)}, 0, false},
		"large numbers": {Budget{Meter: MeterMemory, Limit: maxLimit, Period: Total}, []Sample{{nov, Quantity{}}, {nov.Add(time.Hour), Quantity{hi: 1 << 55}}}, time.Hour, true},
	} {
		if got, ok := c.b.Forecast(c.samples); got != c.want || ok != c.ok {
			t.Errorf("%s: %s, %v; want %s, %v", what, got, ok, c.want, c.ok)
		}
	}
}

func TestNextLook(t *testing.T) {
	day := testBudget(1000, Day, warn80, stop120)
	for what, c := range map[string]struct {
		b           Budget
		now         time.Time
		spent, most uint64
		want        time.Duration
	}{
		"idle":            {day, nov, 0, 0, MaxLook},
		"far":             {day, nov, 0, 1, MaxLook},
		"to the warning":  {day, nov, 700, 10, 10500 * time.Millisecond},
		"to the stop":     {day, nov, 900, 10, 30500 * time.Millisecond},
		"near":            {day, nov, 799, 1000, 501 * time.Millisecond},
		"behind all":      {day, nov, 1200, 1000, MaxLook},
		"end of the day":  {day, nov.Add(24*time.Hour - 2*time.Second), 1200, 1000, 2 * time.Second},
		"just before end": {day, nov.Add(24*time.Hour - 1), 1200, 1000, time.Millisecond},
	} {
		if got := c.b.NextLook(Mark{}, c.now, Count(c.spent), Count(c.most)); got != c.want {
			t.Errorf("%s: %s, want %s", what, got, c.want)
		}
	}
}

// TestOvershoot spends at any rate up to the bound and looks when NextLook
// says, up to half a second late: no threshold is overrun by more than a second
// at the bound, and there are few looks.
func TestOvershoot(t *testing.T) {
	r := random(t)
	longest := time.Duration(0)
	for range 300 {
		most := 1 + r.Uint64N(1e9)
		b := testBudget(1+r.Uint64N(1e12), Total, Threshold{1 + r.IntN(150), ActionStop})
		stop := b.at(b.At[0])
		var m Mark
		now, spent, began := nov, Quantity{}, nov
		for n := 0; ; n++ {
			d := b.Decide(m, now, spent)
			m = d.Mark
			if d.Do == ActionStop {
				break
			}
			if most := int(now.Sub(began)/lookSlack) + 1; n > most {
				t.Fatalf("%d looks in %s", n, now.Sub(began))
			}
			wait := b.NextLook(m, now, spent, Count(most))
			if wait > MaxLook || wait < lookSlack {
				t.Fatalf("a wait of %s", wait)
			}
			longest = max(longest, wait)
			late := time.Duration(r.IntN(int(time.Second - lookSlack)))
			spent = spend(r, spent, most, wait+late)
			now = now.Add(wait + late)
			if now.Sub(began) > 2*time.Hour {
				break // slow spending far from the limit
			}
		}
		if over := spent.Less(stop); over.Cmp(Count(most)) > 0 {
			t.Fatalf("overrun by %s at %d a second", over, most)
		}
	}
	if longest <= time.Second {
		t.Errorf("never waited longer than %s: the bound would hold without NextLook", longest)
	}
}

// spend adds what is used in a while: often all there can be.
func spend(r *rand.Rand, spent Quantity, most uint64, while time.Duration) Quantity {
	rate := most
	if r.IntN(3) == 0 {
		rate = r.Uint64N(most + 1)
	}
	w, _ := wide{Product(rate, uint64(while)).lo, Product(rate, uint64(while)).hi}.div(uint64(time.Second))
	sum, _ := spent.plus(w.quantity())
	return sum
}
