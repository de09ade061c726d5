package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

const (
	restoredEnd = ".restored" // of a copy that is not in its place yet
	beforeEnd   = ".before-"  // and a time: of a database that was set aside
	roomToOpen  = 1 << 20     // for the log and its index
)

// restore puts a backup in the place of its database, which it keeps beside it.
func restore(ctx context.Context, c config, log *slog.Logger, backup string, out io.Writer) error {
	unlock, err := lockAll(c, log)
	if err != nil {
		return err
	}
	defer unlock()
	return putBack(ctx, c, backup, out)
}

func putBack(ctx context.Context, c config, backup string, out io.Writer) error {
	backups, err := c.backupsOf("sandboxd")
	if backup == "" {
		if err != nil || len(backups) == 0 {
			return errors.Join(err, fmt.Errorf("there is no backup in %s", c.backupDir()))
		}
		backup = backups[len(backups)-1]
	}
	name, world := "sandboxd", c
	if strings.HasPrefix(filepath.Base(backup), "production") {
		name, world = "production", c.production()
	}
	path := filepath.Join(c.StateDir, name+".db")
	part := path + restoredEnd
	var in state.Installation
	err = copyBackup(ctx, backup, part)
	if err == nil {
		in, err = state.CheckBackup(ctx, part)
	}
	if err != nil {
		removeMatching(part + "*")
		return fmt.Errorf("%s is not restored, nothing was changed: %w", backup, err)
	}
	aside := path + beforeEnd + time.Now().UTC().Format("20060102T150405.000000Z")
	for _, end := range []string{"", "-wal", "-shm"} {
		if err := os.Rename(path+end, aside+end); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("set the old database aside: %w", err)
		}
	}
	if err := os.Rename(part, path); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s is %s now; what was there is %s\n", path, backup, aside)
	foreign := tellPlace(out, world.StateDir, in, aside)
	if name == "sandboxd" && !foreign { // the production world has no keys of its own
		others, _ := filepath.Glob(path + beforeEnd + "*Z")
		if !slices.Contains(others, aside) { // there was none: that is told
			others = append(others, aside)
		}
		tellValidAgain(ctx, out, cmp.Or(c.Access.SocketRole, access.RoleDeveloper), path, append(others, backups[max(0, len(backups)-1):]...))
	}
	return nil
}

// tellPlace says what the next start will find, and whether the database is
// another installation's.
func tellPlace(out io.Writer, dir string, in state.Installation, aside string) (foreign bool) {
	mark, boot, err := rootfs.ReadMark(dir)
	if err != nil || mark.ID == "" {
		fmt.Fprintln(out, "If the next start is in quarantine, 'sandboxd recover' says what lies on the volume that the backup does not know, and adopts or removes it.")
		return false
	}
	why := evidence{db: in, mark: mark, boot: boot}.disagreement()
	switch foreign = in.ID != "" && in.ID != mark.ID; {
	case foreign:
		fmt.Fprintf(out, "The next start is in quarantine: %s, with keys and owners of that installation. 'sandboxd restore %s' puts back what was there.\n", why, aside)
	case why != "":
		fmt.Fprintf(out, "The next start is in quarantine: %s. 'sandboxd recover' says what the backup does not know, and adopts or removes it.\n", why)
	default:
		fmt.Fprintln(out, "Database and volume agree: start sandboxd.")
	}
	return foreign
}

// tellValidAgain says whom a restored database lets in that a newer one of the
// installation does not.
func tellValidAgain(ctx context.Context, out io.Writer, socket access.Role, path string, others []string) {
	now, err := state.ReadCredentials(ctx, path)
	if err != nil {
		fmt.Fprintf(out, "The keys and owners of %s cannot be read (%v): see 'sandbox key ls' and 'sandbox owner ls'.\n", path, err)
		return
	}
	var newer []state.Credentials // or of the same time
	for _, other := range others {
		o, err := state.ReadCredentials(ctx, other)
		switch {
		case err != nil:
			fmt.Fprintf(out, "Keys revoked, and owners disabled, since the backup are valid again, and %s cannot be compared (%v): see 'sandbox key ls' and 'sandbox owner ls'.\n", other, err)
		case (now.ID == "" || o.ID == now.ID) && byAge(o, now) >= 0:
			newer = append(newer, o)
		}
	}
	if len(newer) == 0 {
		return
	}
	last := slices.MaxFunc(newer, byAge)
	gone := byAge(last, now) > 0 // what last does not have is not merely younger than it
	tellOwners(out, socket, now.Owners, last.Owners, gone)
	if gone {
		tellPorts(out, now, last)
	}
	revoked := map[string]bool{} // is for good
	for _, o := range newer {
		for _, k := range o.Keys {
			revoked[k.ID] = revoked[k.ID] || k.RevokedAt != nil
		}
	}
	for _, k := range now.Keys {
		key := fmt.Sprintf("Key %s of %s (%s…)", strings.TrimSpace(k.ID+" "+sandbox.Plain(k.Name)), k.Owner, k.Begins)
		switch {
		case k.RevokedAt != nil || k.ExpiresAt != nil && time.Now().After(*k.ExpiresAt):
		case revoked[k.ID]:
			fmt.Fprintf(out, "%s was revoked since the backup, and is valid again: 'sandbox key revoke %s'\n", key, k.ID)
		case gone && !slices.ContainsFunc(last.Keys, func(o access.Key) bool { return o.ID == k.ID }):
			fmt.Fprintf(out, "%s is not in the newest database, and is valid: if it was removed, 'sandbox key revoke %s'\n", key, k.ID)
		}
	}
}

// tellPorts says what opens sandboxes in now and not in last, which is newer.
func tellPorts(out io.Writer, now, last state.Credentials) {
	for id, hash := range now.PortTokens {
		if !bytes.Equal(hash, last.PortTokens[id]) {
			fmt.Fprintf(out, "The port token of sandbox %s was replaced or removed since the backup, and is valid again: 'sandbox port token %s' makes another, 'sandbox port token --rm %s' none\n", id, id, id)
		}
	}
	for _, p := range now.Ports {
		if !slices.ContainsFunc(last.Ports, func(o sandbox.Port) bool { return o.ID == p.ID }) {
			fmt.Fprintf(out, "Port %s of sandbox %s was closed since the backup, and is published again: 'sandbox port rm %s'\n", p.ID, p.Sandbox, p.ID)
		}
	}
}

// tellOwners says who has more rights in now than in last, which is newer; socket
// is what users of the socket are whom a database does not know.
func tellOwners(out io.Writer, socket access.Role, now, last []access.Owner, gone bool) {
	then := map[string]access.Owner{}
	for _, o := range last {
		then[o.Name] = o
	}
	for _, o := range last {
		if strings.HasPrefix(o.Name, "uid:") && !slices.ContainsFunc(now, func(w access.Owner) bool { return w.Name == o.Name }) {
			now = append(now, access.Owner{Name: o.Name, Role: socket})
		}
	}
	rank := func(o access.Owner) int { return slices.Index(access.Roles(), o.Role) } // 0: most rights
	for _, o := range now {
		was, known := then[o.Name]
		switch {
		case o.Disabled:
		case !known && gone:
			fmt.Fprintf(out, "Owner %s is not in the newest database, and is enabled: if it was removed, 'sandbox owner set %s --disable'\n", o.Name, o.Name)
		case was.Disabled:
			fmt.Fprintf(out, "Owner %s was disabled since the backup, and is enabled again: 'sandbox owner set %s --disable'\n", o.Name, o.Name)
		}
		if known && rank(o) < rank(was) {
			fmt.Fprintf(out, "Owner %s was made %s since the backup, and is %s again: 'sandbox owner set %s --role %s'\n", o.Name, was.Role, o.Role, o.Name, was.Role)
		}
	}
}

// byAge orders databases of one installation.
func byAge(a, b state.Credentials) int {
	return cmp.Or(cmp.Compare(a.Generation, b.Generation), cmp.Compare(a.LastEvent, b.LastEvent))
}

// copyBackup copies a database, with the log that one may have that was set
// aside, once it looks like one and there is room.
func copyBackup(ctx context.Context, from, to string) error {
	ends := []string{"", "-wal"}
	var files []io.Reader
	var total, log int64
	for _, end := range ends {
		f, size, err := linux.OpenRegular(from + end)
		if end != "" && errors.Is(err, os.ErrNotExist) {
			break
		}
		if errors.Is(err, linux.ErrNotRegular) {
			err = sandbox.Errorf(sandbox.ErrInvalid, "not_a_backup", "%w: name one of STATE/backups, or a sandboxd.db.before-… file", err)
		}
		if err != nil {
			return err
		}
		defer f.Close()
		files, total, log = append(files, io.LimitReader(f, size)), total+size, size
	}
	magic := []byte("SQLite format 3\x00") // sqlite.org/fileformat.html, 1.3
	head := make([]byte, len(magic))
	if _, err := io.ReadFull(files[0], head); err != nil || !bytes.Equal(head, magic) {
		return sandbox.Errorf(sandbox.ErrInvalid, "not_a_backup", "not a whole database of sandboxd: it does not begin as one of SQLite does")
	}
	files[0] = io.MultiReader(bytes.NewReader(head), files[0])
	if len(files) > 1 {
		total += log // which is folded into the file
	}
	removeMatching(to + "*") // of a restore that was cut off: its log would be taken for this one's
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(to), &st); err != nil {
		return &os.PathError{Op: "statfs", Path: filepath.Dir(to), Err: err}
	}
	if free := int64(st.Bfree) * st.Bsize; total+roomToOpen > free {
		return sandbox.Errorf(sandbox.ErrExhausted, "disk_full", "the copy takes %s and 1MiB to be opened, and the file system of %s has %s: make room there first", units.BytesSize(float64(total)), filepath.Dir(to), units.BytesSize(float64(free)))
	}
	for i, in := range files {
		if err := copyTo(ctx, to+ends[i], in); err != nil {
			return err
		}
	}
	return nil
}

func copyTo(ctx context.Context, path string, in io.Reader) (err error) {
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	for err == nil {
		if err = ctx.Err(); err == nil {
			_, err = io.CopyN(out, in, 1<<20)
		}
	}
	if errors.Is(err, io.EOF) {
		err = out.Sync()
	}
	return errors.Join(err, out.Close())
}
