package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestParseConfig(t *testing.T) {
	c, err := parseConfig("test", []byte(`
state_dir: /srv/s
cgroup: best-effort
max_sandboxes: 10
network:
  pool: 10.9.0.0/24
  resolvers: [192.0.2.1]
default_limits:
  memory: 1g
  disk: 512m
default_ttl: 2h
bind_roots: [/srv/data, /srv/sandboxd]
cost:
  books:
    - version: "2026-11"
      currency: EUR
      from: 2026-11-01T00:00:00Z
      prices:
        cpu: {price: 0.000011, unit: cpu-second}
        model.tokens: {price: "0.15", per: 1000000, unit: token}
`))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.check(); err != nil {
		t.Fatal(err)
	}
	if c.StateDir != "/srv/s" || c.RunDir != "/run/sandboxd" || c.Defaults.Memory != 1<<30 || c.Defaults.Disk != 512<<20 ||
		c.Network.Pool.String() != "10.9.0.0/24" || len(c.Network.Resolvers) != 1 || time.Duration(c.TTL) != 2*time.Hour || c.Slots != 10 || len(c.BindRoots) != 2 {
		t.Errorf("parsed %+v", c)
	}
	if b := c.Cost.Books; len(b) != 1 || b[0].Prices["cpu"].Price != 11_000 || b[0].Prices["model.tokens"].Per != 1_000_000 {
		t.Errorf("parsed %+v", b)
	}
}

func TestConfigRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"unknown key":        "sate_dir: /x",
		"unknown nested key": "network: {poool: 10.0.0.0/16}",
		"book at noon":       "cost: {books: [{version: a, currency: EUR, from: 2026-11-01T12:00:00Z, prices: {cpu: {price: 1, unit: cpu-second}}}]}",
		"price as a word":    "cost: {books: [{version: a, currency: EUR, from: 2026-11-01T00:00:00Z, prices: {cpu: {price: much, unit: cpu-second}}}]}",
		"unit of another":    "cost: {books: [{version: a, currency: EUR, from: 2026-11-01T00:00:00Z, prices: {cpu: {price: 1, unit: gib}}}]}",
		"not yaml":           "{",
		"relative dir":       "state_dir: x",
		"unknown cgroup":     "cgroup: maybe",
		"host bits":          "network: {pool: 10.0.0.1/16}",
		"v6 pool":            "network: {pool: 'fd00::/64'}",
		"bad size":           "default_limits: {memory: lots}",
		"tiny memory":        "default_limits: {memory: 1k}",
		"bad duration":       "default_ttl: soon",
		"negative duration":  "default_ttl: -1h",
		"no slots":           "max_sandboxes: 0",
		"too many slots":     "max_sandboxes: 60000",
		"crooked uid base":   "uid_base: 100000",
		"no room for PID 1":  "uid_base: 65536",
		"bad image":          "default_image: ../x",
		"bad log format":     "log_format: xml",
		"bind everything":    "bind_roots: [/]",
		"relative bind root": "bind_roots: [srv]",
		"crooked bind root":  "bind_roots: [/srv/../etc]",
		"bind state dir":     "bind_roots: [/var/lib/sandboxd]",
		"bind volumes":       "bind_roots: [/srv, /var/lib/sandboxd/volume]",
		"bind above state":   "bind_roots: [/var/lib]",
		"bind proc":          "bind_roots: [/proc/1]",
		"twice":              "state_dir: /a\nstate_dir: /b",
	} {
		c, err := parseConfig("test", []byte(text))
		if err == nil {
			err = c.check()
		}
		if err == nil {
			t.Errorf("%s: accepted", name)
		} else if strings.TrimSpace(err.Error()) == "" {
			t.Errorf("%s: error without words", name)
		}
	}
	if c := builtinConfig(); c.check() != nil {
		t.Errorf("the built-in values are refused: %v", c.check())
	}
}

func FuzzConfig(f *testing.F) {
	for _, s := range []string{"", "state_dir: /x", "network: {pool: 10.0.0.0/16}", "default_limits: {memory: 1g, cpus: .5}", "a: &a [*a]", "default_ttl: 1h\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := parseConfig("fuzz", b)
		if err == nil {
			_ = c.check() // must not panic; most inputs are refused
		}
	})
}

// TestConfigIsBounded: a file that goes on is not read to the end of the memory.
func TestConfigIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	for size, good := range map[int]bool{maxConfig: true, maxConfig + 1: false} {
		if err := os.WriteFile(path, []byte("#"+strings.Repeat(" ", size-1)), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := loadConfig(path, true); (err == nil) != good {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}
