package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Layer is what the volume tells of a layer.
type Layer struct {
	Size  int64 // bytes of its regular files
	Files int64
}

// Volume is where layers are kept.
type Volume interface {
	// Layer describes a layer; class ErrNotFound where there is none.
	Layer(name string) (Layer, error)
	// ImportLayer unpacks a layer, plain or compressed, which must have the
	// digest diffID uncompressed. One that is there already is left alone.
	ImportLayer(ctx context.Context, diffID string, r io.Reader) (Layer, error)
	// ExportLayer writes layer i of a stack as a plain layer archive and
	// returns its digest. The same layer gives the same bytes. With a nil w it
	// only says whether it can, and so does ExportTree.
	ExportLayer(ctx context.Context, stack []string, i int, w io.Writer) (diffID string, err error)
	// ExportTree writes the merged tree of a stack as one archive.
	ExportTree(ctx context.Context, stack []string, w io.Writer) error
	// ImportTar makes an image of an archive of a root file system.
	ImportTar(ctx context.Context, name string, r io.Reader) (sandbox.Image, error)
}

// Registry is what the operator says of one registry.
type Registry struct {
	Mirrors   []string // registries asked first, in this order, by host and port
	PlainHTTP bool     // without TLS
	CAFile    string   // certificates trusted besides the system's
	Auth      *sandbox.RegistryAuth
}

// Config says how a Store works. Zero values mean those in brackets.
type Config struct {
	Dir        string // what is kept, and what is on its way
	Volume     Volume
	Registries map[string]Registry // by host and port
	Platform   string              // for requests that name none [that of this program]
	CacheBytes int64               // most bytes of broken-off layers kept [4 GiB]
	MaxBytes   int64               // most bytes of an image, compressed, and of an archive [32 GiB]
	Version    string              // told to registries
	Log        *slog.Logger

	Backoff time.Duration // before the first repetition; doubles [250 ms]
	Stall   time.Duration // a transfer that brings next to nothing for so long is broken [30 s]
}

// Bounds of what is kept.
const (
	defaultCache = 4 << 30
	defaultBytes = 32 << 30
	// partialAge is how long a layer that broke off waits to be continued.
	partialAge = 24 * time.Hour
	// parallelLayers is how many layers of one image are fetched at a time.
	parallelLayers = 3
	// parallelPacks is how many layers are compressed at a time, of all
	// pushes and exports.
	parallelPacks = 2
)

// Store moves images. Its methods may be called from several goroutines.
type Store struct {
	cfg   Config
	vol   Volume
	log   *slog.Logger
	packs *semaphore.Weighted

	mu    sync.Mutex
	locks map[string]*keyLock // of layers on their way, guarded by mu
}

// keyLock is held by one of those who want the same thing.
type keyLock struct {
	sem   *semaphore.Weighted
	users int // guarded by Store.mu
}

// The directories of a store.
const (
	manifestsDir = "manifests"
	configsDir   = "configs"
	blobsDir     = "blobs"
	partialDir   = "partial"
	spoolDir     = "spool"
)

// Open prepares a store. What a killed predecessor left half done is removed,
// except layers that broke off lately and fit into the cache.
func Open(cfg Config) (*Store, error) {
	if cfg.Platform == "" {
		cfg.Platform = "linux/" + runtime.GOARCH
	}
	if cfg.CacheBytes == 0 {
		cfg.CacheBytes = defaultCache
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = defaultBytes
	}
	if cfg.Backoff == 0 {
		cfg.Backoff = 250 * time.Millisecond
	}
	if cfg.Stall == 0 {
		cfg.Stall = 30 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	s := &Store{cfg: cfg, vol: cfg.Volume, log: cfg.Log, packs: semaphore.NewWeighted(parallelPacks), locks: map[string]*keyLock{}}
	for _, d := range []string{manifestsDir, configsDir, blobsDir, partialDir, spoolDir} {
		if err := os.MkdirAll(s.path(d), 0o700); err != nil {
			return nil, fmt.Errorf("image: prepare %s: %w", s.path(d), err)
		}
	}
	return s, s.sweep()
}

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.cfg.Dir}, parts...)...)
}

// sweep removes what a predecessor left half done.
func (s *Store) sweep() error {
	spools, err := os.ReadDir(s.path(spoolDir))
	if err != nil {
		return fmt.Errorf("image: read %s: %w", s.path(spoolDir), err)
	}
	var errs []error
	for _, e := range spools {
		errs = append(errs, os.RemoveAll(s.path(spoolDir, e.Name())))
	}
	for _, d := range []string{manifestsDir, configsDir, blobsDir} {
		entries, err := os.ReadDir(s.path(d))
		errs = append(errs, err)
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), tempPrefix) {
				errs = append(errs, remove(s.path(d, e.Name())))
			}
		}
	}
	return errors.Join(append(errs, s.trimPartial())...)
}

// trimPartial removes broken-off layers that are old, and the oldest of them
// until the rest fits.
func (s *Store) trimPartial() error {
	entries, err := os.ReadDir(s.path(partialDir))
	if err != nil {
		return fmt.Errorf("image: read %s: %w", s.path(partialDir), err)
	}
	var files []os.FileInfo
	for _, e := range entries {
		if info, err := e.Info(); err == nil { // else it has just gone
			files = append(files, info)
		}
	}
	slices.SortFunc(files, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	var errs []error
	var total int64
	for _, f := range files {
		total += f.Size()
		if time.Since(f.ModTime()) > partialAge || total > s.cfg.CacheBytes {
			total -= f.Size()
			errs = append(errs, s.dropPartial(f.Name()))
		}
	}
	return errors.Join(errs...)
}

// dropPartial removes a broken-off layer that nobody is fetching.
func (s *Store) dropPartial(name string) error {
	unlock, ok := s.tryLock(name)
	if !ok {
		return nil
	}
	defer unlock()
	return remove(s.path(partialDir, name))
}

// Keep removes the manifests and configurations of images other than these,
// and what is known of layers other than those. The caller sees to it that
// layers of pulls under way are among them, and that none is at its end: see sandbox.HoldAll.
func (s *Store) Keep(images []sandbox.Image, layers []string) error {
	manifests, configs, blobs := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, i := range images {
		if m, err := s.manifest(i.Digest); err == nil {
			manifests[hexOf(i.Digest)] = true
			configs[hexOf(m.Config.Digest)] = true
		}
	}
	for _, l := range layers {
		blobs[blobName(l)] = true
	}
	var errs []error
	for dir, keep := range map[string]map[string]bool{manifestsDir: manifests, configsDir: configs, blobsDir: blobs} {
		entries, err := os.ReadDir(s.path(dir))
		if err != nil {
			errs = append(errs, fmt.Errorf("image: read %s: %w", s.path(dir), err))
			continue
		}
		for _, e := range entries {
			if !keep[e.Name()] && !strings.HasPrefix(e.Name(), tempPrefix) {
				errs = append(errs, remove(s.path(dir, e.Name())))
			}
		}
	}
	return errors.Join(append(errs, s.trimPartial())...)
}

// lock keeps others off the same thing until unlock.
func (s *Store) lock(ctx context.Context, key string) (unlock func(), err error) {
	s.mu.Lock()
	l := s.locks[key]
	if l == nil {
		l = &keyLock{sem: semaphore.NewWeighted(1)}
		s.locks[key] = l
	}
	l.users++
	s.mu.Unlock()
	if err := l.sem.Acquire(ctx, 1); err != nil {
		s.leave(key, l)
		return nil, fmt.Errorf("image: wait for the same layer of another transfer: %w", err)
	}
	return s.locked(key, l), nil
}

// locked ends what lock began.
func (s *Store) locked(key string, l *keyLock) (unlock func()) {
	return func() { l.sem.Release(1); s.leave(key, l) }
}

func (s *Store) leave(key string, l *keyLock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(s.locks, key)
	}
}

// tryLock is lock for those who can do without.
func (s *Store) tryLock(key string) (unlock func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.locks[key] != nil {
		return nil, false
	}
	l := &keyLock{sem: semaphore.NewWeighted(1), users: 1}
	s.locks[key] = l
	return s.locked(key, l), l.sem.TryAcquire(1) // nobody else knows it
}

// tempPrefix begins the names of files that are not whole yet.
const tempPrefix = ".new-"

// keep writes a small file so that it is there whole or not at all, also
// after a power cut.
func (s *Store) keep(dir, name string, data []byte) (err error) {
	f, err := os.CreateTemp(s.path(dir), tempPrefix)
	if err != nil {
		return spaceError("keep "+dir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(spaceError("keep "+dir, err), remove(f.Name()))
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), s.path(dir, name)); err != nil {
		return err
	}
	return syncDir(s.path(dir))
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// remove removes a file; one that is not there is no error.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// spaceError gives a full disk its class and code.
func spaceError(doing string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return sandbox.Errorf(sandbox.ErrExhausted, "disk_full", "%s: the disk of the state directory is full: make room ('sandbox image prune'), then repeat: %w", doing, err)
	}
	return fmt.Errorf("image: %s: %w", doing, err)
}

// known is what registries call a layer, so that it need not be sent again.
type known struct {
	DiffID    string   `json:"diff_id"`
	MediaType string   `json:"media_type"`
	Digest    string   `json:"digest"` // compressed
	Size      int64    `json:"size"`
	Repos     []string `json:"repos"` // where it was seen, as host/path, newest first; empty: nowhere yet
}

const maxRepos = 8

// blobName is the name of what is known of a layer, which may be called
// sha256:… or upper:….
func blobName(layer string) string { return strings.ReplaceAll(layer, ":", "-") }

// maxForms bounds how many compressed forms of one layer are known.
const maxForms = 4

// known returns the forms in which a layer is known, first that in which it
// came.
func (s *Store) known(layer string) []known {
	var all []known
	b, err := os.ReadFile(s.path(blobsDir, blobName(layer)))
	if err != nil || json.Unmarshal(b, &all) != nil {
		return nil // nothing is known; what that costs is time
	}
	return slices.DeleteFunc(all, func(k known) bool {
		return !sandbox.ValidDigest(k.Digest) || !sandbox.ValidDigest(k.DiffID) || k.Size <= 0
	})
}

// remember keeps what a repository calls a layer; no repository where it is
// known from an archive.
func (s *Store) remember(layer, diffID, repo string, d descriptor) error {
	all := s.known(layer)
	i := slices.IndexFunc(all, func(k known) bool { return k.Digest == d.Digest })
	if i < 0 {
		if len(all) == maxForms {
			all = slices.Delete(all, maxForms-1, maxForms)
		}
		i = len(all)
		all = append(all, known{DiffID: diffID, MediaType: d.MediaType, Digest: d.Digest, Size: d.Size})
	} else if repo == "" || len(all[i].Repos) > 0 && all[i].Repos[0] == repo {
		return nil
	}
	if k := &all[i]; repo != "" {
		k.Repos = slices.DeleteFunc(k.Repos, func(r string) bool { return r == repo })
		k.Repos = slices.Insert(k.Repos, 0, repo)
		k.Repos = k.Repos[:min(len(k.Repos), maxRepos)]
	}
	b, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return s.keep(blobsDir, blobName(layer), b)
}

// spool makes a directory for an archive on its way.
func (s *Store) spool() (dir string, done func(), err error) {
	dir, err = os.MkdirTemp(s.path(spoolDir), "")
	if err != nil {
		return "", nil, spaceError("make room for an archive", err)
	}
	return dir, func() {
		if err := os.RemoveAll(dir); err != nil {
			s.log.Warn("remove a spool; the next start does", "dir", dir, "err", err)
		}
	}, nil
}
