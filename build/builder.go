package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Sandboxes runs the steps of builds.
type Sandboxes interface {
	// CreateOn makes a sandbox of an image that needs no name.
	CreateOn(ctx context.Context, req sandbox.CreateRequest, base sandbox.Image) (sandbox.Sandbox, error)
	Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error)
	Files(ctx context.Context, ref string) (sandbox.Files, error)
	// FreezeStep ends what runs in a sandbox and returns base with what was
	// written to it as one more layer. That stays while the sandbox does.
	FreezeStep(ctx context.Context, ref string, base sandbox.Image) (sandbox.Image, error)
	Remove(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
}

// Images is what builds begin with and come to.
type Images interface {
	Image(ctx context.Context, name string) (sandbox.Image, error)
	// Scratch is the image with nothing in it.
	Scratch(ctx context.Context) (sandbox.Image, error)
	PutBuilt(ctx context.Context, img sandbox.Image) error
	// HoldLayers keeps the layers of all images that are read or made with the
	// context it returns, until release: a build reads of layers that nothing
	// may name any more when it comes to use them.
	HoldLayers(ctx context.Context) (build context.Context, release func())
}

// Cache remembers what steps came to. What it holds keeps its layers.
type Cache interface {
	BuildStep(ctx context.Context, key string) (sandbox.Image, error)
	PutBuildStep(ctx context.Context, key string, made sandbox.Image) error
}

// Config is what a Builder is made of.
type Config struct {
	Dir       string // for the files of builds under way; emptied by New
	Sandboxes Sandboxes
	Images    Images
	Cache     Cache
	Log       *slog.Logger

	AtOnce       int           // builds at the same time; others wait
	ContextBytes int64         // most a build's context, or one COPY --from, may hold
	ContextFiles int           // entries of it
	TimeLimit    time.Duration // of a build that names none, and the most one may name
}

// LabelBuild is on every sandbox of a build, with the build's id; ActorPrefix
// begins its owner, which no caller of the API has. By both a restarted
// daemon knows what its predecessor's builds left.
const (
	LabelBuild  = "sandboxd.build"
	ActorPrefix = "build:"
)

// stagesAtOnce is how many stages of one build run at the same time.
const stagesAtOnce = 2

// waiting is how many builds may wait for each that may run.
const waiting = 4

// sharesOfPlaces is how many owners at least can build at a time.
const sharesOfPlaces = 2

// cleanUpTime bounds the removal of a step's sandbox.
const cleanUpTime = 30 * time.Second

// Builder builds images. It is safe for concurrent use.
type Builder struct {
	cfg   Config
	queue *semaphore.Weighted // builds that run or wait: each has files on disk
	turn  *semaphore.Weighted // builds that run

	places int // in the queue

	mu     sync.Mutex
	owners map[string]*share // guarded by mu; of those who have places
}

// share is what one owner has of the places.
type share struct {
	places int                 // guarded by Builder.mu
	turn   *semaphore.Weighted // builds of the owner that run
}

// New returns a builder. Files of a predecessor's builds are deleted.
func New(cfg Config) (*Builder, error) {
	if err := os.RemoveAll(cfg.Dir); err != nil {
		return nil, fmt.Errorf("delete the files of earlier builds: %w", err)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of builds: %w", err)
	}
	n := int64(max(cfg.AtOnce, 1))
	return &Builder{cfg: cfg, turn: semaphore.NewWeighted(n), queue: semaphore.NewWeighted(n * (1 + waiting)), places: int(n * (1 + waiting)), owners: map[string]*share{}}, nil
}

// Tell takes the events of a build, one at a time. Its error ends the build.
type Tell func(sandbox.BuildEvent) error

// Build makes an image of a Dockerfile and an archive of the files it copies,
// read to its end before the first event. An error before the first event is
// about the request. Cancelling ctx ends the build with all its sandboxes.
// After an error there is no image; the steps that were made stay in the
// cache.
//
// ErrInvalid with code dockerfile_invalid, dockerfile_unsupported,
// bad_context or build_step_failed; ErrTooLarge with code context_too_large;
// ErrNotFound with code image_not_found; ErrDeadline with code build_timeout;
// ErrExhausted with code volume_full, disk_full or builds_exhausted.
func (b *Builder) Build(ctx context.Context, req sandbox.BuildRequest, files io.Reader, tell Tell) (sandbox.Image, error) {
	if err := req.Validate(); err != nil {
		return sandbox.Image{}, err
	}
	if !samePlatform(req.Platform) && req.Platform != "" {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrUnsupported, "build_platform", "platform %.40q: only %s can be built here", req.Platform, hostPlatform())
	}
	mine, leave, err := b.enter(req.Actor)
	if err != nil {
		return sandbox.Image{}, err
	}
	defer leave()
	tree, err := b.receive(ctx, files)
	if err != nil {
		return sandbox.Image{}, err
	}
	defer b.close(tree)
	file, err := parse(req.Dockerfile)
	if err != nil {
		return sandbox.Image{}, err
	}
	if err := mine.turn.Acquire(ctx, 1); err != nil { // first: those who wait here hold nobody else up
		return sandbox.Image{}, err
	}
	defer mine.turn.Release(1)
	if err := b.turn.Acquire(ctx, 1); err != nil {
		return sandbox.Image{}, err
	}
	defer b.turn.Release(1)
	ctx, cancel := b.limit(ctx, req)
	defer cancel()
	ctx, release := b.cfg.Images.HoldLayers(ctx)
	defer release()
	x := &execution{b: b, req: req, id: string(sandbox.NewID()), file: file, context: tree, send: tell}
	img, err := x.build(ctx)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return img, sandbox.Errorf(sandbox.ErrDeadline, "build_timeout", "the build took longer than its time limit: what was made stays in the cache; give it more with --timeout: %w", err)
	}
	return img, err
}

// enter takes a place among those who build or wait. One owner has at most a
// share of them, and of those who build, so that others get in whatever that
// one sends or holds back.
func (b *Builder) enter(owner string) (mine *share, leave func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if mine = b.owners[owner]; mine == nil {
		mine = &share{turn: semaphore.NewWeighted(int64(ofShare(max(b.cfg.AtOnce, 1))))}
	}
	if mine.places >= ofShare(b.places) {
		return nil, nil, sandbox.Errorf(sandbox.ErrExhausted, "builds_exhausted", "%d builds of %s are under way already: try again when one is done", mine.places, owner)
	}
	if !b.queue.TryAcquire(1) {
		return nil, nil, sandbox.Errorf(sandbox.ErrExhausted, "builds_exhausted", "too many builds are waiting already: try again when one is done")
	}
	mine.places++
	b.owners[owner] = mine
	return mine, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if mine.places--; mine.places == 0 {
			delete(b.owners, owner)
		}
		b.queue.Release(1)
	}, nil
}

// ofShare is how many of n places one owner may have.
func ofShare(n int) int { return max(1, n/sharesOfPlaces) }

func (b *Builder) limit(ctx context.Context, req sandbox.BuildRequest) (context.Context, context.CancelFunc) {
	limit := b.cfg.TimeLimit
	if asked := time.Duration(req.TimeoutSeconds) * time.Second; asked > 0 && (asked < limit || limit == 0) {
		limit = asked
	}
	if limit == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, limit)
}

// receive reads the archive of the context.
func (b *Builder) receive(ctx context.Context, files io.Reader) (*Tree, error) {
	t, err := newTree(b.cfg.Dir, b.bounds())
	if err != nil {
		return nil, err
	}
	if files != nil {
		err = t.fill(ctx, files, false, everything)
	}
	if err != nil {
		b.close(t)
		return nil, err
	}
	t.seal()
	return t, nil
}

func (b *Builder) bounds() bounds {
	return bounds{bytes: b.cfg.ContextBytes, entries: b.cfg.ContextFiles}
}

func (b *Builder) close(t *Tree) {
	if err := t.Close(); err != nil {
		b.cfg.Log.Warn("close the files of a build", "dir", filepath.Base(b.cfg.Dir), "err", err)
	}
}

// execution is one build under way.
type execution struct {
	b       *Builder
	req     sandbox.BuildRequest
	id      string
	file    *dockerfile
	context *Tree

	mu   sync.Mutex // guards send
	send Tell

	results map[int]*result // by stage; filled before the stages run
}

// result is what a stage comes to.
type result struct {
	done  chan struct{} // closed when image or err stands
	image sandbox.Image // without a name
	err   error
}

// tell passes an event on.
func (x *execution) tell(e sandbox.BuildEvent) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.send(e)
}

func (x *execution) build(ctx context.Context) (sandbox.Image, error) {
	stages, err := x.file.resolve(environ(x.req.Args), x.req.Target, func(name string, line int) (sandbox.Image, error) {
		img, err := x.b.cfg.Images.Image(ctx, name)
		if err != nil && errors.Is(err, sandbox.ErrNotFound) {
			return img, x.at(sandbox.ErrNotFound, "image_not_found", line, err)
		}
		return img, err
	})
	if err != nil {
		return sandbox.Image{}, err
	}
	for _, n := range x.file.notes {
		if err := x.tell(sandbox.BuildEvent{Type: sandbox.BuildNote, Line: n.line, Text: n.text}); err != nil {
			return sandbox.Image{}, err
		}
	}
	x.results = map[int]*result{}
	for _, s := range stages {
		x.results[s.index] = &result{done: make(chan struct{})}
	}
	g, work := errgroup.WithContext(ctx)
	g.SetLimit(stagesAtOnce) // in the order of the file: the earliest that is not done can always go on
	for _, s := range stages {
		g.Go(func() error {
			r := x.results[s.index]
			r.image, r.err = x.stage(work, s)
			close(r.done)
			return r.err
		})
	}
	if err := g.Wait(); err != nil {
		return sandbox.Image{}, err
	}
	if err := ctx.Err(); err != nil {
		return sandbox.Image{}, err
	}
	last := stages[len(stages)-1]
	return x.finish(context.WithoutCancel(ctx), x.results[last.index].image, last.config)
}

// finish names the image.
func (x *execution) finish(ctx context.Context, img sandbox.Image, config sandbox.ImageConfig) (sandbox.Image, error) {
	img.Config, img.CreatedAt = config, time.Now().UTC()
	var err error
	if img.Digest, err = digestOf(img); err != nil {
		return img, err
	}
	for _, name := range x.req.Names {
		img.Name = name
		if err := x.b.cfg.Images.PutBuilt(ctx, img); err != nil {
			return img, err
		}
	}
	return img, x.tell(sandbox.BuildEvent{Type: sandbox.BuildImage, Image: &img})
}

// digestOf names what an image is: its layers and its configuration.
func digestOf(img sandbox.Image) (string, error) {
	b, err := json.Marshal(struct {
		Kind   sandbox.ImageKind
		Layers []string
		Config sandbox.ImageConfig
	}{img.Kind, img.Layers, img.Config})
	if err != nil {
		return "", fmt.Errorf("describe the image: %w", err)
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

// wait returns what another stage comes to.
func (x *execution) wait(ctx context.Context, stage int) (sandbox.Image, error) {
	r := x.results[stage]
	select {
	case <-r.done:
		return r.image, r.err
	case <-ctx.Done():
		return sandbox.Image{}, ctx.Err()
	}
}

// at makes an error about a line of the Dockerfile, which it quotes.
func (x *execution) at(class error, code string, line int, err error) error {
	return sandbox.Errorf(class, code, "Dockerfile line %d: %w\n  %d | %s", line, err, line, x.file.quote(line))
}
