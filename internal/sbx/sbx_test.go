package sbx

import (
	"bufio"
	"encoding/json"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// pid1 answers on a socket of its own: line after line what it is given, then
// the last again. It returns what it was asked.
func pid1(t *testing.T, answers ...string) (address string, asked func() []entry) {
	t.Helper()
	address = "sbx-test-" + string(sandbox.NewID())
	l, err := net.Listen("unix", "@"+address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	var mu sync.Mutex
	var got []entry
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			line, _ := bufio.NewReader(c).ReadBytes('\n')
			var e entry
			mu.Lock()
			if json.Unmarshal(line, &e) == nil {
				got = append(got, e)
			}
			_, _ = c.Write([]byte(answers[min(len(got), len(answers))-1] + "\n"))
			mu.Unlock()
			_ = c.Close()
		}
	}()
	return address, func() []entry { mu.Lock(); defer mu.Unlock(); return got }
}

const (
	charged  = `{"charged":"0.00018","number":42}`
	away     = `{"error":{"class":"unavailable","code":"daemon_unreachable","detail":"later"}}`
	tooFast  = `{"error":{"class":"exhausted","code":"too_many_requests","detail":"slow"}}`
	refused  = `{"error":{"class":"forbidden","code":"entries_forbidden","detail":"no"}}`
	nonsense = `hello`
)

func TestRun(t *testing.T) {
	tokens := []string{"cost", "add", "--meter", "tokens", "--qty=1200", "--key", "k", "--note", "a b"}
	for name, c := range map[string]struct {
		args    []string
		answers []string
		code    int
		out     string
		asked   int
	}{
		"taken":          {tokens, []string{charged}, 0, "0.00018\n", 1},
		"refused":        {tokens, []string{refused}, exitRefused, "", 1},
		"tried again":    {tokens, []string{away, tooFast, charged}, 0, "0.00018\n", 3},
		"nobody":         {append(tokens, "--wait", "0.6"), []string{away}, exitNobody, "", 2},
		"nonsense":       {append(tokens, "--wait", "0"), []string{nonsense}, exitNobody, "", 1},
		"revenue":        {[]string{"revenue", "add", "-amount", "12.5"}, []string{charged}, 0, "0.00018\n", 1},
		"help":           {[]string{"--help"}, []string{charged}, 0, help, 0},
		"no verb":        {[]string{"cost"}, []string{charged}, exitUsage, "", 0},
		"unknown flag":   {[]string{"cost", "add", "--sandbox", "x"}, []string{charged}, exitUsage, "", 0},
		"no flag":        {[]string{"cost", "add", "amount", "1"}, []string{charged}, exitUsage, "", 0},
		"no value":       {[]string{"cost", "add", "--amount"}, []string{charged}, exitUsage, "", 0},
		"nothing":        {[]string{"cost", "add"}, []string{charged}, exitUsage, "", 0},
		"both":           {append(tokens, "--amount", "1"), []string{charged}, exitUsage, "", 0},
		"without number": {[]string{"cost", "add", "--meter", "tokens"}, []string{charged}, exitUsage, "", 0},
		"weird wait":     {append(tokens, "--wait", "long"), []string{charged}, exitUsage, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address, asked := pid1(t, c.answers...)
			var out, errs strings.Builder
			if code := run(c.args, &out, &errs, address); code != c.code || out.String() != c.out || (code == 0) != (errs.Len() == 0) {
				t.Errorf("exit %d, %q, %q", code, out.String(), errs.String())
			}
			all := asked()
			if len(all) != c.asked {
				t.Fatalf("asked %d times: %+v", len(all), all)
			}
			for _, e := range all {
				if e.Key == "" || e.Key != all[0].Key {
					t.Errorf("asked again under another key: %+v", all)
				}
			}
			if c.asked > 0 && c.args[0] == "cost" && all[0] != (entry{Op: "cost", Meter: "tokens", Quantity: "1200", Key: "k", Note: "a b"}) {
				t.Errorf("asked %+v", all[0])
			}
		})
	}
	var out, errs strings.Builder
	if code := run([]string{"revenue", "add", "--amount", "1", "--wait", "0"}, &out, &errs, "nobody-"+string(sandbox.NewID())); code != exitNobody || !strings.Contains(errs.String(), "--key sbx-") {
		t.Errorf("without PID 1: %d, %s", code, errs.String())
	}
}

// TestKeysAreNew: two entries without a key are two.
func TestKeysAreNew(t *testing.T) {
	a, _, err := parse([]string{"cost", "add", "--amount", "1"})
	b, _, err2 := parse([]string{"cost", "add", "--amount", "1"})
	if err != nil || err2 != nil || a.Key == b.Key || len(a.Key) < 20 {
		t.Errorf("%q, %q, %v, %v", a.Key, b.Key, err, err2)
	}
}
