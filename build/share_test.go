package build

import (
	"context"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestOneOwnerLeavesRoomForOthersBuilds: whoever has as many builds as they
// may, none of which ends, has half of those that run and half of those that
// wait; another's is built meanwhile.
func TestOneOwnerLeavesRoomForOthersBuilds(t *testing.T) {
	b := newBuilder(t, newWorld())
	ctx, end := context.WithTimeout(t.Context(), time.Minute)
	defer end()
	running, ended, release := make(chan struct{}, 100), make(chan error, 100), make(chan struct{})
	build := func(owner string) error {
		_, err := b.Build(ctx, sandbox.BuildRequest{Names: []string{"made"}, Dockerfile: "FROM base\nRUN one", Actor: owner}, nil, func(sandbox.BuildEvent) error {
			if owner == "alice" {
				running <- struct{}{}
				<-release
			}
			return nil
		})
		return err
	}
	const most = 2 * (1 + waiting) / 2
	for range most + 3 {
		go func() { ended <- build("alice") }()
	}
	<-running
	for range 3 {
		if err := <-ended; sandbox.CodeOf(err) != "builds_exhausted" {
			t.Fatalf("alice's sixth build and beyond: %v", err)
		}
	}
	if err := build("bob"); err != nil {
		t.Errorf("bob's build while alice's stand still: %v", err)
	}
	if len(running) > 0 {
		t.Error("two of alice's builds run at the same time, of two that may")
	}
	close(release)
	for range most { // the control: alice's are built, one after the other
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	b.clean(t)
}
