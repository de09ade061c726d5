package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// file writes a file and returns its name.
func file(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "f.yaml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// has fails the test unless text has every part.
func has(t *testing.T, what, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%s lacks %q:\n%s", what, p, text)
		}
	}
}

func TestProject(t *testing.T) {
	w := newWorld(t)
	id := strings.TrimSpace(w.ok("project", "create", "shop", "--goal", "does it sell?", "--min-profit", "1.5", "--min-age", "-1s", "--criterion", "lean=cost < 5 * unit",
		"--webhook", "http://hook.example", "--webhook-secret", "s3cret"))
	if _, err := project.ParseID(id); err != nil {
		t.Fatal(err)
	}
	var v project.View
	if err := json.Unmarshal([]byte(w.ok("project", "show", "shop", "-o", "json")), &v); err != nil {
		t.Fatal(err)
	}
	if k := v.Criteria; k.MinProfit != 1_500_000_000 || k.MinAge != -1 || len(k.Custom) != 1 || k.Custom[0].When != "cost < 5 * unit" || v.Webhooks[0].Secret != "" {
		t.Errorf("made %+v", v)
	}
	w.ok("project", "set", "shop", "--min-active", "2", "--criterion", "")
	has(t, "ls", w.ok("project", "ls"), id, "shop", "active")

	agent := file(t, "command: [sh, -c, 'exec bot']\nenv: {LEVEL: info}\nrestart: {when: on-failure}\nhealth: {command: [check], interval_ms: 500}\nconfig: {pair: EUR, depth: 3}\n")
	a := strings.TrimSpace(w.ok("project", "deploy", "shop", "--type", "trader", "--config", agent))
	if !strings.HasPrefix(a, "sandbox_"+id+"_trader_") {
		t.Errorf("the agent is %s", a)
	}
	for name, text := range map[string]string{"unknown key": "command: [x]\ncomand: [y]\n", "no command": "env: {A: b}\n", "reserved": "command: [x]\nconfig: {sandbox_mode: false}\n", "not yaml": "{"} {
		if code, _, errs := w.run("", "project", "deploy", "shop", "--type", "x", "--config", file(t, text)); code != exitTrouble {
			t.Errorf("%s: %d %s", name, code, errs)
		}
	}
	has(t, "pause", w.ok("project", "agent", "pause", a), "paused")
	has(t, "resume", w.ok("project", "agent", "resume", a), "active")

	w.ok("project", "enter", "shop", "cost", "1", "--agent", a, "--key", "k1")
	w.ok("project", "enter", "shop", "revenue", "4.5", "--agent", a, "--key", "k2")
	has(t, "show", w.ok("project", "show", "shop"), "profit 3.5", "ROI 350.00%", a)
	has(t, "summary", w.ok("project", "summary"), "350.00%")

	e := strings.TrimSpace(w.ok("project", "experiment", "start", "shop", "it sells", "--set", "n=3", "--set", "who=me", "--time-limit", "1h"))
	w.ok("project", "experiment", "complete", "shop", e, "--success", "--result", "sold=17")
	has(t, "experiments", w.ok("project", "experiment", "ls", "shop"), e, "completed", "true")
	has(t, "templates", w.ok("project", "experiment", "templates"), "smoke", "10m0s")

	has(t, "eval", w.ok("project", "eval", "shop"), "CONSIDER", project.CriterionActive)
	w.ok("project", "set", "shop", "--min-active", "1")
	has(t, "eval", w.ok("project", "eval", "shop"), "STRONGLY_RECOMMEND")
	has(t, "history", w.ok("project", "eval", "shop", "--history"), "STRONGLY_RECOMMEND", "CONSIDER")

	w.ok("project", "create", "market")
	has(t, "compare", w.ok("project", "compare", "shop", "market"), "shop", "market", "status       active", "350.00%", "1 of 1 succeeded")
	if code, _, errs := w.run("", "project", "promote", "market", "--yes"); code != exitTrouble || !strings.Contains(errs, "NOT_READY") {
		t.Errorf("promoting what is not ready: %d %s", code, errs)
	}
	if code, _, errs := w.run("", "project", "promote", "shop"); code != exitTrouble || !strings.Contains(errs, "--yes") {
		t.Errorf("promoting unasked: %d %s", code, errs)
	}
	has(t, "promote", w.ok("project", "promote", "shop", "--yes"), "done", "trader_")
	has(t, "agents of production", w.ok("project", "agent", "ls"), "trader_", "pending")

	if code, _, errs := w.run("", "project", "kill", "shop"); code != exitTrouble || !strings.Contains(errs, "--yes") {
		t.Errorf("killing unasked: %d %s", code, errs)
	}
	if code, _, errs := w.run("", "project", "rm", "shop", "--yes"); code != exitTrouble || !strings.Contains(errs, "project_not_killed") {
		t.Errorf("forgetting a living project: %d %s", code, errs)
	}
	w.ok("project", "kill", "shop", "--yes", "--delete-workspace")
	has(t, "ls of the killed", w.ok("project", "ls", "--status", "killed"), id)
	w.ok("project", "rm", "shop", "--yes")
	if out := w.ok("project", "ls", "-a", "-q"); strings.Contains(out, id) {
		t.Errorf("it is still there:\n%s", out)
	}
}

func TestWorlds(t *testing.T) {
	w := newWorld(t)
	if _, err := w.far.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "promoted", Image: "host"}}); err != nil {
		t.Fatal(err)
	}
	has(t, "ls", w.ok("ls", "--world", "production"), "promoted")
	if out := w.ok("ls"); strings.Contains(out, "promoted") {
		t.Errorf("the lab lists it:\n%s", out)
	}
	has(t, "stats", w.ok("stats", "--world", "production"), "promoted")
	if code, _, errs := w.run("", "ls", "--world", "moon"); code != exitTrouble || !strings.Contains(errs, "lab or production") {
		t.Errorf("another world: %d %s", code, errs)
	}
}
