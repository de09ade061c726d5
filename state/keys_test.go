package state

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestKeysAndOwnersLast(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(1_790_000_000, 5).UTC()
	later := at.Add(time.Hour)
	owner := access.Owner{Name: "alice", Role: access.RoleDeveloper, Quota: access.DeveloperQuota(), CreatedAt: at}
	k := access.Key{ID: "key_a", Owner: "alice", Role: access.RoleViewer, Name: "laptop", Begins: "e2b_01", CreatedAt: at, ExpiresAt: &later, Hash: [32]byte{1, 2}, Secret: "never written"}
	if err := d.InsertKey(t.Context(), k, owner); err != nil {
		t.Fatal(err)
	}
	changed := owner
	changed.Name, changed.Disabled, changed.Quota.Idle = "bob", true, 7*time.Second
	if err := d.PutOwner(t.Context(), changed); err != nil {
		t.Fatal(err)
	}
	other := owner
	other.Quota.Sandboxes = 99
	second := k
	second.ID, second.Hash, second.ExpiresAt = "key_b", [32]byte{3}, nil
	if err := d.InsertKey(t.Context(), second, other); err != nil { // an owner that is there stays as it is
		t.Fatal(err)
	}
	if err := d.UseKeys(t.Context(), map[string]time.Time{"key_a": at, "key_b": later}); err != nil {
		t.Fatal(err)
	}
	if err := d.RevokeKey(t.Context(), "key_b", later); err != nil {
		t.Fatal(err)
	}
	want(t, d.RevokeKey(t.Context(), "key_c", later), sandbox.ErrNotFound, "key_not_found")
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = openAt(t, path)
	k.Secret, k.UsedAt = "", &at
	second.Secret, second.UsedAt, second.RevokedAt = "", &later, &later
	keys, err := d.Keys(t.Context())
	if diff := cmp.Diff([]access.Key{k, second}, keys); err != nil || diff != "" {
		t.Errorf("keys: %v %s", err, diff)
	}
	owners, err := d.Owners(t.Context())
	if diff := cmp.Diff([]access.Owner{owner, changed}, owners); err != nil || diff != "" {
		t.Errorf("owners: %v %s", err, diff)
	}
	if err := d.DropOwner(t.Context(), "alice", at); err != nil {
		t.Fatal(err)
	}
	if err := d.DropKeys(t.Context(), []string{"key_b", "key_none"}); err != nil {
		t.Fatal(err)
	}
	keys, err = d.Keys(t.Context())
	if err != nil || len(keys) != 1 || keys[0].RevokedAt == nil || !keys[0].RevokedAt.Equal(at) {
		t.Errorf("keys of an owner that is gone: %+v, %v", keys, err)
	}
}

// TestOwnerSeen knows an owner by each kind of thing alone.
func TestOwnerSeen(t *testing.T) {
	d, at := open(t), time.Unix(1_790_000_000, 0).UTC()
	p := params("")
	p.Sandbox.Owner = "uid:1"
	_, _, err := d.CreateSandbox(t.Context(), p)
	for owner, err := range map[string]error{
		"uid:1": err,
		"uid:2": d.AddVolume(t.Context(), sandbox.Volume{Name: "v", Owner: "uid:2", CreatedAt: at}),
		"uid:3": func() error {
			_, err := d.PutSecret(t.Context(), sandbox.Secret{Name: "s", Owner: "uid:3"}, "x")
			return err
		}(),
		"uid:4": d.AppendAudit(t.Context(), []access.AuditRow{{Owner: "uid:4", Time: at}}, true),
		"bob":   d.InsertKey(t.Context(), access.Key{ID: "key_b", Owner: "bob", CreatedAt: at}, access.Owner{Name: "bob"}),
	} {
		if seen, serr := d.OwnerSeen(t.Context(), owner); err != nil || serr != nil || !seen {
			t.Errorf("%s: seen %v, %v, %v", owner, seen, serr, err)
		}
	}
	if seen, err := d.OwnerSeen(t.Context(), "uid:5"); err != nil || seen {
		t.Errorf("nobody: seen %v, %v", seen, err)
	}
}

func TestSecretsOfKeysAreNotInTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openAt(t, path)
	o, err := access.Open(t.Context(), access.Config{Store: d})
	if err != nil {
		t.Fatal(err)
	}
	k, err := o.CreateKey(t.Context(), access.KeyRequest{Owner: "alice"})
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []string{"", "-wal"} {
		b, err := os.ReadFile(path + end)
		if err != nil {
			t.Fatal(err)
		}
		if bytesContain(b, k.Secret[12:]) {
			t.Errorf("the secret of a key is in the database%s", end)
		}
		if end == "-wal" && !bytesContain(b, k.Begins) { // the control
			t.Error("this test does not see what is written")
		}
	}
}

func bytesContain(b []byte, s string) bool {
	for i := 0; i+len(s) <= len(b); i++ {
		if string(b[i:i+len(s)]) == s {
			return true
		}
	}
	return false
}

// TestKeysOfVersion10: keys and owners as version 10 wrote them.
func TestKeysOfVersion10(t *testing.T) {
	script, err := os.ReadFile("testdata/v0010.sql")
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
	owners, err := d.Owners(t.Context())
	if err != nil || len(owners) != 1 || owners[0].Quota != access.DeveloperQuota() {
		t.Errorf("owners %+v, %v", owners, err)
	}
	keys, err := d.Keys(t.Context())
	if err != nil || len(keys) != 1 || keys[0].Hash[31] != 31 || keys[0].Name != "laptop" || keys[0].UsedAt == nil {
		t.Errorf("keys %+v, %v", keys, err)
	}
}
