package rootfs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// copiesDir has, for sandboxes whose upper was copied, an account of that
// upper as it was then. It lies apart from the upper, whose quota it would
// count against. It is a cache: whatever is wrong with it, the next copy is a
// whole one.
const copiesDir = "copies"

// maxDeltas is how many copies lie on a whole one, before there is another
// whole one. A look-up in an overlay goes through all.
const maxDeltas = 16

// account tells of an upper as it was when it was copied last.
type account struct {
	Boot   string   `json:"boot"`   // after another, times and layers may have gone back
	Kind   int32    `json:"kind"`   // of the upper's file handle:
	Handle []byte   `json:"handle"` // another upper, another inode or generation
	Layers []string `json:"layers"` // the copies, lowest first, that show the upper as it was

	seen *seen
}

// accountMagic begins the record and tells its form. A checksum of what follows
// comes next, then the length of the header, the header, and the files.
const accountMagic = "sandboxd account 1\n"

func (c *account) marshal() ([]byte, error) {
	head, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	start := len(accountMagic) + sha256.Size
	b := make([]byte, start, start+len(head)+48*c.seen.files+1024)
	b = binary.AppendUvarint(b, uint64(len(head)))
	b = append(b, head...)
	b = appendSeen(b, &c.seen.root)
	copy(b, accountMagic)
	sum := sha256.Sum256(b[start:])
	copy(b[len(accountMagic):], sum[:])
	return b, nil
}

func appendSeen(b []byte, f *seenFile) []byte {
	b = appendText(b, f.name)
	b = binary.AppendUvarint(b, uint64(f.mode))
	b = appendBool(b, f.links)
	b = binary.AppendUvarint(b, f.ino)
	b = binary.AppendVarint(b, f.size)
	b = binary.AppendVarint(b, f.ctime)
	if b = appendBool(b, f.dir != nil); f.dir == nil {
		return b
	}
	b = appendBool(b, f.dir.opaque)
	b = appendText(b, f.dir.redirect)
	b = binary.AppendUvarint(b, uint64(len(f.dir.files)))
	for i := range f.dir.files {
		b = appendSeen(b, &f.dir.files[i])
	}
	return b
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

var errDamaged = errors.New("the record of a copy is damaged")

func parseAccount(b []byte) (*account, error) {
	rest, ok := bytes.CutPrefix(b, []byte(accountMagic))
	if !ok || len(rest) < sha256.Size {
		return nil, errDamaged
	}
	if sum := sha256.Sum256(rest[sha256.Size:]); !bytes.Equal(sum[:], rest[:sha256.Size]) {
		return nil, errDamaged
	}
	r := seenReader{rest: rest[sha256.Size:]}
	c := &account{seen: &seen{}}
	head := r.text()
	if r.bad {
		return nil, errDamaged
	}
	if err := json.Unmarshal([]byte(head), c); err != nil {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	r.file(&c.seen.root, 0)
	if r.bad || len(r.rest) > 0 || c.seen.root.dir == nil {
		return nil, errDamaged
	}
	c.seen.files = r.files - 1
	return c, nil
}

// seenReader reads back what appendSeen wrote.
type seenReader struct {
	rest  []byte
	files int
	bad   bool
}

func (r *seenReader) uint() uint64 {
	v, n := binary.Uvarint(r.rest)
	if n <= 0 {
		r.bad, r.rest = true, nil
		return 0
	}
	r.rest = r.rest[n:]
	return v
}

func (r *seenReader) int() int64 {
	v, n := binary.Varint(r.rest)
	if n <= 0 {
		r.bad, r.rest = true, nil
		return 0
	}
	r.rest = r.rest[n:]
	return v
}

func (r *seenReader) text() string {
	n := r.uint()
	if n > uint64(len(r.rest)) {
		r.bad, r.rest = true, nil
		return ""
	}
	s := string(r.rest[:n])
	r.rest = r.rest[n:]
	return s
}

func (r *seenReader) bool() bool { return r.uint() == 1 }

func (r *seenReader) file(f *seenFile, depth int) {
	if r.files++; r.files > maxSeenFiles+1 || depth > maxSeenDepth+1 {
		r.bad = true
		return
	}
	f.name = r.text()
	f.mode = uint32(r.uint())
	f.links = r.bool()
	f.ino = r.uint()
	f.size = r.int()
	f.ctime = r.int()
	isDir := r.bool()
	if isDir != (f.kind() == unix.DT_DIR) {
		r.bad = true
	}
	if !isDir || r.bad {
		return
	}
	f.dir = &seenDir{opaque: r.bool(), redirect: r.text()}
	n := r.uint()
	if n > uint64(len(r.rest)) { // each takes more than a byte
		r.bad = true
		return
	}
	if n > 0 {
		f.dir.files = make([]seenFile, n)
	}
	for i := range f.dir.files {
		if r.file(&f.dir.files[i], depth+1); r.bad {
			return
		}
		if i > 0 && f.dir.files[i-1].name >= f.dir.files[i].name {
			r.bad = true
			return
		}
	}
}

// earlier returns the account of the last copy of a sandbox's upper, nil if
// there is none that the next copy could lie on.
func (s *Store) earlier(id sandbox.ID, upper handle) *account {
	b, err := os.ReadFile(s.vol.path(copiesDir, string(id)))
	if err != nil {
		return nil
	}
	c, err := parseAccount(b)
	if err != nil || c.Boot != s.boot || c.Kind != upper.kind || string(c.Handle) != upper.data {
		return nil
	}
	if len(c.Layers) == 0 || len(c.Layers) > maxDeltas {
		return nil
	}
	for _, l := range c.Layers {
		if !isUpperLayer(l) || !s.HasLayer(l) {
			return nil
		}
	}
	return c
}

// remember keeps the account of a copy, in place of an earlier one's.
func (s *Store) remember(id sandbox.ID, c *account) error {
	b, err := c.marshal()
	if err != nil {
		return err
	}
	path := s.vol.path(copiesDir, string(id))
	if err = os.WriteFile(path+".new", b, 0o600); err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		err = errors.Join(err, notGone(os.Remove(path+".new")))
	}
	return err
}

// forget drops the account of the last copy of a sandbox's upper.
func (s *Store) forget(id sandbox.ID) error {
	err := os.Remove(s.vol.path(copiesDir, string(id)))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// forgetGone drops the accounts of sandboxes that have no upper, and those
// cut short.
func (s *Store) forgetGone() error {
	names, err := readNames(s.vol.path(copiesDir))
	if err != nil {
		return fmt.Errorf("rootfs: accounts of copies: %w", err)
	}
	for _, n := range names {
		if _, err := os.Lstat(s.vol.path(sandboxesDir, n)); err == nil && !strings.Contains(n, ".") {
			continue
		}
		if err := os.Remove(filepath.Join(s.vol.path(copiesDir), n)); err != nil {
			return fmt.Errorf("rootfs: accounts of copies: %w", err)
		}
	}
	return nil
}

// bootID names this start of the machine.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

// upperCopy is one copy of an upper being made.
type upperCopy struct {
	s     *Store
	id    sandbox.ID
	upper string
	layer string
	on    []string // what it lies on
}

// run makes the copy: of what changed since the last one if that is known,
// else of all.
func (u *upperCopy) run(ctx context.Context) error {
	if u.s.noClone.Load() {
		return u.copy(ctx, nil, nil)
	}
	now, was, at := u.look(ctx)
	err := ctx.Err()
	if err != nil {
		return err
	}
	var plan *deltaDir
	if was != nil {
		plan, _ = planDelta(was.seen, now)
	}
	next := &account{Boot: u.s.boot, Kind: at.kind, Handle: []byte(at.data), seen: now}
	if now == nil {
		next = nil
	}
	if plan != nil {
		u.on = was.Layers
		err = u.copy(ctx, plan, next)
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, errReplaced) {
			return err
		}
		// It was not frozen after all.
	}
	u.on = nil
	return u.copy(ctx, nil, next)
}

// look gives account of the upper as it is, and as it was when it was copied
// last; nil where that is not possible.
func (u *upperCopy) look(ctx context.Context) (now *seen, was *account, at handle) {
	clock, err := linux.FileClock()
	if err == nil {
		at, err = handleAt(unix.AT_FDCWD, u.upper)
	}
	if err == nil {
		now, err = u.s.look(ctx, u.upper, clock)
	}
	if err != nil {
		return nil, nil, at
	}
	return now, u.s.earlier(u.id, at), at
}

// copy makes the layer by a plan, or of everything, and keeps the account of
// it. That comes last: before, the one there was holds.
func (u *upperCopy) copy(ctx context.Context, plan *deltaDir, next *account) error {
	c := newCopier(ctx, u.s.vol.root)
	if plan == nil && next != nil {
		c.count = &next.seen.seed
	}
	err := u.s.buildUpperLayer(u.layer, func(tree string) (info upperInfo, err error) {
		if plan != nil {
			info, err = c.delta(u.upper, tree, plan)
		} else {
			info, err = c.tree(u.upper, tree)
		}
		info.On = u.on
		return info, err
	})
	if err != nil {
		return err
	}
	if c.noClone.Load() {
		u.s.noClone.Store(true)
		return u.s.forget(u.id)
	}
	// The account has the names that the copy has, or it is none.
	if next == nil || plan == nil && (c.unknown.Load() || c.names.Load() != next.seen.names) {
		return u.s.forget(u.id)
	}
	next.Layers = append(slices.Clone(u.on), u.layer)
	if err := u.s.remember(u.id, next); err != nil {
		slog.Warn("keep account of a copy: the next will be a whole one", "sandbox", u.id, "err", err)
		return u.s.forget(u.id)
	}
	return nil
}
