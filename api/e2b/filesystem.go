package e2b

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Messages of filesystem.Filesystem.
type (
	pathRequest struct {
		Path string `json:"path"`
	}
	moveRequest struct {
		Source      string `json:"source"`
		Destination string `json:"destination"`
	}
	listRequest struct {
		Path  string `json:"path"`
		Depth number `json:"depth"`
	}
	entryInfo struct {
		Name          string            `json:"name"`
		Type          string            `json:"type"`
		Path          string            `json:"path"`
		Size          int64             `json:"size,string"`
		Mode          uint32            `json:"mode"`
		Permissions   string            `json:"permissions"`
		Owner         string            `json:"owner"`
		Group         string            `json:"group"`
		ModifiedTime  string            `json:"modifiedTime"`
		SymlinkTarget *string           `json:"symlinkTarget,omitempty"`
		Metadata      map[string]string `json:"metadata,omitempty"`
	}
	entryMessage struct {
		Entry entryInfo `json:"entry"`
	}
)

// attrPrefix begins the names of the extended attributes that hold metadata.
const attrPrefix = "user.e2b."

// entryTypes are the file types of the protocol. What has none is unspecified.
var entryTypes = map[sandbox.FileType]string{
	sandbox.FileRegular: "FILE_TYPE_FILE", sandbox.FileDir: "FILE_TYPE_DIRECTORY", sandbox.FileSymlink: "FILE_TYPE_SYMLINK",
}

const typeUnspecified = "FILE_TYPE_UNSPECIFIED"

// entryOf describes a file. A link has the type and mode of what it leads to.
func entryOf(f sandbox.FileInfo) entryInfo {
	e := entryInfo{
		Name: f.Name, Type: entryTypes[f.Type], Path: f.Path, Size: f.Size, Mode: f.Mode & 0o777, Permissions: permissions(f),
		Owner: named(f.User, f.UID), Group: named(f.Group, f.GID), ModifiedTime: f.ModTime.UTC().Format(time.RFC3339Nano),
	}
	if f.Type == sandbox.FileSymlink {
		target := f.Target
		e.Type, e.Mode = typeUnspecified, 0
		if f.Leads != nil {
			target, e.Type, e.Mode = f.Leads.Path, entryTypes[f.Leads.Type], f.Leads.Mode&0o777
		} else if !path.IsAbs(target) {
			target = path.Join(path.Dir(f.Path), target)
		}
		e.SymlinkTarget = &target
	}
	if e.Type == "" {
		e.Type = typeUnspecified
	}
	for name, value := range f.Attrs {
		if key, ok := strings.CutPrefix(name, attrPrefix); ok {
			if e.Metadata == nil {
				e.Metadata = map[string]string{}
			}
			e.Metadata[key] = value
		}
	}
	return e
}

// permissions words a mode as Go does.
func permissions(f sandbox.FileInfo) string {
	m := fs.FileMode(f.Mode & 0o777)
	for bit, flag := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if f.Mode&bit != 0 {
			m |= flag
		}
	}
	switch f.Type {
	case sandbox.FileDir:
		m |= fs.ModeDir
	case sandbox.FileSymlink:
		m |= fs.ModeSymlink
	case sandbox.FileOther:
		m |= fs.ModeIrregular
	}
	return m.String()
}

func named(name string, id uint32) string {
	if name != "" {
		return name
	}
	return number(id).String()
}

// agent is the file work of one user. Where the daemon can, it is done as the
// agent of other services does it: with root's rights inside, and what is made
// belongs to the user.
type agent struct {
	sandbox.Files
	attrs sandbox.AgentFiles // nil where there is none
	as    string             // who the work is done as
	named string             // whom it is for
}

// agent returns the file work of whom the request names; name is used where
// it names nobody in its header.
func (c *call) agent(name string) (*agent, error) {
	f, err := c.m.Files(c.ctx(), c.ref)
	if err != nil {
		return nil, err
	}
	a := &agent{Files: f, as: name, named: name}
	if name == "" {
		// The account is looked up with the first use.
		home, err := c.homeOf(f, defaultUser)
		if err != nil {
			return nil, err
		}
		if home != "" {
			a.as, a.named = defaultUser, defaultUser
		}
	}
	if af, ok := f.(sandbox.Agents); ok {
		a.attrs = af.Agent(a.named)
		a.Files, a.as = a.attrs, ""
	}
	return a, nil
}

// homeOf finds a user's home in the sandbox's own list; without a name the
// sandbox's default user is meant. It is empty where there is no such user.
func (c *call) homeOf(f sandbox.Files, name string) (string, error) {
	const most = 1 << 20
	_, r, err := f.Read(c.ctx(), "", "/etc/passwd", 0, most)
	switch {
	case errors.Is(sandbox.ClassOf(err), sandbox.ErrNotFound):
		return "", nil
	case err != nil:
		return "", err
	}
	defer r.Close()
	text, err := io.ReadAll(io.LimitReader(r, most))
	if err != nil {
		return "", err
	}
	if name == "" {
		name = c.box.Spec.User
	}
	name, _, _ = strings.Cut(name, ":")
	if name == "" {
		name = "root"
	}
	for line := range strings.Lines(string(text)) {
		field := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(field) >= 7 && (field[0] == name || field[2] == name) {
			if !path.IsAbs(field[5]) {
				return "/", nil
			}
			return path.Clean(field[5]), nil
		}
	}
	return "", nil
}

// absolute makes a path of a client's absolute: what does not begin with a
// slash is beneath the user's home, as is what begins with ~; an empty one is
// the home.
func (c *call) absolute(user, p string) (string, error) {
	if err := sandbox.ValidateFilePath("/" + p); err != nil {
		return "", err
	}
	if path.IsAbs(p) {
		return path.Clean(p), nil
	}
	rest, tilde := strings.CutPrefix(p, "~")
	if tilde && rest != "" && rest[0] != '/' {
		return "", rpcErrorf(codeInvalidArgument, "path %.200q: the home of another user is not known, write it out", p)
	}
	f, err := c.m.Files(c.ctx(), c.ref)
	if err != nil {
		return "", err
	}
	home, err := c.homeOf(f, user)
	if err != nil {
		return "", err
	}
	if home == "" {
		home = "/"
	}
	return path.Join(home, rest), nil
}

// work is what most methods begin with: whose file work, and where.
func (c *call) work(p string) (*agent, string, error) {
	a, err := c.agent(c.user())
	if err != nil {
		return nil, "", err
	}
	p, err = c.absolute(a.named, p)
	return a, p, err
}

func (c *call) stat(req pathRequest) (any, error) {
	a, p, err := c.work(req.Path)
	if err != nil {
		return nil, err
	}
	info, err := a.Stat(c.ctx(), a.as, p)
	if err != nil {
		return nil, err
	}
	return entryMessage{entryOf(info)}, nil
}

// makeDir makes a directory; one that is there is an error of its own.
func (c *call) makeDir(req pathRequest) (any, error) {
	a, p, err := c.work(req.Path)
	if err != nil {
		return nil, err
	}
	switch info, err := a.through(c.ctx(), p); {
	case errors.Is(sandbox.ClassOf(err), sandbox.ErrNotFound):
	case err != nil:
		return nil, err
	case info.Type == sandbox.FileDir:
		return nil, rpcErrorf(codeAlreadyExists, "directory already exists: %s", p)
	default:
		return nil, rpcErrorf(codeInvalidArgument, "path already exists but it is not a directory: %s", p)
	}
	info, err := a.Mkdir(c.ctx(), a.as, p, 0o755)
	if err != nil {
		return nil, err
	}
	return entryMessage{entryOf(info)}, nil
}

// through describes what a path leads to, over links.
func (a *agent) through(ctx context.Context, p string) (sandbox.FileInfo, error) {
	info, err := a.Stat(ctx, a.as, p)
	if err == nil && info.Type == sandbox.FileSymlink && info.Leads != nil {
		info.Type = info.Leads.Type
	}
	return info, err
}

func (c *call) move(req moveRequest) (any, error) {
	a, from, err := c.work(req.Source)
	if err != nil {
		return nil, err
	}
	to, err := c.absolute(a.named, req.Destination)
	if err != nil {
		return nil, err
	}
	if _, err := a.Stat(c.ctx(), a.as, from); err != nil {
		return nil, err
	}
	// Its directory is made as the user's where it is missing.
	if _, err := a.Mkdir(c.ctx(), a.as, path.Dir(to), 0o755); err != nil {
		return nil, err
	}
	if err := a.Move(c.ctx(), a.as, from, to); err != nil {
		return nil, err
	}
	info, err := a.Stat(c.ctx(), a.as, to)
	if err != nil {
		return nil, err
	}
	return entryMessage{entryOf(info)}, nil
}

func (c *call) listDir(req listRequest) (any, error) {
	a, p, err := c.work(req.Path)
	if err != nil {
		return nil, err
	}
	depth := int(min(max(req.Depth, 1), 1<<20))
	list := api.NewItemWriter(c.w, "entries")
	err = a.Each(c.ctx(), a.as, p, depth, func(info sandbox.FileInfo) error { return list.Add(entryOf(info)) })
	switch {
	case err != nil && list.Begun():
		panic(http.ErrAbortHandler)
	case err != nil:
		return nil, err
	}
	_ = list.End() // the client may be gone
	return answered{}, nil
}

// remove removes whatever stands at a path; nothing there is fine.
func (c *call) remove(req pathRequest) (any, error) {
	a, p, err := c.work(req.Path)
	if err != nil {
		return nil, err
	}
	err = a.Remove(c.ctx(), a.as, p, true)
	if errors.Is(sandbox.ClassOf(err), sandbox.ErrNotFound) {
		err = nil
	}
	return emptyMessage{}, err
}
