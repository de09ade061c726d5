package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of a transfer.
const (
	// enough is how much a transfer must bring to count as getting on: so
	// much resets the count of attempts.
	enough = 64 << 10
	// trickle is what it must bring within Config.Stall not to count as
	// broken.
	trickle = 4 << 10
	// maxAnew is how often one is begun again because what is there is of
	// no use.
	maxAnew = 3
	chunk   = 128 << 10
)

// transfer is one blob on its way into a file.
type transfer struct {
	s    *Store
	d    descriptor
	f    *os.File
	hash hash.Hash
	n    int64 // bytes there
	old  bool  // some of them from an earlier transfer
	anew int   // times it began again
	tell func(step sandbox.ImageStep, n int64, detail string)
}

// fetch brings a blob into the cache and returns it open, at its beginning,
// whole and verified. Where a transfer breaks it goes on from there, at the
// same repository or the next; what was there from an earlier pull is used.
// The caller holds the lock of the digest and removes the file.
func (s *Store) fetch(ctx context.Context, from *sources, d descriptor, tell func(sandbox.ImageStep, int64, string)) (_ *os.File, err error) {
	f, err := os.OpenFile(s.path(partialDir, hexOf(d.Digest)), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, spaceError("keep a layer", err)
	}
	t := &transfer{s: s, d: d, f: f, hash: sha256.New(), tell: tell}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if err := t.resume(); err != nil {
		return nil, err
	}
	var errs []error
	for i := range from.ends {
		r, err := from.at(ctx, i)
		if err == nil {
			err = t.from(ctx, r)
		}
		if err == nil {
			_, err = f.Seek(0, io.SeekStart)
			return f, err
		}
		if ctx.Err() != nil {
			return nil, err
		}
		errs = append(errs, err)
	}
	// What the last one, the registry itself, said counts.
	err = errs[len(errs)-1]
	if t.n == 0 || sandbox.CodeOf(err) == "image_digest_mismatch" { // nothing to go on with
		err = errors.Join(err, remove(f.Name()))
	}
	return nil, err
}

// resume takes over what an earlier transfer left.
func (t *transfer) resume() error {
	n, err := io.Copy(t.hash, io.LimitReader(t.f, t.d.Size+1))
	if err != nil {
		return fmt.Errorf("image: read the part of %s that is there: %w", t.d.Digest, err)
	}
	if n > t.d.Size {
		return t.restart()
	}
	t.n, t.old = n, n > 0
	return nil
}

// restart forgets what is there.
func (t *transfer) restart() error {
	t.hash.Reset()
	t.n, t.old = 0, false
	t.anew++
	if err := t.f.Truncate(0); err != nil {
		return fmt.Errorf("image: empty the part of %s that is there: %w", t.d.Digest, err)
	}
	_, err := t.f.Seek(0, io.SeekStart)
	return err
}

// from gets what is missing from one repository, and verifies the whole.
func (t *transfer) from(ctx context.Context, r *repository) error {
	for attempt := 1; ; attempt++ {
		before := t.n
		err := t.attempt(ctx, r)
		if err == nil {
			return nil
		}
		p, again := errors.AsType[*passing](err)
		if ctx.Err() != nil {
			return fmt.Errorf("image: fetch %s: %w", t.d.Digest, ctx.Err())
		}
		if !again {
			return err
		}
		if t.n-before >= enough {
			attempt = 1
		}
		if attempt >= r.at.tries || t.anew > maxAnew {
			return p.err
		}
		t.tell(sandbox.StepRetrying, t.n, p.err.Error())
		if err := t.s.pause(ctx, attempt, p.after); err != nil {
			return fmt.Errorf("image: fetch %s: %w", t.d.Digest, err)
		}
	}
}

func (t *transfer) attempt(ctx context.Context, r *repository) error {
	if t.n < t.d.Size {
		if err := t.get(ctx, r); err != nil {
			return err
		}
	}
	if got := "sha256:" + hex.EncodeToString(t.hash.Sum(nil)); got != t.d.Digest {
		old := t.old
		if err := t.restart(); err != nil {
			return err
		}
		err := mismatch("registry %s sends %s in place of %s: do not trust it, or what stands between", r.at.host, got, t.d.Digest)
		if old { // the part that was there may be the wrong one
			return &passing{err: err}
		}
		return err
	}
	return nil
}

// get asks for the bytes that are missing and takes no more than those.
func (t *transfer) get(ctx context.Context, r *repository) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stall := time.AfterFunc(t.s.cfg.Stall+headerTimeout, func() { cancel(errStalled) })
	defer stall.Stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url("blobs", t.d.Digest), http.NoBody)
	if err != nil {
		return err
	}
	if t.n > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", t.n, t.d.Size-1))
	}
	resp, err := r.send(req, "layer "+t.d.Digest, http.StatusOK, http.StatusPartialContent, http.StatusRequestedRangeNotSatisfiable)
	if err != nil {
		return stalled(ctx, r, err)
	}
	defer resp.Body.Close()
	stall.Reset(t.s.cfg.Stall)
	var whole int64
	if n, _ := fmt.Sscanf(resp.Header.Get("Content-Range"), "bytes */%d", &whole); n == 1 && whole != t.d.Size {
		return mismatch("registry %s has %d bytes of %s, which by its manifest has %d: the image is broken there, push it again", r.at.host, whole, t.d.Digest, t.d.Size)
	}
	switch {
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable && t.n > 0,
		resp.StatusCode == http.StatusPartialContent && !strings.HasPrefix(resp.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", t.n)):
		if err := t.restart(); err != nil {
			return err
		}
		return &passing{err: sandbox.Errorf(sandbox.ErrUnavailable, "registry_refused", "registry %s does not go on with %s where it broke", r.at.host, t.d.Digest)}
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return sandbox.Errorf(sandbox.ErrUnavailable, "registry_refused", "registry %s answers 416 about %s, of which all was asked for", r.at.host, t.d.Digest)
	case resp.StatusCode == http.StatusOK && t.n > 0: // it knows no ranges
		if err := t.restart(); err != nil {
			return err
		}
	}
	if resp.ContentLength > t.d.Size-t.n {
		return t.over(r)
	}
	err = t.pour(resp.Body, func() { stall.Reset(t.s.cfg.Stall) })
	switch {
	case errors.Is(err, errOver):
		return t.over(r)
	case err == nil && t.n < t.d.Size:
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return stalled(ctx, r, err)
	}
	return nil
}

var (
	errStalled = errors.New("next to nothing comes")
	errOver    = errors.New("more comes than there should")
)

// stalled says so where it was us who broke a transfer off.
func stalled(ctx context.Context, r *repository, err error) error {
	if errors.Is(context.Cause(ctx), errStalled) {
		return &passing{err: sandbox.Errorf(sandbox.ErrUnavailable, "registry_unreachable", "registry %s has stopped sending: is the way to it overloaded?", r.at.host)}
	}
	if de, ok := errors.AsType[*diskError](err); ok {
		return spaceError("keep a layer", de.err)
	}
	if _, ok := errors.AsType[*passing](err); ok {
		return err
	}
	return r.wireError(err)
}

// over refuses a blob that is larger than its manifest says.
func (t *transfer) over(r *repository) error {
	return mismatch("registry %s sends more than the %d bytes that %s has by its manifest: do not trust it", r.at.host, t.d.Size, t.d.Digest)
}

// diskError is an error of ours, not of the registry's.
type diskError struct{ err error }

func (d *diskError) Error() string { return d.err.Error() }

// pour copies the missing bytes into file and hash, telling of progress, and
// looks whether there are more.
func (t *transfer) pour(r io.Reader, alive func()) error {
	buf := make([]byte, chunk)
	var since int64
	for t.n < t.d.Size {
		n, err := r.Read(buf[:min(int64(len(buf)), t.d.Size-t.n)])
		if n > 0 {
			if _, werr := t.f.Write(buf[:n]); werr != nil {
				return &diskError{werr}
			}
			_, _ = t.hash.Write(buf[:n]) // a hash takes everything
			t.n += int64(n)
			if since += int64(n); since >= trickle {
				since = 0
				alive()
			}
			t.tell(sandbox.StepDownloading, t.n, "")
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	alive()
	if n, _ := io.ReadFull(r, buf[:1]); n > 0 {
		return errOver
	}
	return nil
}

// small fetches a blob that fits into memory: a configuration.
func (r *repository) small(ctx context.Context, d descriptor, limit int64) (b []byte, err error) {
	what := "configuration " + d.Digest
	err = r.retry(ctx, "read "+what, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, headerTimeout+r.s.cfg.Stall)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url("blobs", d.Digest), http.NoBody)
		if err != nil {
			return err
		}
		resp, err := r.send(req, what, http.StatusOK)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if b, err = readAll(resp, min(limit, d.Size), what); err != nil {
			if sandbox.CodeOf(err) == "image_too_large" {
				return mismatch("registry %s sends more than the %d bytes that %s has by its manifest: do not trust it", r.at.host, d.Size, d.Digest)
			}
			return r.wireError(err)
		}
		if int64(len(b)) < d.Size {
			return &passing{err: mismatch("registry %s sends %d bytes of %s, which by its manifest has %d", r.at.host, len(b), d.Digest, d.Size)}
		}
		if got := digestOf(b); got != d.Digest {
			return mismatch("registry %s sends %s in place of %s: do not trust it", r.at.host, got, d.Digest)
		}
		return nil
	})
	return b, err
}
