package state

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestWebhooksOfVersion8: what projects' webhooks were still to be told begins
// the cursor of those that take their place.
func TestWebhooksOfVersion8(t *testing.T) {
	script, err := os.ReadFile("testdata/v0008.sql")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state.db")
	db := bare(t, path)
	// Of three events the last two came when or after the notice was written.
	for _, q := range []string{
		string(script),
		`UPDATE projects SET record = json_set(record, '$.webhooks', json('[{"url":"http://x","secret":"s","events":["project.created"]},{"url":"http://y"}]'))`,
		`DELETE FROM events`,
		`INSERT INTO events (seq, time, sandbox, type, actor, data) VALUES (11, 1789999990000000000, '', 'a', '', 'null'), (12, 1790000000500000000, '', 'project.created', '', 'null'), (13, 1790000001000000000, '', 'c', '', 'null')`,
	} {
		if _, err := db.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	_ = db.Close()
	all, err := openAt(t, path).Webhooks(t.Context())
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	if all[0].URL != "http://x" {
		all[0], all[1] = all[1], all[0]
	}
	x, y := all[0], all[1]
	if x.URL != "http://x" || x.Secret != "s" || x.Filter.Events[0] != "project.created" || x.Project != "prj_aaaaaaaaaaaa" || x.Cursor != 11 || len(x.ID) != 14 || x.CreatedAt.IsZero() {
		t.Errorf("%+v", x)
	}
	if y.URL != "http://y" || y.Secret != "" || y.Filter.Events != nil || y.Cursor != 11 || y.ID == x.ID {
		t.Errorf("%+v", y)
	}
}

func TestWebhooksFixture(t *testing.T) {
	script, err := os.ReadFile("testdata/v0009.sql")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state.db")
	db := bare(t, path)
	if _, err := db.Exec(string(script)); err != nil {
		t.Fatal(err)
	}
	_ = db.Close()
	d := openAt(t, path)
	all, err := d.Webhooks(t.Context())
	if err != nil || len(all) != 1 || all[0].Owner != "uid:1000" || all[0].Secret != "a secret" || all[0].Cursor != 2 || all[0].Dead != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	if dead, err := d.DeadLetters(t.Context(), all[0].ID, 10); err != nil || len(dead) != 1 || dead[0].Event.Seq != 2 || dead[0].Attempts != 10 {
		t.Errorf("%+v, %v", dead, err)
	}
	if err := d.DeleteWebhook(t.Context(), all[0].ID, "uid:0"); err != nil {
		t.Fatal(err)
	}
	if dead, err := d.DeadLetters(t.Context(), all[0].ID, 10); err != nil || len(dead) != 0 {
		t.Errorf("of none: %+v, %v", dead, err)
	}
}

func TestWebhookRows(t *testing.T) {
	d := open(t)
	hook := func(owner string) (sandbox.Webhook, error) {
		return d.CreateWebhook(t.Context(), sandbox.Webhook{ID: sandbox.NewWebhookID(), Owner: owner, URL: "http://x", Secret: "wh-secret-wh", CreatedAt: time.Now()}, owner)
	}
	w, err := hook("ann")
	if err != nil {
		t.Fatal(err)
	}
	if err := d.AdvanceWebhooks(t.Context(), map[string]int64{w.ID: 9, "whgone": 4}); err != nil {
		t.Fatal(err)
	}
	if err := d.AdvanceWebhooks(t.Context(), map[string]int64{w.ID: 5}); err != nil { // never back
		t.Fatal(err)
	}
	all, err := d.Webhooks(t.Context())
	if err != nil || len(all) != 1 || all[0].Cursor != 9 || all[0].Secret != "wh-secret-wh" {
		t.Errorf("%+v, %v", all, err)
	}
	for range maxWebhooksOfOwner - 1 {
		if _, err := hook("ann"); err != nil {
			t.Fatal(err)
		}
	}
	_, err = hook("ann")
	want(t, err, sandbox.ErrExhausted, "too_many_webhooks")
	if _, err := hook("bob"); err != nil {
		t.Errorf("of another owner: %v", err)
	}
	for seq := range int64(keptDeadLetters + 5) {
		if err := d.PutDeadLetter(t.Context(), sandbox.DeadLetter{Webhook: w.ID, Event: sandbox.Event{Seq: seq + 1}}); err != nil {
			t.Fatal(err)
		}
	}
	dead, err := d.DeadLetters(t.Context(), w.ID, 2000)
	if err != nil || len(dead) != keptDeadLetters || dead[0].Event.Seq != 6 {
		t.Errorf("%d dead letters, the first %+v, %v", len(dead), dead[0], err)
	}
	want(t, d.DeleteWebhook(t.Context(), "whnone", ""), sandbox.ErrNotFound, "webhook_not_found")
}

// TestPrunedEvents: what is deleted is known by its highest number.
func TestPrunedEvents(t *testing.T) {
	d := open(t)
	for range 10 {
		if _, err := d.AppendEvent(t.Context(), sandbox.Event{Type: "x"}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(keep int, want int64) {
		t.Helper()
		if err := d.Prune(t.Context(), 0, keep); err != nil {
			t.Fatal(err)
		}
		if got, err := d.PrunedEvents(t.Context()); err != nil || got != want {
			t.Errorf("keeping %d: pruned up to %d, %v; want %d", keep, got, err, want)
		}
	}
	check(100, 0)
	check(4, 6)
	check(4, 6)
	check(0, 10)
	if last, err := d.LastEventSeq(t.Context()); err != nil || last != 10 {
		t.Errorf("last %d, %v", last, err)
	}
}
