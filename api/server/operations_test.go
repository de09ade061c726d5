package server_test

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

// asyncBuild asks for a build in the background.
func (d *daemon) asyncBuild(t *testing.T, dockerfile string) (*http.Response, api.Operation) {
	t.Helper()
	req, err := json.Marshal(sandbox.BuildRequest{Names: []string{"built"}, Dockerfile: dockerfile})
	if err != nil {
		t.Fatal(err)
	}
	body, kind := form(t, part{api.BuildRequestPart, string(req)})
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://d/v1/images/build", body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", kind)
	r.Header.Set("Prefer", "wait=10, respond-async")
	over := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", d.sock)
		},
	}}
	resp, err := over.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var o api.Operation
	if resp.StatusCode == http.StatusAccepted {
		if err := json.NewDecoder(resp.Body).Decode(&o); err != nil {
			t.Fatal(err)
		}
	}
	return resp, o
}

func only(t *testing.T, c *client.Client, status api.OperationStatus) api.Operation {
	t.Helper()
	all, err := c.Operations(t.Context(), status)
	if err != nil || len(all) != 1 {
		t.Fatalf("%s: %+v %v", status, all, err)
	}
	return all[0]
}

func TestPullInTheBackground(t *testing.T) {
	d := start(t)
	c := d.client(t)
	o, err := c.BeginPull(t.Context(), sandbox.PullRequest{Reference: "registry.test/app:1"})
	if err != nil || o.Kind != "pull-image" || o.Subject != "registry.test/app:1" || !strings.HasPrefix(o.ID, "op") {
		t.Fatalf("%+v %v", o, err)
	}
	if o, err = c.WaitOperation(t.Context(), o.ID); err != nil || o.Status != api.OperationSucceeded || o.EndedAt == nil {
		t.Fatalf("%+v %v", o, err)
	}
	var img sandbox.Image
	var last sandbox.ImageProgress
	if err := json.Unmarshal(o.Result, &img); err != nil || img.Name != "registry.test/app:1" {
		t.Errorf("%s %v", o.Result, err)
	}
	if err := json.Unmarshal(o.Progress, &last); err != nil || last.Status != sandbox.StepDone {
		t.Errorf("%s %v", o.Progress, err)
	}
	if _, err := c.Image(t.Context(), img.Name); err != nil {
		t.Error(err)
	}

	o, err = c.BeginPull(t.Context(), sandbox.PullRequest{Reference: "registry.other/app"})
	if err == nil {
		o, err = c.WaitOperation(t.Context(), o.ID)
	}
	if err != nil || o.Status != api.OperationFailed || o.Problem == nil || o.Problem.Code != "registry_unreachable" {
		t.Errorf("%+v %v", o, err)
	}
	// What is wrong with the request is told at once.
	if _, err := c.BeginPull(t.Context(), sandbox.PullRequest{Reference: " "}); err == nil {
		t.Error("begun")
	}
	if _, err := c.Operation(t.Context(), "opaaaaaaaaaaaa"); sandbox.CodeOf(err) != "operation_not_found" {
		t.Error(err)
	}
}

// TestWaitingPullIsListed sees a pull of somebody who waits for it, too.
func TestWaitingPullIsListed(t *testing.T) {
	d := start(t)
	c := d.client(t)
	if _, err := c.PullImage(t.Context(), sandbox.PullRequest{Reference: "registry.test/app:1"}, nil); err != nil {
		t.Fatal(err)
	}
	if o := only(t, c, api.OperationSucceeded); o.Kind != "pull-image" || o.Progress == nil {
		t.Errorf("%+v", o)
	}
}

func TestCancelABuild(t *testing.T) {
	d := start(t)
	c := d.client(t)
	resp, o := d.asyncBuild(t, "FROM base\nRUN wait")
	if resp.StatusCode != http.StatusAccepted || resp.Header.Get("Location") != "/v1/operations/"+o.ID || resp.Header.Get("Preference-Applied") != api.PreferAsync {
		t.Fatalf("%d %v %+v", resp.StatusCode, resp.Header, o)
	}
	if got := only(t, c, api.OperationRunning); got.ID != o.ID || got.Subject != "built" {
		t.Errorf("%+v", got)
	}
	if o, err := c.CancelOperation(t.Context(), o.ID); err != nil || o.Status != api.OperationCancelled {
		t.Errorf("%+v %v", o, err)
	}
	if again, err := c.CancelOperation(t.Context(), o.ID); err != nil || again.Status != api.OperationCancelled {
		t.Errorf("%+v %v", again, err)
	}
	if resp, _ := d.asyncBuild(t, "RUN nothing"); resp.StatusCode != http.StatusBadRequest {
		t.Errorf("a Dockerfile without FROM: %d", resp.StatusCode)
	}
	resp, o = d.asyncBuild(t, "FROM base")
	if o, err := c.WaitOperation(t.Context(), o.ID); resp.StatusCode != http.StatusAccepted || err != nil || o.Status != api.OperationSucceeded {
		t.Errorf("%+v %v", o, err)
	}
}

// TestOperationsAtOnce begins more than one may have under way.
func TestOperationsAtOnce(t *testing.T) {
	d := start(t)
	for i := range 33 {
		resp, _ := d.asyncBuild(t, "FROM base\nRUN wait")
		if want := i < 32; (resp.StatusCode == http.StatusAccepted) != want {
			t.Fatalf("%d: %d", i, resp.StatusCode)
		}
	}
	// The server's end is theirs: it waits for none of them.
	if err := d.stop(); err != nil {
		t.Error(err)
	}
}
