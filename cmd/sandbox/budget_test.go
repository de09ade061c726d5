package main

import (
	"strings"
	"testing"
)

func TestBudget(t *testing.T) {
	w := newWorld(t)
	w.ok("create", "--name", "dev")
	key := strings.TrimSpace(w.ok("budget", "set", "dev", "--cpu", "90m"))
	if !strings.HasPrefix(key, "bg") {
		t.Fatalf("budget set: %q", key)
	}
	w.ok("budget", "set", "--owner", "uid:1", "--meter", "model.tokens", "--limit", "1000", "--per", "day", "--at", "50=warn,90%=pause", "--at", "100=stop")
	if out := w.ok("budget", "ls"); !strings.Contains(out, key) || !strings.Contains(out, "5400 cpu-second") || !strings.Contains(out, "owner uid:1") {
		t.Errorf("budget ls: %s", out)
	}
	if out := w.ok("budget", "show", key); !strings.Contains(out, "100% stop") || !strings.Contains(out, "exhausted in 3h0m0s") {
		t.Errorf("budget show: %s", out)
	}
	w.ok("budget", "rm", key)
	if out := w.ok("budget", "ls"); strings.Contains(out, key) {
		t.Errorf("budget rm: %s", out)
	}
	for name, args := range map[string][]string{
		"one meter":          {"budget", "set", "dev", "--cpu", "1h", "--money", "5"},
		"say what":           {"budget", "set", "dev"},
		"write it as":        {"budget", "set", "dev", "--cpu", "1h", "--at", "much=stop"},
		"(invalid_budget)":   {"budget", "set", "dev", "--cpu", "1h", "--at", "80=sing"},
		"(invalid_scope)":    {"budget", "set", "--cpu", "1h"},
		"(budget_not_found)": {"budget", "show", "bgnone"},
	} {
		if code, _, errs := w.run("", args...); code != 125 || !strings.Contains(errs, name) {
			t.Errorf("%v: exit %d, %s; want %s", args, code, errs, name)
		}
	}
}
