package sandbox

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

func TestEveryStatusPair(t *testing.T) {
	// The picture of docs/DESIGN.md §4, written out once more by hand.
	want := map[string]bool{
		"pending→creating": true, "pending→completing": true, "pending→failed": true,
		"creating→running": true, "creating→stopped": true, "creating→completing": true, "creating→failed": true,
		"running→paused": true, "running→stopped": true, "running→completing": true, "running→failed": true,
		"paused→running": true, "paused→stopped": true, "paused→completing": true, "paused→failed": true,
		"stopped→creating": true, "stopped→completing": true, "stopped→failed": true,
		"completing→completed": true, "completing→failed": true,
	}
	for _, from := range Statuses() {
		for _, to := range Statuses() {
			pair := fmt.Sprintf("%s→%s", from, to)
			if got := from.CanMove(to); got != want[pair] {
				t.Errorf("%s: CanMove = %v, want %v", pair, got, want[pair])
			}
			if from.Terminal() && from.CanMove(to) {
				t.Errorf("%s: a terminal status has a way out", pair)
			}
		}
	}
	if Status("gone").Valid() || Status("gone").CanMove(StatusRunning) {
		t.Error("an unknown status is valid")
	}
}

func TestNewIDIsValidAndFitsALinkName(t *testing.T) {
	seen := map[ID]bool{}
	for range 1000 {
		id := NewID()
		if _, err := ParseID(string(id)); err != nil {
			t.Fatal(err)
		}
		if len("v"+id) > 15 {
			t.Fatalf("%q does not fit a link name", id)
		}
		if seen[id] {
			t.Fatalf("%q came twice", id)
		}
		seen[id] = true
	}
}

func TestErrorClassCodeAndCause(t *testing.T) {
	err := Errorf(ErrNotFound, "image_not_found", "no image %q: %w", "x", io.ErrUnexpectedEOF)
	wrapped := fmt.Errorf("create: %w", err)
	for _, target := range []error{ErrNotFound, io.ErrUnexpectedEOF} {
		if !errors.Is(wrapped, target) {
			t.Errorf("errors.Is(%v, %v) = false", wrapped, target)
		}
	}
	if errors.Is(wrapped, ErrConflict) {
		t.Error("the error is of a class it was not given")
	}
	if CodeOf(wrapped) != "image_not_found" || !errors.Is(ClassOf(wrapped), ErrNotFound) {
		t.Errorf("code %q class %v", CodeOf(wrapped), ClassOf(wrapped))
	}
	if CodeOf(io.EOF) != "internal" || ClassOf(io.EOF) != nil {
		t.Error("a foreign error has a code or class")
	}
}

func TestSpecValidate(t *testing.T) {
	many := map[string]string{}
	for i := range 2000 {
		many[fmt.Sprint("K", i)] = "v"
	}
	for name, c := range map[string]struct {
		spec Spec
		code string // "" is fine
	}{
		"empty":                {Spec{}, ""},
		"all set":              {Spec{Name: "a-b.c_1", Image: "host", Hostname: "h", User: "1000:1000", WorkDir: "/w", Limits: Limits{CPUs: 0.5, MemoryBytes: 64 << 20, PIDs: 10, OpenFiles: 512, DiskBytes: 1 << 20, DiskInodes: 64, CPUWeight: 10000}}, ""},
		"name like an id":      {Spec{Name: "sbabcdefghij22"}, "invalid_name"},
		"name with capitals":   {Spec{Name: "Abc"}, "invalid_name"},
		"name too long":        {Spec{Name: strings.Repeat("a", 64)}, "invalid_name"},
		"image with dots":      {Spec{Image: "../x"}, "invalid_image_name"},
		"image ends in colon":  {Spec{Image: "x:"}, "invalid_image_name"},
		"hostname dash":        {Spec{Hostname: "-h"}, "invalid_hostname"},
		"env name empty":       {Spec{Env: map[string]string{"": "x"}}, "invalid_env"},
		"env name equals":      {Spec{Env: map[string]string{"a=b": "x"}}, "invalid_env"},
		"env zero byte":        {Spec{Env: map[string]string{"a": "x\x00"}}, "invalid_env"},
		"env too many":         {Spec{Env: many}, "invalid_env"},
		"env too big":          {Spec{Env: map[string]string{"a": strings.Repeat("x", 300<<10)}}, "invalid_env"},
		"workdir relative":     {Spec{WorkDir: "w"}, "invalid_workdir"},
		"user with slash":      {Spec{User: "a/b"}, "invalid_user"},
		"unknown capabilities": {Spec{Capabilities: "all"}, "invalid_capabilities"},
		"unknown network":      {Spec{Network: NetworkPolicy{Mode: "host"}}, "invalid_network"},
		"negative ttl":         {Spec{TTLSeconds: -1}, "invalid_timeout"},
		"endless idle":         {Spec{IdleTimeoutSeconds: 1 << 40}, "invalid_timeout"},
		"label key":            {Spec{Labels: map[string]string{"a=b": ""}}, "invalid_labels"},
		"negative memory":      {Spec{Limits: Limits{MemoryBytes: -1}}, "invalid_limits"},
		"tiny memory":          {Spec{Limits: Limits{MemoryBytes: 1}}, "invalid_limits"},
		"tiny cpu":             {Spec{Limits: Limits{CPUs: 0.001}}, "invalid_limits"},
		"few open files":       {Spec{Limits: Limits{OpenFiles: 100}}, "invalid_limits"},
		"huge open files":      {Spec{Limits: Limits{OpenFiles: 1 << 63}}, "invalid_limits"},
	} {
		err := c.spec.Validate()
		if c.code == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if !errors.Is(err, ErrInvalid) || CodeOf(err) != c.code {
			t.Errorf("%s: %v (code %s), want code %s", name, err, CodeOf(err), c.code)
		}
	}
}

func TestProcessSpecValidate(t *testing.T) {
	for name, c := range map[string]struct {
		spec ProcessSpec
		code string
	}{
		"fine":           {ProcessSpec{Argv: []string{"ls", "/"}}, ""},
		"no argv":        {ProcessSpec{}, "invalid_argv"},
		"empty command":  {ProcessSpec{Argv: []string{""}}, "invalid_argv"},
		"zero byte":      {ProcessSpec{Argv: []string{"a\x00"}}, "invalid_argv"},
		"too large":      {ProcessSpec{Argv: []string{"a", strings.Repeat("x", 1<<20)}}, "invalid_argv"},
		"bad timeout":    {ProcessSpec{Argv: []string{"a"}, TimeoutSeconds: -1}, "invalid_timeout"},
		"bad output":     {ProcessSpec{Argv: []string{"a"}, OutputBytes: 1 << 40}, "invalid_output"},
		"bad user":       {ProcessSpec{Argv: []string{"a"}, User: "a:b:c"}, "invalid_user"},
		"relative cwd":   {ProcessSpec{Argv: []string{"a"}, WorkDir: "x"}, "invalid_workdir"},
		"bad env":        {ProcessSpec{Argv: []string{"a"}, Env: map[string]string{"=": ""}}, "invalid_env"},
		"tag of a novel": {ProcessSpec{Argv: []string{"a"}, Tag: strings.Repeat("x", 64)}, "invalid_tag"},
	} {
		if err := c.spec.Validate(); (c.code == "") != (err == nil) || err != nil && CodeOf(err) != c.code {
			t.Errorf("%s: %v, want code %q", name, err, c.code)
		}
	}
}

func FuzzIDsAndNames(f *testing.F) {
	for _, s := range []string{"sbabcdefghij22", "sb", "", "host", "a/b:c", "sb\x00", "SBABCDEFGHIJ22", strings.Repeat("a", 300)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseID(s)
		if err == nil {
			if string(id) != s || len(s) != 14 || strings.ContainsAny(s, "/.\x00-") {
				t.Fatalf("ParseID accepted %q as %q", s, id)
			}
			if !IsIDPrefix(s[:5]) {
				t.Fatalf("%q is no prefix of an id", s[:5])
			}
			if ValidateName(s) == nil {
				t.Fatalf("name %q could shadow a sandbox", s)
			}
		}
		if ValidateName(s) == nil && (strings.ContainsAny(s, "/\x00 ") || s == "." || s == "..") {
			t.Fatalf("ValidateName accepted %q", s)
		}
		if ValidateImageName(s) == nil {
			for part := range strings.SplitSeq(s, "/") {
				if part == "" || part == "." || part == ".." {
					t.Fatalf("ValidateImageName accepted %q", s)
				}
			}
		}
	})
}
