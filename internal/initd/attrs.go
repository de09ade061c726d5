package initd

import (
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// What an agent wants to know of a file and set on it: see sandbox.Agents.

const (
	attrNamespace = "user." // the only one a user may write to, xattr(7)
	maxAttrs      = 64
	maxAttrBytes  = 16 << 10 // of one file's, names and values
)

// names returns the names of users for files that are about to be described.
func (j *fileJob) names() names {
	n := loadNames()
	n.atLength = j.args.Owner != ""
	return n
}

// tellMore adds what a link leads to, and the attributes of anything else. It
// leaves out what cannot be read.
func tellMore(info *sandbox.FileInfo, fd int) {
	if info.Type == sandbox.FileSymlink {
		info.Leads = linkEnd(info.Path)
		return
	}
	if info.Type == sandbox.FileRegular || info.Type == sandbox.FileDir {
		info.Attrs = attrsOf(fd)
	}
}

// linkEnd follows a link by the calling thread's rights.
func linkEnd(name string) *sandbox.LinkEnd {
	fd, err := open(name, unix.O_PATH)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil
	}
	end, err := nameOf(fd)
	if err != nil {
		return nil
	}
	info := infoOf(&st, end, &names{})
	return &sandbox.LinkEnd{Path: end, Type: info.Type, Mode: info.Mode}
}

// attrsOf reads the attributes of the user.
func attrsOf(fd int) map[string]string {
	n, err := listAttrs(fd, nil)
	if err != nil || n <= 0 || n > maxAttrBytes {
		return nil
	}
	list := make([]byte, n)
	if n, err = listAttrs(fd, list); err != nil {
		return nil
	}
	var attrs map[string]string
	left := maxAttrBytes
	for attr := range strings.SplitSeq(string(list[:n]), "\x00") {
		if !strings.HasPrefix(attr, attrNamespace) || len(attrs) >= maxAttrs {
			continue
		}
		value := make([]byte, left)
		k, err := getAttr(fd, attr, value)
		if err != nil {
			continue
		}
		if attrs == nil {
			attrs = make(map[string]string)
		}
		attrs[attr] = string(value[:k])
		left -= k
	}
	return attrs
}

// setAttrs adds attributes to a regular file.
func (j *fileJob) setAttrs() error {
	size := 0
	for name, value := range j.args.Attrs {
		if !strings.HasPrefix(name, attrNamespace) || len(name) == len(attrNamespace) || strings.ContainsRune(name, 0) {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_attribute", "attribute %.60q: its name begins with %s", name, attrNamespace)
		}
		size += len(name) + len(value)
	}
	if len(j.args.Attrs) > maxAttrs || size > maxAttrBytes {
		return sandbox.Errorf(sandbox.ErrTooLarge, "attributes_too_large", "%d attributes of %d bytes: at most %d of %d", len(j.args.Attrs), size, maxAttrs, maxAttrBytes)
	}
	err := j.as(func() error {
		fd, err := open(j.args.Path, unix.O_PATH)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFREG {
			return notRegular(j.args.Path)
		}
		if err := refuseKernelFS(fd); err != nil {
			return err
		}
		for name, value := range j.args.Attrs {
			if err := setAttr(fd, name, value); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fileError("setting attributes of", j.args.Path, err)
	}
	return j.c.reply(struct{}{})
}
