package webhook

import (
	"context"
	"errors"
	"strings"
	"sync"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	tailKept   = 2000 // events in memory, so that many webhooks read the log once
	tailBatch  = 500
	peopleKept = 4096 // sandboxes whose owner and labels are remembered
)

// tail is the end of the log of events, and whose the sandboxes in it are.
type tail struct {
	store Store

	mu     sync.Mutex
	begin  int64           // the events kept are all there are after this; guarded by mu
	end    int64           // guarded by mu
	events []sandbox.Event // guarded by mu
	people map[sandbox.ID]person
}

type person struct {
	owner  string
	labels map[string]string
}

// grow reads what is new, and reports whether an event of a project is among
// it. The first time it begins at the end of the log.
func (t *tail) grow(ctx context.Context) (ofProject bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.end == 0 {
		last, err := t.store.LastEventSeq(ctx)
		t.begin, t.end = last, last
		return true, err
	}
	for {
		news, err := t.store.Events(ctx, t.end, "", tailBatch)
		if err != nil {
			return ofProject, err
		}
		for _, e := range news {
			ofProject = ofProject || strings.HasPrefix(e.Type, "project.")
		}
		if len(news) > 0 {
			t.events = append(t.events, news...)
			t.end = news[len(news)-1].Seq
		}
		if over := len(t.events) - tailKept; over > 0 {
			t.begin = t.events[over-1].Seq
			t.events = append([]sandbox.Event(nil), t.events[over:]...)
		}
		if len(news) < tailBatch {
			return ofProject, nil
		}
	}
}

// after returns some events after a number, oldest first.
func (t *tail) after(ctx context.Context, seq int64) ([]sandbox.Event, error) {
	t.mu.Lock()
	if seq >= t.begin && seq < t.end {
		i := len(t.events)
		for i > 0 && t.events[i-1].Seq > seq {
			i--
		}
		found := t.events[i:min(len(t.events), i+tailBatch)]
		t.mu.Unlock()
		return found, nil
	}
	t.mu.Unlock()
	return t.store.Events(ctx, seq, "", tailBatch)
}

// missed returns the highest number of an event after seq that is gone, or
// less than seq. What is in memory is not gone.
func (t *tail) missed(ctx context.Context, seq int64) (int64, error) {
	t.mu.Lock()
	known := t.end > 0 && seq >= t.begin
	t.mu.Unlock()
	if known {
		return 0, nil
	}
	return t.store.PrunedEvents(ctx)
}

// who returns the owner and the labels of a sandbox; nobody's where its record
// is gone.
func (t *tail) who(ctx context.Context, id sandbox.ID) (string, map[string]string, error) {
	t.mu.Lock()
	p, ok := t.people[id]
	t.mu.Unlock()
	if ok {
		return p.owner, p.labels, nil
	}
	sb, err := t.store.Sandbox(ctx, id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return "", nil, nil
	}
	if err != nil {
		return "", nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.people == nil || len(t.people) >= peopleKept {
		t.people = map[sandbox.ID]person{}
	}
	t.people[id] = person{owner: sb.Owner, labels: sb.Spec.Labels}
	return sb.Owner, sb.Spec.Labels, nil
}
