package webhook

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Store keeps webhooks, events, and how far the ones are with the others.
// Writing twice is safe with all of them.
type Store interface {
	// CreateWebhook sets the cursor to the last event there is.
	CreateWebhook(ctx context.Context, w sandbox.Webhook, actor string) (sandbox.Webhook, error)
	// Webhooks has the secrets.
	Webhooks(ctx context.Context) ([]sandbox.Webhook, error)
	DeleteWebhook(ctx context.Context, id, actor string) error
	AdvanceWebhooks(ctx context.Context, cursors map[string]int64) error
	PutDeadLetter(ctx context.Context, l sandbox.DeadLetter) error
	DeadLetters(ctx context.Context, webhook string, limit int) ([]sandbox.DeadLetter, error)
	DeleteDeadLetter(ctx context.Context, webhook string, seq int64) error

	// Events returns those after a number, oldest first, of all sandboxes
	// for an empty id.
	Events(ctx context.Context, after int64, id sandbox.ID, limit int) ([]sandbox.Event, error)
	// LastEventSeq returns the number of the newest.
	LastEventSeq(ctx context.Context) (int64, error)
	// PrunedEvents returns the highest number of an event that is gone.
	PrunedEvents(ctx context.Context) (int64, error)
	// Sandbox also finds those that have ended.
	Sandbox(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	// Subscribe returns a channel that gets a value after new events.
	Subscribe() (<-chan struct{}, func())
}

// Config is what a Desk is made of.
type Config struct {
	Store Store
	Log   *slog.Logger
	// AllowPrivate are ranges beside the public ones that may be called.
	AllowPrivate []netip.Prefix
	// Standing tells what an owner of webhooks may see now: everybody's events,
	// their own, or, where not ok, none. Nil: what the filters say.
	Standing func(owner string) (seesAll, ok bool)
	// GiveUp is how old an event may become whose receiver does not answer;
	// 0: a day.
	GiveUp time.Duration
	// Refusals is how often an event is tried that the receiver refuses with
	// a status of 400 to 499; 0: ten times.
	Refusals int
	// Pause is the first wait after a failure; 0: a second.
	Pause time.Duration
}

const (
	attemptTimeout = 10 * time.Second
	longestPause   = 5 * time.Minute
	leastTries     = 3   // before age alone makes an event be given up
	atOnce         = 4   // attempts of one webhook
	window         = 256 // events of one webhook under way
	saveEvery      = time.Second
	idleSave       = 10 * time.Second // where only unwanted events went by
	retryAtMost    = 100              // dead letters in one request
)

// Desk runs the webhooks. It is safe for concurrent use.
type Desk struct {
	cfg  Config
	log  *slog.Logger
	http *http.Client
	tail tail

	life   context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	delivered, failed, died atomic.Int64

	// Of read alone: news were not all read, and lines are not those of the rows.
	unread, stale bool

	refreshing sync.Mutex // held while the lines are made those of the rows

	mu      sync.Mutex
	lines   map[string]*line    // by id; guarded by mu
	reading bool                // guarded by mu: somebody waits for news
	unsaved map[string]struct{} // webhooks whose cursor moved by a delivery; guarded by mu
}

// New returns a desk at rest: Start wakes it.
func New(cfg Config) *Desk {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.GiveUp == 0 {
		cfg.GiveUp = 24 * time.Hour
	}
	if cfg.Refusals == 0 {
		cfg.Refusals = 10
	}
	if cfg.Pause == 0 {
		cfg.Pause = time.Second
	}
	life, cancel := context.WithCancel(context.Background())
	d := &Desk{
		cfg: cfg, log: cfg.Log, http: newClient(guard{allow: cfg.AllowPrivate}), life: life, cancel: cancel,
		lines: map[string]*line{}, unsaved: map[string]struct{}{},
	}
	d.tail.store = cfg.Store
	return d
}

// Start takes up every webhook where it was.
func (d *Desk) Start(ctx context.Context) error {
	if err := d.refresh(ctx); err != nil {
		return fmt.Errorf("take up the webhooks: %w", err)
	}
	return nil
}

// Close ends deliveries under way and writes down how far they are.
func (d *Desk) Close(ctx context.Context) error {
	d.cancel()
	done := make(chan struct{})
	go func() { d.tasks.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		return fmt.Errorf("wait for deliveries: %w", ctx.Err())
	}
	return d.save(ctx, true)
}

// refresh makes the lines those of the webhooks there are: of projects too,
// whose settings change without a word to the desk.
func (d *Desk) refresh(ctx context.Context) error {
	d.refreshing.Lock()
	defer d.refreshing.Unlock()
	all, err := d.cfg.Store.Webhooks(ctx)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.life.Err() != nil {
		return nil
	}
	known := map[string]bool{}
	for _, w := range all {
		known[w.ID] = true
		if d.lines[w.ID] == nil {
			l := newLine(d, w)
			d.lines[w.ID] = l
			d.tasks.Go(l.run)
		}
	}
	for id, l := range d.lines {
		if !known[id] {
			l.cancel()
			delete(d.lines, id)
			delete(d.unsaved, id)
		}
	}
	if !d.reading {
		d.reading = true
		d.tasks.Go(d.read)
	}
	return nil
}

// read wakes the lines after new events, and saves cursors.
func (d *Desk) read() {
	news, stop := d.cfg.Store.Subscribe()
	defer stop()
	save := time.NewTicker(saveEvery)
	defer save.Stop()
	d.heed() // what came before the subscription
	for n := 1; ; {
		select {
		case <-d.life.Done():
			return
		case <-news:
			d.heed()
		case <-save.C:
			if d.unread {
				d.heed()
			}
			if err := d.save(d.life, n%int(idleSave/saveEvery) == 0); err != nil && d.life.Err() == nil {
				d.log.Error("write how far webhooks are: tried again", "err", err)
			}
			n++
		}
	}
}

// heed passes news on. Webhooks of projects come and go with events of them.
func (d *Desk) heed() {
	changed, err := d.tail.grow(d.life)
	d.stale = d.stale || changed
	if d.stale {
		rerr := d.refresh(d.life)
		d.stale = rerr != nil
		err = errors.Join(err, rerr)
	}
	d.unread = err != nil
	if err != nil && d.life.Err() == nil {
		d.log.Error("read events for the webhooks: tried again", "err", err)
	}
	for _, l := range d.all() {
		wake(l.poked)
	}
}

func (d *Desk) all() []*line {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]*line, 0, len(d.lines))
	for _, l := range d.lines {
		all = append(all, l)
	}
	return all
}

// save writes cursors that moved: those by a delivery or, if all, each.
func (d *Desk) save(ctx context.Context, all bool) error {
	cursors := map[string]int64{}
	d.mu.Lock()
	for id, l := range d.lines {
		_, delivered := d.unsaved[id]
		if c, moved := l.unsaved(); moved && (delivered || all) {
			cursors[id] = c
		}
	}
	clear(d.unsaved)
	d.mu.Unlock()
	if len(cursors) == 0 {
		return nil
	}
	if err := d.cfg.Store.AdvanceWebhooks(ctx, cursors); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, c := range cursors {
		if l := d.lines[id]; l != nil {
			l.saved(c)
		}
	}
	return nil
}

// note says that a line's cursor may have moved by a delivery.
func (d *Desk) note(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unsaved[id] = struct{}{}
}

// CreateWebhook makes a webhook that wants what comes from now on. The answer
// alone has its secret.
func (d *Desk) CreateWebhook(ctx context.Context, req sandbox.WebhookRequest) (sandbox.Webhook, error) {
	if err := req.Validate(); err != nil {
		return sandbox.Webhook{}, err
	}
	if err := (guard{allow: d.cfg.AllowPrivate}).judge(req.URL); err != nil {
		return sandbox.Webhook{}, err
	}
	w := sandbox.Webhook{ID: sandbox.NewWebhookID(), URL: req.URL, Owner: req.Owner, Filter: req.Filter, Secret: req.Secret, CreatedAt: time.Now().UTC()}
	if w.Owner == "" {
		w.Owner = req.Actor
	}
	if w.Secret == "" {
		w.Secret = sandbox.NewWebhookSecret()
	}
	w, err := d.cfg.Store.CreateWebhook(ctx, w, req.Actor)
	if err != nil {
		return sandbox.Webhook{}, err
	}
	return w, d.refresh(context.WithoutCancel(ctx)) // it is made, whoever has gone away
}

// Webhooks lists all, without secrets, with how they do.
func (d *Desk) Webhooks(ctx context.Context) ([]sandbox.Webhook, error) {
	all, err := d.cfg.Store.Webhooks(ctx)
	if err != nil {
		return nil, err
	}
	for i, w := range all {
		w.Secret = ""
		d.mu.Lock()
		l := d.lines[w.ID]
		d.mu.Unlock()
		if l != nil {
			l.describe(&w)
		}
		all[i] = w
	}
	return all, nil
}

// Webhook returns one. ErrNotFound.
func (d *Desk) Webhook(ctx context.Context, id string) (sandbox.Webhook, error) {
	all, err := d.Webhooks(ctx)
	if err != nil {
		return sandbox.Webhook{}, err
	}
	if i := slices.IndexFunc(all, func(w sandbox.Webhook) bool { return w.ID == id }); i >= 0 {
		return all[i], nil
	}
	return sandbox.Webhook{}, sandbox.Errorf(sandbox.ErrNotFound, "webhook_not_found", "no webhook %.40q: 'sandbox webhook ls' shows those there are", id)
}

// RemoveWebhook forgets a webhook with all it has still to be told. ErrConflict
// for one of a project.
func (d *Desk) RemoveWebhook(ctx context.Context, id, actor string) error {
	w, err := d.Webhook(ctx, id)
	if err != nil {
		return err
	}
	if w.Project != "" {
		return sandbox.Errorf(sandbox.ErrConflict, "webhook_of_project", "webhook %s is part of the settings of project %s: change those", id, w.Project)
	}
	if err := d.cfg.Store.DeleteWebhook(ctx, id, actor); err != nil {
		return err
	}
	return d.refresh(context.WithoutCancel(ctx))
}

// secretOf is Webhook with the secret.
func (d *Desk) secretOf(ctx context.Context, id string) (sandbox.Webhook, error) {
	w, err := d.Webhook(ctx, id)
	if err != nil {
		return w, err
	}
	all, err := d.cfg.Store.Webhooks(ctx)
	for _, s := range all {
		if s.ID == id {
			w.Secret = s.Secret
		}
	}
	return w, err
}

// TestWebhook sends a message of type webhook.test now, once, and says what
// became of it. That the receiver fails is no error.
func (d *Desk) TestWebhook(ctx context.Context, id, actor string) (sandbox.Delivery, error) {
	w, err := d.secretOf(ctx, id)
	if err != nil {
		return sandbox.Delivery{}, err
	}
	now := time.Now().UTC()
	m := sandbox.WebhookMessage{
		ID: fmt.Sprintf("test-%s-%d", w.ID, now.UnixNano()), Webhook: w.ID, Type: sandbox.WebhookTest, Time: now, Actor: actor,
	}
	return d.send(ctx, w, m, 1), nil
}

// DeadLetters lists the events a webhook was not told.
func (d *Desk) DeadLetters(ctx context.Context, id string) ([]sandbox.DeadLetter, error) {
	if _, err := d.Webhook(ctx, id); err != nil {
		return nil, err
	}
	return d.cfg.Store.DeadLetters(ctx, id, sandbox.MaxPage)
}

// RetryDeadLetters tries dead letters once more, now: those of these numbers
// or, without any, the oldest hundred. What is taken is forgotten.
func (d *Desk) RetryDeadLetters(ctx context.Context, id string, seqs []int64) ([]sandbox.Delivery, error) {
	w, err := d.secretOf(ctx, id)
	if err != nil {
		return nil, err
	}
	all, err := d.cfg.Store.DeadLetters(ctx, id, sandbox.MaxPage)
	if err != nil {
		return nil, err
	}
	if len(seqs) > 0 {
		all = slices.DeleteFunc(all, func(l sandbox.DeadLetter) bool { return !slices.Contains(seqs, l.Event.Seq) })
		if len(all) == 0 {
			return nil, sandbox.Errorf(sandbox.ErrNotFound, "dead_letter_not_found", "webhook %s has no such dead letter: 'sandbox webhook dead ls %s' lists them", id, id)
		}
	}
	all = all[:min(len(all), retryAtMost)]
	out := make([]sandbox.Delivery, len(all))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for i, l := range all {
		g.Go(func() error {
			out[i] = d.send(ctx, w, message(w.ID, l.Event), l.Attempts+1)
			if !out[i].OK {
				l.Attempts, l.Error, l.At = l.Attempts+1, out[i].Error, out[i].At
				return d.cfg.Store.PutDeadLetter(ctx, l)
			}
			return d.cfg.Store.DeleteDeadLetter(ctx, id, l.Event.Seq)
		})
	}
	return out, g.Wait()
}

// Stats are sums since the daemon began, and what there is now.
type Stats struct {
	Webhooks, Waiting       int
	Delivered, Failed, Died int64
}

// Stats tells how the webhooks do.
func (d *Desk) Stats() Stats {
	s := Stats{Delivered: d.delivered.Load(), Failed: d.failed.Load(), Died: d.died.Load()}
	for _, l := range d.all() {
		var w sandbox.Webhook
		l.describe(&w)
		s.Webhooks++
		s.Waiting += w.Waiting
	}
	return s
}

// wake puts a token into a channel of one, unless there is one.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
