package main

import (
	"os"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// TestPackagedConfig reads the configuration file that is installed, with
// every setting put in force: it must be valid and say the built-in values.
func TestPackagedConfig(t *testing.T) {
	b, err := os.ReadFile("../../packaging/config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if c, err := parseConfig("as installed", b); err != nil || !cmp.Equal(c, builtinConfig(), compareConfig) {
		t.Errorf("as installed: %+v, %v; want the built-in values", c, err)
	}
	setting := regexp.MustCompile(`(?m)^( *)#([a-z0-9_]+:)`)
	b = setting.ReplaceAll(b, []byte("$1$2"))
	c, err := parseConfig("all in force", b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(builtinConfig(), c, compareConfig); diff != "" {
		t.Errorf("packaging/config.yaml differs from the built-in values (-built in, +file):\n%s", diff)
	}
	if n := len(setting.FindAll(b, -1)); n != 0 {
		t.Errorf("%d settings were not put in force", n)
	}
}

var compareConfig = cmp.Options{
	cmp.AllowUnexported(config{}),
	cmpopts.EquateComparable(builtinConfig().Network.Pool, builtinConfig().Network.PublishAddress),
	cmpopts.EquateEmpty(),
}
