package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestVolumeCommands(t *testing.T) {
	w := newWorld(t)
	if out := w.ok("volume", "create", "cache", "--size", "1g", "--inodes", "1000", "-l", "team=infra"); out != "cache\n" {
		t.Errorf("create: %q", out)
	}
	v, err := w.m.Volume(t.Context(), "cache")
	if err != nil || v.SizeBytes != 1<<30 || v.Inodes != 1000 || v.Labels["team"] != "infra" {
		t.Errorf("%+v, %v", v, err)
	}
	w.ok("volume", "create", "other")
	if out := w.ok("volume", "ls"); !strings.Contains(out, "cache") || !strings.Contains(out, "1GiB") || !strings.Contains(out, "other") {
		t.Errorf("ls: %s", out)
	}
	if out := w.ok("volume", "ls", "-q"); out != "cache\nother\n" {
		t.Errorf("ls -q: %q", out)
	}
	if out := w.ok("volume", "inspect", "cache"); !strings.Contains(out, "size_bytes: 1073741824") {
		t.Errorf("inspect: %s", out)
	}
	if out := w.ok("volume", "ls", "-q", "-l", "team=infra"); out != "cache\n" {
		t.Errorf("ls of a label: %q", out)
	}
	w.ok("volume", "set", "cache", "--size", "2g")
	if v, err := w.m.Volume(t.Context(), "cache"); err != nil || v.SizeBytes != 2<<30 || v.Inodes != 1000 {
		t.Errorf("after set: %+v, %v", v, err)
	}
	id := strings.TrimSpace(w.ok("create", "-v", "cache:/root/.cache", "-v", "other:/o:ro"))
	sb, err := w.m.Sandbox(t.Context(), id)
	want := []sandbox.VolumeMount{{Volume: "cache", Path: "/root/.cache"}, {Volume: "other", Path: "/o", ReadOnly: true}}
	if err != nil || !slices.Equal(sb.Spec.Volumes, want) {
		t.Errorf("mounts %+v, %v", sb.Spec.Volumes, err)
	}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"in use":           {[]string{"volume", "rm", "cache"}, "volume_in_use"},
		"not there":        {[]string{"volume", "rm", "nope"}, "volume_not_found"},
		"nothing to set":   {[]string{"volume", "set", "cache"}, "usage"},
		"tiny":             {[]string{"volume", "create", "x", "--size", "1"}, "invalid_limits"},
		"bad name":         {[]string{"volume", "create", "X"}, "invalid_name"},
		"no volume":        {[]string{"create", "-v", "nope:/x"}, "volume_not_found"},
		"no path":          {[]string{"create", "-v", "cache"}, "usage"},
		"strange mode":     {[]string{"create", "-v", "cache:/x:z"}, "usage"},
		"too many parts":   {[]string{"create", "-v", "cache:/x:ro:rw"}, "usage"},
		"no source":        {[]string{"create", "-v", ":/x"}, "usage"},
		"relative path":    {[]string{"create", "-v", "cache:x"}, "invalid_volumes"},
		"one place, twice": {[]string{"create", "-v", "cache:/x", "-v", "other:/x"}, "invalid_volumes"},
		"fork with both":   {[]string{"fork", "x", "-v", "cache:/x", "--no-volumes"}, "usage"},
		"host path":        {[]string{"run", "--rm", "-v", "/srv:/x", "--", "true"}, "bind_denied"},
	} {
		if code, _, errs := w.run("", tc.args...); code != exitTrouble || !strings.Contains(errs, tc.want) {
			t.Errorf("%s: exit %d, %s; want %s", name, code, errs, tc.want)
		}
	}
	w.ok("rm", id)
	w.ok("volume", "rm", "cache", "other")
	if out := w.ok("volume", "ls", "-q"); out != "" {
		t.Errorf("left: %q", out)
	}
}

func TestParseMounts(t *testing.T) {
	for arg, want := range map[string]sandbox.VolumeMount{
		"a:/x":         {Volume: "a", Path: "/x"},
		"a:/x:rw":      {Volume: "a", Path: "/x"},
		"a:/x:ro":      {Volume: "a", Path: "/x", ReadOnly: true},
		"/srv:/x":      {HostPath: "/srv", Path: "/x", ReadOnly: true}, // unless asked for
		"/srv:/x:ro":   {HostPath: "/srv", Path: "/x", ReadOnly: true},
		"/srv/a:/x:rw": {HostPath: "/srv/a", Path: "/x", Writable: true},
	} {
		if got, err := parseMounts([]string{arg}); err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("%s: %+v, %v", arg, got, err)
		}
	}
}

func TestCompleteVolumes(t *testing.T) {
	w := newWorld(t)
	w.ok("volume", "create", "cache")
	if out := w.ok(cobra.ShellCompNoDescRequestCmd, "volume", "rm", ""); !strings.HasPrefix(out, "cache\n") {
		t.Errorf("volume rm: %q", out)
	}
	if out := w.ok(cobra.ShellCompNoDescRequestCmd, "run", "-v", ""); !strings.HasPrefix(out, "cache:/\n") {
		t.Errorf("run -v: %q", out)
	}
}
