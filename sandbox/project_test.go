package sandbox

import (
	"strings"
	"testing"
)

func TestValidateProject(t *testing.T) {
	for _, good := range []string{"prj_a", "prj_7", "prj_my-lab_2", "prj_" + strings.Repeat("a", 59)} {
		if err := (Spec{Project: good}).Validate(); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for _, bad := range []string{"prj_", "a", "PRJ_a", "prj-a", "prj_A", "prj_a b", "prj_" + strings.Repeat("a", 60)} {
		if err := (Spec{Project: bad}).Validate(); CodeOf(err) != "invalid_project" {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if err := (Spec{}).Validate(); err != nil {
		t.Errorf("none: %v", err)
	}
}
