package sandbox

import "testing"

func TestUnmarked(t *testing.T) {
	mark := OwnerMark("alice")
	for name, want := range map[string]string{
		"db" + mark: "db", "a.b" + mark: "a.b", "db": "db", "": "", mark: mark, "db.012345678": "db.012345678", "db.012345678g": "db.012345678g", "db-0123456789": "db-0123456789",
	} {
		if got := Unmarked(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	if len(mark) != MarkLength {
		t.Errorf("mark %s", mark)
	}
}
