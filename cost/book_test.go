package cost

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestBooksAsDocumented reads the example of docs/COST.md as strictly as the
// daemon reads its configuration.
func TestBooksAsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../docs/COST.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(doc), "```yaml\n")
	text, _, closed := strings.Cut(rest, "```")
	text, below := strings.CutPrefix(text, "cost:\n") // the rest of it is indented, and whole without
	if !ok || !closed || !below {
		t.Fatal("docs/COST.md has no example of books")
	}
	books, err := readBooks(text)
	if err != nil {
		t.Fatal(err)
	}
	s := shelf(t, books...)
	b, ok := s.At(nov)
	if !ok || b.Version != "2026-11" || s.Currency() != "EUR" || len(s.Books()) != 2 {
		t.Fatalf("read %+v", books)
	}
	want := testBook().Prices
	for m, p := range b.Prices {
		if p.Price != want[m].Price || p.per() != want[m].per() || p.Unit != want[m].Unit {
			t.Errorf("%s: %+v, want %+v", m, p, want[m])
		}
	}
	if len(b.Prices) < 6 {
		t.Errorf("only %d prices", len(b.Prices))
	}
}

func readBooks(text string) ([]Book, error) {
	var c struct {
		Books []Book `yaml:"books"`
	}
	err := yaml.NewDecoder(strings.NewReader(text), yaml.Strict(), yaml.DisallowUnknownField()).Decode(&c)
	return c.Books, err
}

// TestPricesAreReadAsWritten: a number in a file does not pass through a float.
func TestPricesAreReadAsWritten(t *testing.T) {
	for text, want := range map[string]string{
		"0.000011": "0.000011", `"0.000011"`: "0.000011", "'2'": "2", "0.10": "0.1", "0": "0", "9007199254.740993111": "9007199254.740993111",
		"1e3": "", "0x10": "", "1_000": "", ".5": "", "+1": "", "~": "", "true": "", "[1]": "", ".inf": "", "1 2": "", "0.0000000001": "",
	} {
		var p Price
		err := yaml.NewDecoder(strings.NewReader("price: "+text), yaml.Strict()).Decode(&p)
		if want == "" {
			if err == nil {
				t.Errorf("price %s was read as %s", text, p.Price)
			}
		} else if err != nil || p.Price.String() != want {
			t.Errorf("price %s was read as %s, %v", text, p.Price, err)
		}
		b, err := yaml.Marshal(p)
		if err != nil || want != "" && !bytes.Contains(b, []byte(want)) {
			t.Errorf("price %s is written as %s, %v", text, b, err)
		}
	}
}

// TestBookJSON: a book goes through JSON whole, and JSON is read as strictly.
func TestBookJSON(t *testing.T) {
	b := testBook()
	text, err := json.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	var back Book
	if err := json.Unmarshal(text, &back); err != nil || back.Fingerprint() != b.Fingerprint() {
		t.Errorf("%s reads as %+v, %v", text, back, err)
	}
	for _, bad := range []string{
		`{"unit":"start"}`, `{"price":1,"unit":"start"}`, `{"price":"1","per":1.5,"unit":"start"}`, `{"price":"1","unti":"start"}`,
		`{"price":"1","per":"1","unit":"start"}`, `{"price":null,"unit":"start"}`, `[]`,
	} {
		var p Price
		if err := json.Unmarshal([]byte(bad), &p); err == nil {
			t.Errorf("%s was read as %+v", bad, p)
		}
	}
}

func TestBookRefuses(t *testing.T) {
	if err := new(testBook()).Validate(); err != nil {
		t.Fatal(err)
	}
	many := map[Meter]Price{}
	for i := range 65 {
		many["m"+Meter(strings.Repeat("x", i))] = price("1", 1, "thing")
	}
	for what, change := range map[string]func(*Book){
		"no version":            func(b *Book) { b.Version = "" },
		"version":               func(b *Book) { b.Version = "New Prices" },
		"none":                  func(b *Book) { b.Version = NoBook },
		"no currency":           func(b *Book) { b.Currency = "" },
		"currency":              func(b *Book) { b.Currency = "euro" },
		"no beginning":          func(b *Book) { b.From = time.Time{} },
		"many":                  func(b *Book) { b.Prices = many },
		"negative":              func(b *Book) { b.Prices[MeterCPU] = price("-1", 1, "cpu-second") },
		"negative per":          func(b *Book) { b.Prices[MeterCPU] = price("1", -1, "cpu-second") },
		"large per":             func(b *Book) { b.Prices[MeterCPU] = price("1", maxPer+1, "cpu-second") },
		"no unit":               func(b *Book) { b.Prices[MeterCPU] = price("1", 1, "") },
		"unknown unit":          func(b *Book) { b.Prices[MeterCPU] = price("1", 1, "cpu") },
		"unit of another":       func(b *Book) { b.Prices[MeterCPU] = price("1", 1, "gib-second") },
		"wall time for cpu":     func(b *Book) { b.Prices[MeterCPU] = price("1", 1, "second") },
		"money":                 func(b *Book) { b.Prices[MeterMoney] = price("1", 1, "second") },
		"net":                   func(b *Book) { b.Prices[MeterNet] = price("1", 1, "gib") },
		"wall":                  func(b *Book) { b.Prices[MeterWall] = price("1", 1, "second") },
		"custom, known unit":    func(b *Book) { b.Prices["gpu"] = price("1", 1, "hour") },
		"custom, no unit":       func(b *Book) { b.Prices["gpu"] = price("1", 1, "") },
		"custom, name":          func(b *Book) { b.Prices["GPU"] = price("1", 1, "use") },
		"custom, empty":         func(b *Book) { b.Prices[""] = price("1", 1, "use") },
		"custom, leading digit": func(b *Book) { b.Prices["4g"] = price("1", 1, "use") },
	} {
		b := testBook()
		change(&b)
		if err := b.Validate(); !is(err, sandbox.ErrInvalid, "invalid_prices") {
			t.Errorf("%s: %v", what, err)
		} else if _, err := NewShelf([]Book{b}); err == nil {
			t.Errorf("%s: on the shelf", what)
		}
	}
	for what, text := range map[string]string{
		"unknown key":       "books: [{versoin: a}]",
		"unknown price key": "books: [{prices: {cpu: {prize: 1}}}]",
		"twice":             "books: [{prices: {cpu: {price: 1}, cpu: {price: 2}}}]",
		"rough per":         "books: [{prices: {cpu: {price: 1, per: 1.5}}}]",
		"large per":         "books: [{prices: {cpu: {price: 1, per: 99999999999999999999}}}]",
		"zero per":          "books: [{prices: {cpu: {price: 1, per: 0}}}]",
		"missing price":     "books: [{prices: {cpu: {unit: cpu-second}}}]",
		"unknown in price":  "books: [{prices: {cpu: {price: 1, unti: cpu-second}}}]",
		"price":             "books: [{prices: {cpu: {price: much}}}]",
	} {
		if b, err := readBooks(text); err == nil {
			t.Errorf("%s: read as %+v", what, b)
		}
	}
	// A date that is none must not become the beginning of time.
	books, err := readBooks("books: [{version: a, currency: EUR, from: 2026-02-30, prices: {}}]")
	if err == nil {
		_, err = NewShelf(books)
	}
	if err == nil {
		t.Error("a book from the 30th of February is on the shelf")
	}
}

func TestShelf(t *testing.T) {
	first, second, third := testBook(), testBook(), testBook()
	second.Version, second.From = "b", nov.AddDate(0, 1, 0)
	third.Version, third.From = "c", nov.AddDate(0, 2, 0)
	s := shelf(t, third, first, second)
	for _, c := range []struct {
		at   time.Time
		want string
	}{
		{nov.Add(-1), ""},
		{nov, "2026-11"},
		{second.From.Add(-1), "2026-11"},
		{second.From, "b"},
		{second.From.In(time.FixedZone("", 7200)), "b"},
		{third.From.AddDate(50, 0, 0), "c"},
	} {
		b, ok := s.At(c.at)
		if ok != (c.want != "") || ok && b.Version != c.want {
			t.Errorf("at %s: %+v", c.at, b)
		}
	}
	if _, ok := (Shelf{}).At(nov); ok {
		t.Error("a book on an empty shelf")
	}
	first.Prices[MeterCPU] = price("7", 1, "cpu-second") // not the shelf's copy
	if b, ok := s.Book("2026-11"); !ok || b.Prices[MeterCPU].Price != 11_000 {
		t.Errorf("the shelf's book changed: %+v", b)
	}
	if _, ok := s.Book("d"); ok {
		t.Error("found a book that is not there")
	}
	for what, change := range map[string]func(*Book){
		"version":  func(b *Book) { b.Version = "2026-11" },
		"time":     func(b *Book) { b.From = nov.In(time.FixedZone("", 3600)) },
		"currency": func(b *Book) { b.Currency = "USD" },
	} {
		b := second
		change(&b)
		if _, err := NewShelf([]Book{testBook(), b}); sandbox.CodeOf(err) != "invalid_prices" {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestFingerprint(t *testing.T) {
	b := testBook()
	base := b.Fingerprint()
	same := testBook()
	same.From = nov.In(time.FixedZone("", 3600))
	same.Prices[MeterCPU] = price("0.0000110", 1, "cpu-second")
	if same.Fingerprint() != base {
		t.Error("the same book, written otherwise, has another fingerprint")
	}
	for what, change := range map[string]func(*Book){
		"version":  func(b *Book) { b.Version = "x" },
		"currency": func(b *Book) { b.Currency = "USD" },
		"from":     func(b *Book) { b.From = nov.Add(time.Second) },
		"price":    func(b *Book) { b.Prices[MeterCPU] = price("0.000012", 1, "cpu-second") },
		"per":      func(b *Book) { b.Prices[MeterCPU] = price("0.000011", 2, "cpu-second") },
		"unit":     func(b *Book) { b.Prices[MeterCPU] = price("0.000011", 1, "cpu-hour") },
		"removed":  func(b *Book) { delete(b.Prices, MeterCPU) },
		"added":    func(b *Book) { b.Prices["gpu"] = price("1", 1, "use") },
	} {
		c := testBook()
		c.Prices = maps.Clone(c.Prices)
		change(&c)
		if c.Fingerprint() == base {
			t.Errorf("another %s, the same fingerprint", what)
		}
	}
	known := map[string]string{"2026-11": base, "gone": "x"}
	if err := shelf(t, testBook()).CheckUnchanged(known); err != nil {
		t.Error(err)
	}
	changed := testBook()
	changed.Prices[MeterCPU] = price("2", 1, "cpu-second")
	if err := shelf(t, changed).CheckUnchanged(known); !is(err, sandbox.ErrConflict, "prices_changed") {
		t.Errorf("changed prices: %v", err)
	}
}
