package image

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/image/imagetest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestHostileRegistries pulls from registries that lie, break and dawdle:
// each has its code, and nothing of what it sent stays, but for the parts of
// layers that broke off and can be continued.
func TestHostileRegistries(t *testing.T) {
	for _, h := range imagetest.Hostiles() {
		t.Run(h.Name, func(t *testing.T) {
			t.Parallel()
			g := imagetest.Start(t)
			s, v := library(t, func(c *Config) {
				if h.Slow {
					c.Stall = 300 * time.Millisecond
				}
			})
			ref := g.Host() + "/" + h.Set(g)
			img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: ref}, nil)
			if h.Code == "" {
				if err != nil || len(v.layers) != 2 || img.Digest == "" {
					t.Errorf("%+v %v", img, err)
				}
				return
			}
			if err == nil || sandbox.CodeOf(err) != h.Code || sandbox.ClassOf(err) == nil {
				t.Errorf("got %s: %v; want %s", sandbox.CodeOf(err), err, h.Code)
			}
			if n := len(left(t, s, manifestsDir)) + len(left(t, s, configsDir)); n != 0 {
				t.Errorf("%d manifests and configurations are kept of it", n)
			}
			if parts := left(t, s, partialDir); h.Code != "registry_unreachable" && h.Code != "image_not_found" && h.Code != "registry_refused" && len(parts) > 1 {
				t.Errorf("parts are left: %v", parts)
			}
		})
	}
}

func TestResumesByRange(t *testing.T) {
	for _, h := range imagetest.Hostiles() {
		if h.Name != "breaks off twice, then goes on by Range" {
			continue
		}
		g := imagetest.Start(t)
		s, _ := library(t, nil)
		if _, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/" + h.Set(g)}, nil); err != nil {
			t.Fatal(err)
		}
		if got := g.Seen("bytes="); len(got) != 2 {
			t.Errorf("%d requests with a range, want 2: %v", len(got), got)
		}
		return
	}
	t.Fatal("no such row in the table")
}
