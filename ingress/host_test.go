package ingress

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestParseHost(t *testing.T) {
	id := string(sandbox.NewID())
	for host, want := range map[string]target{
		"8080-dev.box.test":         {8080, "dev"},
		"8080-DEV.Box.Test":         {8080, "dev"},
		"8080-dev.box.test.":        {8080, "dev"},
		"8080-dev.box.test:80":      {8080, "dev"},
		"8080-dev.box.test.:80":     {8080, "dev"},
		"8080-dev.box.test:":        {8080, "dev"},
		"1-" + id + ".box.test":     {1, id},
		"65535-my-own_dev.box.test": {65535, "my-own_dev"},
		"80-8080-dev.box.test":      {80, "8080-dev"},
		"":                          {},
		"box.test":                  {},
		".box.test":                 {},
		"dev.box.test":              {},
		"-dev.box.test":             {},
		"8080-.box.test":            {},
		"8080.box.test":             {},
		"0-dev.box.test":            {},
		"080-dev.box.test":          {},
		"+80-dev.box.test":          {},
		"65536-dev.box.test":        {},
		"8080-dev.other.test":       {},
		"8080-dev.box.test.other":   {},
		"8080-devbox.test":          {},
		"8080-dev.notbox.test":      {},
		"8080-a.b.box.test":         {},
		"8080-dev..box.test":        {},
		"8080-dev.box.test..":       {},
		"8080--dev.box.test":        {},
		"8080-d%65v.box.test":       {},
		"8080-dev.box.test@evil":    {},
		"8080-dev.box.test:x":       {},
		"8080-dev.box.test:80:90":   {},
		"8080-dev.box.test:0":       {},
		"8080-dev .box.test":        {},
		"8080-dev\x00.box.test":     {},
		"8080-dév.box.test":         {},
		"[::1]":                     {},
		"127.0.0.1:80":              {},
		strings.Repeat("8", 400):    {},
		"8080-" + strings.Repeat("a", 63) + ".box.test": {},
	} {
		got, ok := parseHost(host, "box.test")
		if got != want || ok != (want != target{}) {
			t.Errorf("%q: %+v %v, want %+v", host, got, ok, want)
		}
	}
	if _, ok := parseHost("8080-dev.", ""); ok {
		t.Error("a name without a domain leads somewhere")
	}
}

func FuzzParseHost(f *testing.F) {
	for _, s := range []string{"8080-dev.box.test", "8080-dev.box.test.:80", "[::1]:80", "", "-", "1-a.box.test:"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, host string) {
		got, ok := parseHost(host, "box.test")
		if !ok {
			return
		}
		if got.port < 1 || got.port > 65535 {
			t.Errorf("%q: port %d", host, got.port)
		}
		if _, err := sandbox.ParseID(got.ref); err != nil && sandbox.ValidateName(got.ref) != nil {
			t.Errorf("%q: ref %q", host, got.ref)
		}
		if again, ok := parseHost(strings.ToUpper(host), "box.test"); !ok || again != got {
			t.Errorf("%q: in capitals %+v", host, again)
		}
	})
}
