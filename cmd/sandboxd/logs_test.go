package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestJournal(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(requestHandler{newHandler(&out, slog.LevelDebug, false, true)}).With("world", "lab")
	log.Debug("a")
	log.Info("b")
	log.Warn("c", "err", errors.New("two\nlines"))
	log.WithGroup("g").Error("d", "x", 1)
	want := "<7>msg=a world=lab\n<6>msg=b world=lab\n<4>msg=c world=lab err=\"two\\nlines\"\n<3>msg=d world=lab g.x=1\n"
	if out.String() != want {
		t.Errorf("to the journal:\n%swant:\n%s", &out, want)
	}
	out.Reset()
	slog.New(newHandler(&out, slog.LevelInfo, true, true)).Warn("c", "n", 1)
	var line map[string]any
	if err := json.Unmarshal(bytes.TrimPrefix(out.Bytes(), []byte("<4>")), &line); err != nil || line["level"] != "WARN" || line["n"] != 1.0 || line["time"] != nil {
		t.Errorf("as JSON: %s, %v", &out, err)
	}
	out.Reset()
	slog.New(newHandler(&out, slog.LevelInfo, false, false)).Warn("c") // the control: elsewhere the time is of use
	if !strings.HasPrefix(out.String(), "time=") || !strings.Contains(out.String(), "level=WARN") {
		t.Errorf("to a terminal: %s", &out)
	}
}

func TestJournalIsWhatSystemdSays(t *testing.T) {
	t.Setenv("JOURNAL_STREAM", "1:2")
	if toJournal(os.Stderr) {
		t.Error("another stream was taken for the journal")
	}
}

// TestJournalLinesStayWhole: lines of many at once do not mix.
func TestJournalLinesStayWhole(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(newHandler(&out, slog.LevelInfo, false, true))
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() { log.Warn("one line", "with", strings.Repeat("x", 100)) })
	}
	all.Wait()
	want := "<4>msg=\"one line\" with=" + strings.Repeat("x", 100) + "\n"
	if got := out.String(); got != strings.Repeat(want, 50) {
		t.Errorf("lines:\n%s", got)
	}
}

// TestLogSteersNoTerminal: whatever a value is, in each form, it neither steers
// the terminal nor begins a line.
func TestLogSteersNoTerminal(t *testing.T) {
	bad := "a\x1b[2J\u009b31m\u202e\x7f\r\nforged"
	for _, asJSON := range []bool{false, true} {
		for _, journal := range []bool{false, true} {
			var out bytes.Buffer
			log := slog.New(newHandler(&out, slog.LevelInfo, asJSON, journal)).WithGroup(bad).With(bad, bad)
			log.Warn(bad, "err", errors.New(bad), "any", map[string]string{bad: bad}, "bytes", []byte(bad), "id", sandbox.ID(bad), "list", []string{bad})
			line := strings.TrimSuffix(out.String(), "\n")
			if sandbox.Plain(line) != line || !strings.Contains(line, "forged") {
				t.Errorf("JSON %t, journal %t: %q", asJSON, journal, line)
			}
		}
	}
}

// TestLogNamesTheRequest: a line that a request caused has its id, once.
func TestLogNamesTheRequest(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(requestHandler{newHandler(&out, slog.LevelInfo, false, false)})
	log.Info("of nobody")
	if strings.Contains(out.String(), "request=") {
		t.Errorf("a line of no request: %s", &out)
	}
	out.Reset()
	m := servertest.New()
	m.Fail = func(string) error { return errors.New("the disk is on fire") }
	h := server.New(server.Config{Manager: m, Log: log})
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/v1/sandboxes/x", nil)
	r.Header.Set("X-Request-Id", "mine-7")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	body, _ := io.ReadAll(w.Body)
	if line := out.String(); strings.Count(line, "request=mine-7") != 1 || !strings.Contains(line, "on fire") || !strings.Contains(string(body), "mine-7") {
		t.Errorf("log %q, answer %s", line, body)
	}
}
