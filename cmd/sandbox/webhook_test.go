package main

import (
	"strings"
	"testing"
)

func TestWebhookCommands(t *testing.T) {
	w := newWorld(t)
	out := w.ok("webhook", "create", "https://example.com/hook", "--events", "sandbox.*,process.exited", "--label", "team=a", "--owner", "uid:1000")
	id, rest, _ := strings.Cut(out, "\n")
	if len(id) != 14 || !strings.HasPrefix(rest, "secret: whsec_") {
		t.Fatalf("created %q", out)
	}
	if out := w.ok("webhook", "ls"); !strings.Contains(out, id) || !strings.Contains(out, "sandbox.*,process.exited") || strings.Contains(out, "whsec") {
		t.Errorf("listed %s", out)
	}
	if out := w.ok("webhook", "ls", "-o", "json"); !strings.Contains(out, `"team": "a"`) || strings.Contains(out, "whsec") {
		t.Errorf("listed %s", out)
	}
	if code, out, _ := w.run("", "webhook", "test", id); code != exitTrouble || !strings.Contains(out, "nobody there") {
		t.Errorf("test: %d %s", code, out)
	}
	if out := w.ok("webhook", "dead", "ls", id); !strings.Contains(out, "sandbox.created") {
		t.Errorf("dead: %s", out)
	}
	if out := w.ok("webhook", "dead", "retry", id, "7"); !strings.Contains(out, "200") {
		t.Errorf("retried: %s", out)
	}
	for _, args := range [][]string{
		{"create", "ftp://x.example"},
		{"create", "https://user:pass@x.example"},
		{"create", "https://x.example", "--label", "nothing"},
		{"create", "https://x.example", "--events", "bad pattern"},
		{"test", "whnonenonenon"},
		{"dead", "retry", id, "seven"},
		{"rm", "whnonenonenone"},
	} {
		if code, _, errs := w.run("", append([]string{"webhook"}, args...)...); code != exitTrouble || errs == "" {
			t.Errorf("%v: %d %q", args, code, errs)
		}
	}
	w.ok("webhook", "rm", id)
	if out := w.ok("webhook", "ls", "-o", "json"); strings.Contains(out, id) {
		t.Errorf("after rm: %s", out)
	}
}
