package server_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestPullTellsOfProgress(t *testing.T) {
	c := start(t).client(t)
	var steps []sandbox.ImageProgress
	img, err := c.PullImage(t.Context(), sandbox.PullRequest{Reference: "registry.test/app:1"}, func(p sandbox.ImageProgress) { steps = append(steps, p) })
	if err != nil || img.Name != "registry.test/app:1" || img.Kind != sandbox.ImageOCI {
		t.Fatalf("%+v %v", img, err)
	}
	if len(steps) < 3 || steps[0].Status != sandbox.StepResolved || steps[len(steps)-1].Status != sandbox.StepDone {
		t.Errorf("%+v", steps)
	}
	if got, err := c.Image(t.Context(), img.Name); err != nil || got.Digest != img.Digest {
		t.Errorf("%+v %v", got, err)
	}
	// A refusal before the stream and one within it are the same to a caller.
	for ref, code := range map[string]string{"registry.other/app": "registry_unreachable", "A": "invalid_image_name"} {
		if _, err := c.PullImage(t.Context(), sandbox.PullRequest{Reference: ref}, nil); sandbox.CodeOf(err) != code {
			t.Errorf("%s: %v", ref, err)
		}
	}
}

// TestPullThatFails fails in every way within a stream: with a class, with an
// error that wraps the end of another stream, with none of ours, by a panic.
func TestPullThatFails(t *testing.T) {
	d := start(t)
	m := d.m
	for name, tc := range map[string]struct {
		err  error
		code string
	}{
		"a class":            {sandbox.Errorf(sandbox.ErrInvalid, "image_digest_mismatch", "no"), "image_digest_mismatch"},
		"the end of another": {sandbox.Errorf(sandbox.ErrUnavailable, "registry_unreachable", "it broke: %w", io.EOF), "registry_unreachable"},
		"none of ours":       {errors.New("secret path"), "internal"},
		"a panic":            {nil, "internal"},
	} {
		m.Fail = func(method string) error {
			if method == "PullImage" {
				if tc.err == nil {
					panic("at the disco")
				}
				return tc.err
			}
			return nil
		}
		_, err := d.client(t).PullImage(t.Context(), sandbox.PullRequest{Reference: "registry.test/app"}, nil)
		if sandbox.CodeOf(err) != tc.code || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "disco") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// slow is a manager whose pull lasts until its context ends.
type slow struct {
	*servertest.Memory
	begun, ended chan struct{}
}

func (s *slow) PullImage(ctx context.Context, _ sandbox.PullRequest, report func(sandbox.ImageProgress)) (sandbox.Image, error) {
	close(s.begun)
	defer close(s.ended)
	for ctx.Err() == nil {
		if report != nil {
			report(sandbox.ImageProgress{Status: sandbox.StepDownloading, Layer: "x", Current: 1, Total: 2})
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Millisecond):
		}
	}
	return sandbox.Image{}, ctx.Err()
}

// TestPullEndsWithItsClient goes away in the middle, with a stream and
// without.
func TestPullEndsWithItsClient(t *testing.T) {
	for _, accept := range []string{"text/event-stream", "application/json"} {
		m := &slow{servertest.New(), make(chan struct{}), make(chan struct{})}
		srv := httptest.NewServer(server.New(server.Config{Manager: m}))
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-m.begun; cancel() }()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, srv.URL+"/v1/images/pull", strings.NewReader(`{"reference":"registry.test/app"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", accept)
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body) // until it breaks off
			resp.Body.Close()
		}
		select {
		case <-m.ended:
		case <-time.After(20 * time.Second):
			t.Errorf("%s: the pull goes on without its client", accept)
		}
		srv.Close()
	}
}

func TestPullAsJSON(t *testing.T) {
	h := server.New(server.Config{Manager: servertest.New()})
	for body, want := range map[string]int{`{"reference":"registry.test/app"}`: 200, `{"reference":"registry.other/app"}`: 503} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/v1/images/pull", strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		h.ServeHTTP(w, r)
		var out map[string]any
		if err := json.Unmarshal(w.Body.Bytes(), &out); err != nil || w.Code != want || want == 200 && out["name"] != "registry.test/app:latest" {
			t.Errorf("%s: %d %s", body, w.Code, w.Body)
		}
	}
}

func TestImagesMove(t *testing.T) {
	c := start(t).client(t)
	if _, err := c.PullImage(t.Context(), sandbox.PullRequest{Reference: "registry.test/app:1", Name: "app"}, nil); err != nil {
		t.Fatal(err)
	}
	pushed := 0
	out, err := c.PushImage(t.Context(), sandbox.PushRequest{Source: "app", Reference: "registry.test/b"}, func(sandbox.ImageProgress) { pushed++ })
	if err != nil || out.Reference != "registry.test/b" || pushed == 0 {
		t.Errorf("%+v %v", out, err)
	}
	body, err := c.ExportImage(t.Context(), sandbox.ExportRequest{Source: "app", Format: sandbox.FormatDocker})
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(body)
	if err = errors.Join(err, body.Close()); err != nil || string(b) != out.Digest {
		t.Errorf("%q %v", b, err)
	}
	if img, err := c.TagImage(t.Context(), "app", "registry.test/c:2"); err != nil || img.Name != "registry.test/c:2" {
		t.Errorf("%+v %v", img, err)
	}
	if _, err := c.ImportImage(t.Context(), "tree", strings.NewReader("x")); err != nil {
		t.Error(err)
	}
	gone, err := c.PruneImages(t.Context(), sandbox.PruneRequest{})
	slices.Sort(gone.Images)
	if err != nil || !slices.Equal(gone.Images, []string{"app", "registry.test/c:2"}) || gone.FreedBytes == 0 {
		t.Errorf("%+v %v", gone, err)
	}
	if gone, err = c.PruneImages(t.Context(), sandbox.PruneRequest{All: true}); err != nil || !slices.Equal(gone.Images, []string{"tree"}) {
		t.Errorf("%+v %v", gone, err)
	}
}
