package lab

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The events of the lab.
const (
	eventCreated      = "project.created"
	eventChanged      = "project.changed"
	eventKilled       = "project.killed"
	eventEvaluated    = "project.evaluated"
	eventAlert        = "project.alert"
	eventPromoting    = "project.promotion_started"
	eventWatching     = "project.promotion_watching"
	eventPromoted     = "project.promoted"
	eventRollingBack  = "project.rolling_back"
	eventRolledBack   = "project.rolled_back"
	eventStarted      = "experiment.started"
	eventCompleted    = "experiment.completed"
	eventExpired      = "experiment.expired"
	eventDeployed     = "agent.deployed"
	eventAgentActive  = "agent.active"
	eventAgentPending = "agent.restarting"
	eventAgentPaused  = "agent.paused"
	eventAgentFailed  = "agent.failed"
	eventAgentStopped = "agent.stopped"
	eventUnhealthy    = "agent.unhealthy"
)

// message is the body a webhook gets.
type message struct {
	Type    string            `json:"type"`
	At      time.Time         `json:"at"`
	Project project.ID        `json:"project"`
	Name    string            `json:"name"`
	Actor   string            `json:"actor,omitempty"`
	Data    map[string]string `json:"data,omitempty"`
}

// newsOf is an event about a project, and the notices its webhooks want.
func newsOf(p project.Project, kind, actor string, data map[string]string) project.News {
	now := time.Now().UTC()
	all := maps.Clone(data)
	if all == nil {
		all = map[string]string{}
	}
	all["project"] = string(p.ID)
	n := project.News{Event: sandbox.Event{Time: now, Type: kind, Actor: actor, Data: all}}
	body, err := json.Marshal(message{Type: kind, At: now, Project: p.ID, Name: p.Name, Actor: actor, Data: data})
	if err != nil {
		return n // of strings and a time: cannot be
	}
	for _, w := range p.Webhooks {
		if w.Wants(kind) {
			n.Notices = append(n.Notices, project.Notice{Project: p.ID, URL: w.URL, Secret: w.Secret, Type: kind, Body: string(body), At: now, Next: now})
		}
	}
	return n
}

// Headers of a notice. The signature is "sha256=" and the HMAC-SHA256, in
// hexadecimal, of the timestamp, a point and the body, under the webhook's
// secret.
const (
	HeaderDelivery  = "X-Sandbox-Delivery"
	HeaderEvent     = "X-Sandbox-Event"
	HeaderTimestamp = "X-Sandbox-Timestamp"
	HeaderSignature = "X-Sandbox-Signature"
)

const (
	noticeTimeout = 10 * time.Second
	noticesAtOnce = 4
	mailNap       = time.Minute
)

func webhookClient() *http.Client {
	return &http.Client{
		Timeout:       noticeTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Sign returns the signature of a body sent at a time, in seconds since 1970.
func Sign(secret string, at int64, body []byte) string {
	h := hmac.New(sha256.New, []byte(secret))
	h.Write(strconv.AppendInt(nil, at, 10))
	h.Write([]byte{'.'})
	h.Write(body)
	return "sha256=" + hex.EncodeToString(h.Sum(nil))
}

// deliver sends notices until the lab ends.
func (l *Lab) deliver() {
	for l.life.Err() == nil {
		wait := l.deliverDue(l.life)
		t := time.NewTimer(wait)
		select {
		case <-l.life.Done():
		case <-l.mail:
		case <-t.C:
		}
		t.Stop()
	}
}

// deliverDue sends what is due and returns how long there is until the next.
func (l *Lab) deliverDue(ctx context.Context) time.Duration {
	all, err := l.store.Notices(ctx, 100)
	if err != nil {
		if ctx.Err() == nil {
			l.log.Error("read the notices", "err", err)
		}
		return mailNap
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, noticesAtOnce)
	now := time.Now()
	wait := mailNap
	for _, n := range all {
		if d := n.Next.Sub(now); d > 0 {
			wait = min(wait, d)
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			l.deliverOne(ctx, n)
		})
		wait = 0
	}
	wg.Wait()
	return max(wait, time.Millisecond)
}

// deliverOne tries a notice once. It is forgotten once it worked, or was
// given up.
func (l *Lab) deliverOne(ctx context.Context, n project.Notice) {
	failed := l.send(ctx, n)
	if ctx.Err() != nil {
		return // tried again by the next daemon
	}
	over := failed == nil
	if failed != nil {
		n, over = n.Failed(time.Now().UTC())
		l.log.Info("deliver a notice", "project", n.Project, "type", n.Type, "attempt", n.Attempts, "given_up", over, "err", failed)
	}
	var err error
	if over {
		err = l.store.DeleteNotice(ctx, n.ID)
	} else {
		err = l.store.PutNotice(ctx, n)
	}
	if err != nil && ctx.Err() == nil {
		l.log.Error("keep the notices", "err", err)
	}
}

// send is one attempt.
func (l *Lab) send(ctx context.Context, n project.Notice) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, n.URL, bytes.NewReader([]byte(n.Body)))
	if err != nil {
		return err
	}
	at := time.Now().Unix()
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(HeaderDelivery, strconv.FormatInt(n.ID, 10))
	req.Header.Set(HeaderEvent, n.Type)
	req.Header.Set(HeaderTimestamp, strconv.FormatInt(at, 10))
	if n.Secret != "" {
		req.Header.Set(HeaderSignature, Sign(n.Secret, at, []byte(n.Body)))
	}
	resp, err := l.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return fmt.Errorf("the webhook answered %s", resp.Status)
	}
	return nil
}
