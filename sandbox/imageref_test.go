package sandbox

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
)

func TestParseImageRef(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0f", 32)
	for in, want := range map[string]string{
		"alpine":                              "docker.io/library/alpine:latest",
		"alpine:3":                            "docker.io/library/alpine:3",
		"team/app":                            "docker.io/team/app:latest",
		"docker.io/alpine":                    "docker.io/library/alpine:latest",
		"index.docker.io/library/alpine":      "docker.io/library/alpine:latest",
		"registry-1.docker.io/team/app:V1_x":  "docker.io/team/app:V1_x",
		"localhost/app":                       "localhost/app:latest",
		"localhost:5000/app":                  "localhost:5000/app:latest",
		"127.0.0.1:5000/a/b/c:1":              "127.0.0.1:5000/a/b/c:1",
		"registry.example/app@" + digest:      "registry.example/app@" + digest,
		"registry.example/app:1@" + digest:    "registry.example/app@" + digest,
		"app@" + digest:                       "docker.io/library/app@" + digest,
		"ghcr.example:443/a__b/c-d.e:1.2.3-4": "ghcr.example:443/a__b/c-d.e:1.2.3-4",
	} {
		r, err := ParseImageRef(in)
		if err != nil || r.String() != want {
			t.Errorf("%s: %s %v, want %s", in, r, err, want)
		}
		again, err := ParseImageRef(r.String())
		if err != nil || again != r {
			t.Errorf("%s is read back as %+v, %v", r, again, err)
		}
	}
	for _, in := range []string{
		"", "A", "a//b", "/a", "a/", "a:", "a:b:c", ":1", "a@", "a@sha256:12", "a@" + strings.ToUpper(digest), "a@md5:" + digest, "../a", "a b", "a\n",
		"https://x.example/a", "x.example:port/a", "x.example:/a", "-x.example/a", "x..example/a", "x.example:123456/a", "a:-1", "a:" + strings.Repeat("t", 129),
		strings.Repeat("a", 64), strings.Repeat("a/", 300) + "a", "x.example/", "x.example//a", "é",
	} {
		if r, err := ParseImageRef(in); err == nil || CodeOf(err) != "invalid_image_name" {
			t.Errorf("%q: %+v %v", in, r, err)
		}
	}
}

func TestNamesRegistry(t *testing.T) {
	for in, want := range map[string]bool{"alpine": false, "a/b": false, "a.b/c": true, "a:1": false, "a:1/b": true, "localhost/a": true, "host": false, "a.b": false} {
		if got := NamesRegistry(in); got != want {
			t.Errorf("%s: %v", in, got)
		}
	}
}

func FuzzImageRef(f *testing.F) {
	for _, s := range []string{"alpine", "a.b:5/c/d:e", "a@sha256:" + strings.Repeat("0", 64), "localhost/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseImageRef(s)
		if err != nil {
			return
		}
		again, err := ParseImageRef(r.String())
		if len(r.String()) <= maxImageName && (err != nil || again != r) {
			t.Errorf("%q is %q, read back as %+v, %v", s, r, again, err)
		}
		if strings.Contains(r.String(), "..") && strings.Contains(r.String(), "/../") {
			t.Errorf("%q leads elsewhere", r)
		}
	})
}

func TestImageArgv(t *testing.T) {
	both := ImageConfig{Entrypoint: []string{"e"}, Cmd: []string{"c", "d"}}
	for _, tc := range []struct {
		c    ImageConfig
		args []string
		want []string
	}{
		{both, nil, []string{"e", "c", "d"}},
		{both, []string{"x"}, []string{"e", "x"}},
		{ImageConfig{Cmd: []string{"c"}}, nil, []string{"c"}},
		{ImageConfig{Cmd: []string{"c"}}, []string{"x", "y"}, []string{"x", "y"}},
		{ImageConfig{Entrypoint: []string{"e"}}, nil, []string{"e"}},
	} {
		if got, err := tc.c.Argv(tc.args); err != nil || !slices.Equal(got, tc.want) {
			t.Errorf("%+v with %q: %q %v", tc.c, tc.args, got, err)
		}
	}
	if _, err := (ImageConfig{}).Argv(nil); CodeOf(err) != "no_command" {
		t.Errorf("nothing to run: %v", err)
	}
}

// TestRegistryAuthIsNotShown prints and logs credentials in every way there
// is.
func TestRegistryAuthIsNotShown(t *testing.T) {
	a := RegistryAuth{Username: "me", Password: "hush1", IdentityToken: "hush2", RegistryToken: "hush3"}
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "auth", a, "pointer", &a, "request", PullRequest{Auth: &a}.Reference)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "auth", a, "pointer", &a, "request", fmt.Sprintf("%+v", PushRequest{Auth: &a}))
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		for _, v := range []any{a, &a, PullRequest{Auth: &a}, struct{ A RegistryAuth }{a}} {
			fmt.Fprintf(&log, verb, v)
		}
	}
	if strings.Contains(log.String(), "hush") || !strings.Contains(log.String(), "me") {
		t.Error(log.String())
	}
}
