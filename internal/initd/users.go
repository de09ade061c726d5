package initd

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	maxUserFile = 1 << 20 // of /etc/passwd and /etc/group is believed
	maxGroups   = 64
	// maxID is the last id of a sandbox's own range.
	maxID = 65535
)

// account is one user as the sandbox's own files describe it.
type account struct {
	name     string
	uid, gid uint32
	groups   []uint32
	home     string
	shell    string
}

// userCache remembers the account asked for last and what the files it came
// from looked like.
type userCache struct {
	mu            sync.Mutex
	known         bool
	user          string
	passwd, group fileStamp
	acc           account
}

// fileStamp changes with a file's content: ctime cannot be set by a user.
type fileStamp struct {
	dev, ino uint64
	size     int64
	changed  unix.Timespec
}

// settleTime is longer than a tick of the clock ctimes are taken from: a file
// that last changed longer ago cannot change without a new ctime.
const settleTime = 100 * time.Millisecond

// stampOf returns a file's stamp, and whether it vouches for the content.
func stampOf(path string) (fileStamp, bool) {
	st, err := statFile(path)
	if err != nil {
		return fileStamp{}, errors.Is(err, unix.ENOENT)
	}
	now, err := linux.FileClock()
	return fileStamp{uint64(st.Dev), st.Ino, st.Size, st.Ctim}, err == nil && now.Sub(time.Unix(st.Ctim.Unix())) > settleTime
}

// lookup resolves a name, a uid or uid:gid by the present root's /etc/passwd
// and /etc/group. Empty means root. A number without an entry is accepted,
// with group 0 and no groups of its own; a name is not.
func (c *userCache) lookup(user string) (account, error) {
	passwd, settledP := stampOf("/etc/passwd")
	group, settledG := stampOf("/etc/group")
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.known && c.user == user && c.passwd == passwd && c.group == group {
		return c.acc, nil
	}
	acc, err := readUser(user)
	c.known = err == nil && settledP && settledG
	c.user, c.passwd, c.group, c.acc = user, passwd, group, acc
	return acc, err
}

// forget drops what is remembered: the root changes.
func (c *userCache) forget() {
	c.mu.Lock()
	c.known = false
	c.mu.Unlock()
}

// readUser is lookup without what is remembered.
func readUser(user string) (account, error) {
	passwd, perr := readUserFile("/etc/passwd")
	group, gerr := readUserFile("/etc/group")
	acc, err := resolveUser(user, passwd, group)
	if rerr := errors.Join(perr, gerr); err != nil && rerr != nil {
		err = sandbox.Errorf(sandbox.ErrInvalid, "unknown_user", "user %.64q was not found: %w; mend the file in the sandbox as user 0, or name a number", user, rerr)
	}
	return acc, err
}

// resolveUser takes digits for an id and nothing else, also where a user or a
// group has a name of digits (CVE-2016-3697).
func resolveUser(user, passwd, group string) (account, error) {
	name, gidPart, hasGID := strings.Cut(user, ":")
	if name == "" && hasGID {
		return account{}, sandbox.Errorf(sandbox.ErrInvalid, "unknown_user", "user %.64q names a group and no user: write USER:GROUP, as 0%.60s", user, user)
	}
	if name == "" {
		name = "0"
	}
	uid, numeric := parseID(name)
	if !numeric && isDigits(name) {
		return account{}, sandbox.Errorf(sandbox.ErrInvalid, "unknown_user", "user %.64q: ids of a sandbox go from 0 to %d", name, maxID)
	}
	acc := account{name: name, uid: uid, home: "/", shell: "/bin/sh"}
	found, bad := false, false
	for line := range strings.Lines(passwd) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(f) < 7 || f[0] == "" {
			continue
		}
		u, okU := parseID(f[2])
		g, okG := parseID(f[3])
		if okU && okG && (numeric && u == uid || !numeric && f[0] == name) {
			acc = account{name: f[0], uid: u, gid: g, home: f[5], shell: f[6]}
			found = true
			break
		}
		bad = bad || f[0] == name
	}
	switch {
	case !found && !numeric && name == "root":
		acc = account{name: "root", home: "/root", shell: "/bin/sh"}
	case !found && !numeric && bad:
		return account{}, sandbox.Errorf(sandbox.ErrInvalid, "unknown_user", "user %.64q has an id beyond 0 to %d in the sandbox's /etc/passwd: change it there, or name a number", name, maxID)
	case !found && !numeric:
		return account{}, sandbox.Errorf(sandbox.ErrInvalid, "unknown_user", "user %.64q has no entry in the sandbox's /etc/passwd", name)
	case !found && uid == 0:
		acc.name, acc.home = "root", "/root"
	}
	if acc.home == "" {
		acc.home = "/"
	}
	if acc.shell == "" {
		acc.shell = "/bin/sh"
	}
	if hasGID {
		g, ok := groupID(gidPart, group)
		if !ok {
			return account{}, sandbox.Errorf(sandbox.ErrInvalid, "unknown_user", "group %.64q has no entry in the sandbox's /etc/group with an id from 0 to %d", gidPart, maxID)
		}
		acc.gid = g
		acc.groups = []uint32{g}
		return acc, nil
	}
	acc.groups = groupsOf(acc.name, acc.gid, group)
	return acc, nil
}

func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n <= maxID
}

func isDigits(s string) bool { return strings.Trim(s, "0123456789") == "" }

func groupID(s, group string) (uint32, bool) {
	if g, ok := parseID(s); ok || isDigits(s) {
		return g, ok
	}
	for line := range strings.Lines(group) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(f) >= 3 && f[0] == s {
			return parseID(f[2])
		}
	}
	return 0, false
}

func groupsOf(user string, gid uint32, group string) []uint32 {
	groups := []uint32{gid}
	for line := range strings.Lines(group) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(f) < 4 || len(groups) >= maxGroups {
			continue
		}
		g, ok := parseID(f[2])
		if ok && !slices.Contains(groups, g) && slices.Contains(strings.Split(f[3], ","), user) {
			groups = append(groups, g)
		}
	}
	return groups
}

// names maps ids to names for listings.
type names struct {
	users, groups map[uint32]string
	atLength      bool // files are told with what an agent wants to know
}

func loadNames() names {
	users, _ := readUserFile("/etc/passwd")
	groups, _ := readUserFile("/etc/group")
	return names{users: idNames(users), groups: idNames(groups)}
}

func idNames(file string) map[uint32]string {
	m := make(map[uint32]string)
	for line := range strings.Lines(file) {
		f := strings.SplitN(line, ":", 4)
		if len(f) < 3 {
			continue
		}
		if id, ok := parseID(f[2]); ok {
			if _, dup := m[id]; !dup {
				m[id] = f[0]
			}
		}
	}
	return m
}

// readUserFile returns the beginning of a regular file of the user's root, and
// why that is not all: whatever stands there instead must neither block nor fill
// PID 1. A missing one is empty.
func readUserFile(path string) (string, error) {
	bad := func(why error) error { return fmt.Errorf("the sandbox's %s cannot be read: %w", path, why) }
	fd, err := open(path, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return "", nil
	}
	if err != nil {
		return "", bad(err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return "", bad(err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return "", bad(errors.New("it is no regular file"))
	}
	b := make([]byte, min(st.Size, maxUserFile))
	got := 0
	for got < len(b) {
		n, err := unix.Read(fd, b[got:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return string(b[:got]), bad(err)
		}
		if n <= 0 {
			break
		}
		got += n
	}
	if st.Size > maxUserFile {
		return string(b[:got]), bad(errors.New("it is longer than 1 MiB"))
	}
	return string(b[:got]), nil
}
