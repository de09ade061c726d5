//go:build root

package rootfs

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The limits and the layer below that hostile layers meet.
var (
	hostileConfig = Config{ImportMaxBytes: 64 << 20, ImportMaxFiles: 300, BestEffort: true}
	hostileBase   = []tarEntry{
		{name: "d/"},
		{name: "d/low", data: "low"},
		{name: "d/sub/low", data: "low"},
		{name: "f", data: "low"},
		{name: "etc/passwd", data: "root"},
		{name: "dl", link: "d"},
	}
)

// layerCase is a hostile or an odd layer. It is refused with a code, or taken
// and then shows what want says, stacked on hostileBase; see show.
type layerCase struct {
	name    string
	entries []tarEntry
	stream  func(t testing.TB) []byte // instead of entries
	code    string
	want    map[string]string
}

func hardLink(name, to string) tarEntry {
	return tarEntry{name: name, link: to, kind: tar.TypeLink}
}

const (
	capV3 = "\x01\x00\x00\x03\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xe8\x03\x00\x00"
	capV1 = "\x01\x00\x00\x01\x00\x20\x00\x00\x00\x00\x00\x00"
)

// badNames: where an entry may not go.
var badNames = []layerCase{
	{name: "climbs out", code: "image_bad_path", entries: []tarEntry{{name: "../x"}}},
	{name: "climbs out in the middle", code: "image_bad_path", entries: []tarEntry{{name: "a/../../x"}}},
	{name: "climbs and comes back", code: "image_bad_path", entries: []tarEntry{{name: "a/"}, {name: "a/../b"}}},
	{name: "absolute and climbs", code: "image_bad_path", entries: []tarEntry{{name: "/../../x"}}},
	{name: "is dotdot", code: "image_bad_path", entries: []tarEntry{{name: "..", kind: tar.TypeDir}}},
	{name: "ends in dotdot", code: "image_bad_path", entries: []tarEntry{{name: "d/.."}}},
	{name: "long name climbs", code: "image_bad_path", entries: []tarEntry{{name: strings.Repeat("x/", 60) + strings.Repeat("../", 62) + "x"}}},
	{name: "pax path climbs", code: "image_bad_path", stream: paxStream("path", "../x")},
	{name: "control: dots in names", entries: []tarEntry{{name: "..x"}, {name: "x..", data: "1"}, {name: "..."}}, want: map[string]string{"x..": "file 644 1"}},
	{name: "absolute", entries: []tarEntry{{name: "/new", data: "in"}, {name: "//etc//./passwd", data: "in"}}, want: map[string]string{"new": "file 644 in", "etc/passwd": "file 644 in"}},
	{name: "no name", code: "image_bad_path", entries: []tarEntry{{name: ""}}},
	{name: "root is a file", code: "image_bad_path", entries: []tarEntry{{name: "."}}},
	{name: "root is a link", code: "image_bad_path", entries: []tarEntry{{name: "./", link: "/tmp", kind: tar.TypeSymlink}}},
	{name: "control: root", entries: []tarEntry{{name: "./", mode: 0o711}}, want: map[string]string{".": "dir 711 d dl etc f"}},
	{name: "component too long", code: "image_bad_path", entries: []tarEntry{{name: strings.Repeat("n", 256)}}},
	{name: "deletion too long", code: "image_bad_path", entries: []tarEntry{{name: ".wh." + strings.Repeat("n", 256)}}},
	{name: "control: component", entries: []tarEntry{{name: strings.Repeat("n", 255), data: "1"}, {name: ".wh." + strings.Repeat("m", 255)}}, want: map[string]string{strings.Repeat("n", 255): "file 644 1"}},
	{name: "path too long", code: "image_bad_path", entries: []tarEntry{{name: strings.Repeat("dddddddd/", 456) + "x"}}},
	{name: "too deep", code: "image_bad_path", entries: []tarEntry{{name: strings.Repeat("d/", 256) + "x"}}},
	{name: "control: deep", entries: []tarEntry{{name: strings.Repeat("q/", 255) + "x", data: "1"}}, want: map[string]string{strings.Repeat("q/", 255) + "x": "file 644 1"}},
	{name: "not UTF-8", entries: []tarEntry{{name: "\xff\xfe", data: "1"}}, want: map[string]string{"\xff\xfe": "file 644 1"}},
	{name: "zero byte in a pax path", code: "image_bad_format", stream: paxStream("path", "a\x00b")},
}

// badLinks: entries that lead elsewhere.
var badLinks = []layerCase{
	{name: "through a link out", code: "image_bad_path", entries: []tarEntry{{name: "l", link: "../.."}, {name: "l/x"}}},
	{name: "through an absolute link", code: "image_bad_path", entries: []tarEntry{{name: "l", link: "/tmp"}, {name: "l/x"}}},
	{name: "through a link within", code: "image_bad_path", entries: []tarEntry{{name: "n/"}, {name: "l", link: "n"}, {name: "l/x"}}},
	{name: "through a chain", code: "image_bad_path", entries: []tarEntry{{name: "a", link: ".."}, {name: "b", link: "a"}, {name: "b/x"}}},
	{name: "directory through a link", code: "image_bad_path", entries: []tarEntry{{name: "l", link: "/tmp"}, {name: "l/x/"}}},
	{name: "directory made a link, then through it", code: "image_bad_path", entries: []tarEntry{{name: "n/"}, {name: "n", link: "/tmp"}, {name: "n/x"}}},
	{name: "through a file", code: "image_bad_path", entries: []tarEntry{{name: "n"}, {name: "n/x"}}},
	{name: "through a pipe", code: "image_bad_path", entries: []tarEntry{{name: "n", kind: tar.TypeFifo}, {name: "n/x"}}},
	{name: "deletes through a link", code: "image_bad_path", entries: []tarEntry{{name: "l", link: "/etc"}, {name: "l/.wh.passwd"}}},
	{name: "opaque through a link", code: "image_bad_path", entries: []tarEntry{{name: "l", link: "d"}, {name: "l/.wh..wh..opq"}}},
	{name: "link of the layer below", entries: []tarEntry{{name: "dl/x", data: "1"}}, want: map[string]string{"dl": "dir 755 x", "d": "dir 755 low sub"}},
	{name: "target too long", code: "image_bad_path", entries: []tarEntry{{name: "l", link: strings.Repeat("t", 4096)}}},
	{name: "no target", code: "image_bad_path", entries: []tarEntry{{name: "l", kind: tar.TypeSymlink}}},
	{name: "control: targets", entries: []tarEntry{{name: "a", link: "/etc/shadow"}, {name: "b", link: "../../.."}, {name: "c", link: strings.Repeat("t", 1023)}}, want: map[string]string{"a": "link /etc/shadow", "b": "link ../../.."}},
	{name: "control: link, then a directory", entries: []tarEntry{{name: "n", link: "/tmp"}, {name: "n/"}, {name: "n/x", data: "in"}}, want: map[string]string{"n/x": "file 644 in"}},
	{name: "hard link out", code: "image_bad_path", entries: []tarEntry{hardLink("h", "../../../../etc/passwd")}},
	{name: "hard link to an absolute name", code: "image_bad_path", entries: []tarEntry{hardLink("h", "/etc/passwd")}},
	{name: "hard link to nothing", code: "image_bad_path", entries: []tarEntry{hardLink("h", "gone")}},
	{name: "hard link to a later entry", code: "image_bad_path", entries: []tarEntry{hardLink("h", "n"), {name: "n"}}},
	{name: "hard link to the layer below", code: "image_bad_path", entries: []tarEntry{hardLink("h", "f")}},
	{name: "hard link to a directory", code: "image_bad_path", entries: []tarEntry{{name: "n/"}, hardLink("h", "n")}},
	{name: "hard link to the root", code: "image_bad_path", entries: []tarEntry{hardLink("h", ".")}},
	{name: "hard link through a link", code: "image_bad_path", entries: []tarEntry{{name: "l", link: "/etc"}, hardLink("h", "l/passwd")}},
	{name: "hard link under a link", code: "image_bad_path", entries: []tarEntry{{name: "n"}, {name: "l", link: "/tmp"}, hardLink("l/h", "n")}},
	{name: "hard link to a mark", code: "image_bad_path", entries: []tarEntry{{name: ".wh.f"}, hardLink("h", ".wh.f")}},
	{name: "hard link to what is deleted", code: "image_bad_path", entries: []tarEntry{{name: ".wh.f"}, hardLink("h", "f")}},
	{name: "hard link to a device", code: "image_bad_path", entries: []tarEntry{{name: "null", kind: tar.TypeChar}, hardLink("h", "null")}},
	{name: "hard link over a filled directory", code: "image_bad_path", entries: []tarEntry{{name: "n/x"}, {name: "y"}, hardLink("n", "y")}},
	{name: "control: hard links", entries: []tarEntry{{name: "n", data: "1"}, hardLink("h", "/n"), hardLink("n", "n"), {name: "l", link: "/etc/passwd"}, hardLink("hl", "l")}, want: map[string]string{"h": "file 644 1", "hl": "link /etc/passwd"}},
	{name: "link over a filled directory", code: "image_bad_path", entries: []tarEntry{{name: "n/x"}, {name: "n", link: "/tmp"}}},
	{name: "file over a filled directory", code: "image_bad_path", entries: []tarEntry{{name: "n/x"}, {name: "n"}}},
	{name: "pipe over a filled directory", code: "image_bad_path", entries: []tarEntry{{name: "n/x"}, {name: "n", kind: tar.TypeFifo}}},
	{name: "control: file over an empty directory", entries: []tarEntry{{name: "n/"}, {name: "n", data: "1"}}, want: map[string]string{"n": "file 644 1"}},
	{name: "named twice", entries: []tarEntry{{name: "n", data: "1", mode: 0o600}, {name: "n", data: "2"}, {name: "m/", pax: xattrs("user.a", "1")}, {name: "m/", mode: 0o700}}, want: map[string]string{"n": "file 644 2", "m": "dir 700"}},
}

// badMarks: deletion marks that delete nothing an image may delete.
var badMarks = []layerCase{
	{name: "deletes nothing", code: "image_bad_path", entries: []tarEntry{{name: ".wh."}}},
	{name: "deletes the root", code: "image_bad_path", entries: []tarEntry{{name: ".wh.."}}},
	{name: "deletes dotdot", code: "image_bad_path", entries: []tarEntry{{name: ".wh..."}}},
	{name: "deletes nothing, deeper", code: "image_bad_path", entries: []tarEntry{{name: "d/.wh."}}},
	{name: "beneath a mark", code: "image_bad_path", entries: []tarEntry{{name: ".wh.d/x"}}},
	{name: "mark of dots", code: "image_bad_path", entries: []tarEntry{{name: ".wh.d/../f"}}},
	{name: "control: deletes", entries: []tarEntry{{name: ".wh.f"}, {name: "d/.wh.low"}, {name: "d/.wh..hidden"}}, want: map[string]string{"f": "none", "d": "dir 755 sub"}},
	{name: "mark with content and ids", entries: []tarEntry{{name: ".wh.f", data: strings.Repeat("x", 9999), uid: 1 << 20}}, want: map[string]string{"f": "none"}},
	{name: "mark that is a link", entries: []tarEntry{{name: ".wh.f", link: "/etc"}, hardLink(".wh.d", "nothing")}, want: map[string]string{"f": "none", "d": "none"}},
	{name: "mark that is a device", entries: []tarEntry{{name: ".wh.f", kind: tar.TypeChar}}, want: map[string]string{"f": "none"}},
	{name: "aufs", entries: []tarEntry{{name: ".wh..wh.aufs"}, {name: ".wh..wh.plnk/", mode: 0o700}, {name: ".wh..wh.plnk/5.6", data: "x"}, {name: "d/.wh..wh.x"}}, want: map[string]string{".": "dir 755 d dl etc f", "d": "dir 755 low sub"}},
	{name: "opaque that is a directory", entries: []tarEntry{{name: "d/.wh..wh..opq/", kind: tar.TypeDir}, {name: "d/.wh..wh..opq/x", data: "x"}}, want: map[string]string{"d": "dir 755"}},
	{name: "opaque root", entries: []tarEntry{{name: ".wh..wh..opq"}}, want: map[string]string{".": "dir 755"}},
	{name: "deletes in what is opaque", entries: []tarEntry{{name: "d/.wh.n"}, {name: "d/.wh..wh..opq"}, {name: "d/s/.wh.n"}, {name: "d/s/x"}}, want: map[string]string{"d": "dir 755 s", "d/s": "dir 755 x"}},
	{name: "deletes in what is not there", entries: []tarEntry{{name: "new/deep/.wh.x"}}, want: map[string]string{"new": "dir 755 deep", "new/deep": "dir 755"}},
	{name: "deletes in what was a file or a link", entries: []tarEntry{{name: "f/deep/.wh.x"}, {name: "dl/.wh.low"}, {name: "dl/y"}}, want: map[string]string{"f": "dir 755 deep", "f/deep": "dir 755", "dl": "dir 755 y", "d": "dir 755 low sub"}},
	{name: "deletes proc", entries: []tarEntry{{name: ".wh.proc"}}, want: map[string]string{"proc": "none"}}, // and Mount refuses: TestSkeleton
	{name: "overlay's own mark", entries: []tarEntry{{name: "f", kind: tar.TypeChar}, {name: "d", kind: tar.TypeChar, mode: 0}}, want: map[string]string{"f": "file 644 low", "d": "dir 755 low sub"}},
}

// badMeta: owners, modes, kinds, times and attributes.
var badMeta = []layerCase{
	{name: "uid too high", code: "image_bad_id", entries: []tarEntry{{name: "x", uid: 65536}}},
	{name: "uid of 2^31", code: "image_bad_id", entries: []tarEntry{{name: "x", uid: 1 << 31}}},
	{name: "gid too high", code: "image_bad_id", entries: []tarEntry{{name: "x/", gid: 1 << 30}}},
	{name: "uid below zero", code: "image_bad_id", entries: []tarEntry{{name: "x", uid: -1}}},
	{name: "gid of a link too high", code: "image_bad_id", entries: []tarEntry{{name: "x", link: "y", gid: 65536}}},
	{name: "ACL of an id too high", code: "image_bad_id", entries: []tarEntry{{name: "x", mode: 0o750, pax: xattrs(xattrACL, strings.Replace(aclAccess, "\xe8\x03\x00\x00", "\x00\x00\x01\x00", 1))}}},
	{name: "control: ids and ACL", entries: []tarEntry{{name: "x", uid: 65535, gid: 65535, mode: 0o750, data: "1", pax: xattrs(xattrACL, aclAccess)}}, want: map[string]string{"x": "file 750 1 " + xattrACL}},
	{name: "ACL that is none", code: "image_bad_format", entries: []tarEntry{{name: "x", pax: xattrs(xattrACL, "\x02\x00\x00\x00\x01\x00\x07")}}},
	{name: "default ACL is not handed down", entries: []tarEntry{{name: "x/", mode: 0o750, pax: xattrs(xattrDefaultACL, aclAccess)}, {name: "x/f", data: "1"}, {name: "x/s/"}, {name: "x/i/f", data: "2"}}, want: map[string]string{"x": "dir 750 f i s " + xattrDefaultACL, "x/f": "file 644 1", "x/s": "dir 755", "x/i": "dir 755 f", "x/i/f": "file 644 2"}},
	{name: "set-id", entries: []tarEntry{{name: "su", mode: 0o4755, data: "1"}, {name: "sg", mode: 0o2711, data: "2"}, {name: "t/", mode: 0o3777}}, want: map[string]string{"su": "file 4755 1", "sg": "file 2711 2", "t": "dir 3777"}},
	{name: "more mode bits than there are", entries: []tarEntry{{name: "x", mode: 0o777644, data: "1"}}, want: map[string]string{"x": "file 7644 1"}},
	{name: "file capabilities", entries: []tarEntry{{name: "x", data: "1", pax: xattrs(xattrCapability, capV2)}}, want: map[string]string{"x": "file 644 1 " + xattrCapability}},
	{name: "file capabilities of a namespace", entries: []tarEntry{{name: "x", data: "1", pax: xattrs(xattrCapability, capV3)}}, want: map[string]string{"x": "file 644 1 " + xattrCapability}},
	{name: "file capabilities of old", code: "image_bad_format", entries: []tarEntry{{name: "x", pax: xattrs(xattrCapability, capV1)}}},
	{name: "file capabilities of nonsense", code: "image_bad_format", entries: []tarEntry{{name: "x", pax: xattrs(xattrCapability, "all")}}},
	{name: "devices", entries: []tarEntry{{name: "null", kind: tar.TypeChar}, {name: "sda", kind: tar.TypeBlock}, {name: "n", data: "1"}}, want: map[string]string{"null": "none", "sda": "none", "n": "file 644 1"}},
	{name: "pipe", entries: []tarEntry{{name: "p", kind: tar.TypeFifo, mode: 0o620}}, want: map[string]string{"p": "pipe 620"}},
	{name: "unknown kind", code: "image_bad_format", entries: []tarEntry{{name: "x", kind: 'Z'}}},
	{name: "proc, sys and dev are links", entries: []tarEntry{{name: "proc", link: "/etc"}, {name: "sys", link: "d"}, {name: "dev"}}, want: map[string]string{"proc": "link /etc", "dev": "file 644 "}}, // and Mount refuses: TestSkeleton
	{name: "times beyond all", entries: []tarEntry{{name: "a", mtime: time.Unix(1<<40, 0), data: "1"}, {name: "b/", mtime: time.Unix(-1<<40, 5)}, {name: "c", link: "x", mtime: time.Unix(1<<33, 0)}}, want: map[string]string{"a": "file 644 1", "b": "dir 755", "c": "link x"}},
	{name: "overlay: opaque", entries: []tarEntry{{name: "d/", pax: xattrs(overlayOpaque, "y")}}, want: map[string]string{"d": "dir 755 low sub"}},
	{name: "overlay: opaque x", entries: []tarEntry{{name: "d/", pax: xattrs(overlayOpaque, "x")}, {name: "d/low", pax: xattrs("trusted.overlay.whiteout", "y")}}, want: map[string]string{"d": "dir 755 low sub", "d/low": "file 644 "}},
	{name: "overlay: redirect", entries: []tarEntry{{name: "r/", pax: xattrs("trusted.overlay.redirect", "/etc")}}, want: map[string]string{"r": "dir 755"}},
	{name: "overlay: metacopy", entries: []tarEntry{{name: "m", data: "1", pax: xattrs("trusted.overlay.metacopy", "", "trusted.overlay.redirect", "/etc/passwd")}}, want: map[string]string{"m": "file 644 1"}},
	{name: "overlay: escaped", entries: []tarEntry{{name: "d/", pax: xattrs("trusted.overlay.overlay.opaque", "y", "trusted.anything", "1")}}, want: map[string]string{"d": "dir 755 low sub"}},
	{name: "overlay: by libarchive", entries: []tarEntry{{name: "d/", pax: map[string]string{"LIBARCHIVE.xattr.trusted.overlay.opaque": "eQ=="}}}, want: map[string]string{"d": "dir 755 low sub"}},
	{name: "overlay: by libarchive, escaped", entries: []tarEntry{{name: "d/", pax: map[string]string{"LIBARCHIVE.xattr.trusted%2Eoverlay%2Eopaque": "eQ=="}}}, want: map[string]string{"d": "dir 755 low sub"}},
	{name: "overlay: of users", entries: []tarEntry{{name: "d/", pax: xattrs("user.overlay.opaque", "y")}}, want: map[string]string{"d": "dir 755 low sub user.overlay.opaque"}},
	{name: "labels", entries: []tarEntry{{name: "x", data: "1", pax: xattrs("security.selinux", "u:r:t", "security.ima", "\x03", "system.nfs4_acl", "x", "nonsense", "x")}}, want: map[string]string{"x": "file 644 1"}},
	{name: "attributes where none can be", entries: []tarEntry{{name: "l", link: "x", pax: xattrs("user.a", "1")}, {name: "p", kind: tar.TypeFifo, pax: xattrs("user.a", "1")}}, want: map[string]string{"l": "link x", "p": "pipe 644"}},
	{name: "attribute too large", code: "image_too_large", entries: []tarEntry{{name: "x", pax: xattrs("user.a", strings.Repeat("x", 65537))}}},
	{name: "attribute's name too long", code: "image_bad_format", entries: []tarEntry{{name: "x", pax: xattrs("user."+strings.Repeat("n", 256), "1")}}},
	{name: "attribute without a name", code: "image_bad_format", entries: []tarEntry{{name: "x", pax: xattrs("user.", "1")}}},
	{name: "control: attribute", entries: []tarEntry{{name: "x", data: "1", pax: xattrs("user."+strings.Repeat("n", 250), strings.Repeat("x", 2000))}}, want: map[string]string{"x": "file 644 1 user." + strings.Repeat("n", 250)}},
}

// paxStream is a layer whose one entry has a pax record the library refuses
// to write.
func paxStream(key, value string) func(t testing.TB) []byte {
	return func(t testing.TB) []byte {
		record := func(n int) string { return fmt.Sprintf("%d %s=%s\n", n, key, value) }
		n := len(record(10))
		for len(record(n)) != n {
			n = len(record(n))
		}
		head := tarBytes(t, tarEntry{name: "PaxHeaders/x", kind: tar.TypeReg, data: record(n)})
		head[156] = tar.TypeXHeader
		fixSum(head)
		return append(head[:len(head)-1024], tarBytes(t, tarEntry{name: "x", data: "1"})...)
	}
}

// fixSum sets the checksum of the first header.
func fixSum(b []byte) {
	copy(b[148:], "        ")
	var sum int64
	for _, c := range b[:512] {
		sum += int64(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
}

func patched(at int, with string, entries ...tarEntry) func(t testing.TB) []byte {
	return func(t testing.TB) []byte {
		b := tarBytes(t, entries...)
		copy(b[at:], with)
		fixSum(b)
		return b
	}
}

func sparse(size int64, stored int64, regions ...[2]int64) func(t testing.TB) []byte {
	return func(t testing.TB) []byte {
		var b bytes.Buffer
		if err := writeSparseAs(&b, size, regions, stored); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
}

// badStreams: what is wrong below the level of entries.
var badStreams = []layerCase{
	{name: "empty", code: "image_truncated", stream: func(testing.TB) []byte { return nil }},
	{name: "control: no entries", stream: func(testing.TB) []byte { return make([]byte, 1024) }, want: map[string]string{".": "dir 755 d dl etc f"}},
	{name: "control: no end mark", stream: func(t testing.TB) []byte { b := tarBytes(t, tarEntry{name: "x", data: "1"}); return b[:len(b)-1024] }, want: map[string]string{"x": "file 644 1"}},
	{name: "cut in a header", code: "image_truncated", stream: func(t testing.TB) []byte { return tarBytes(t, tarEntry{name: "x"})[:300] }},
	{name: "cut in content", code: "image_truncated", stream: func(t testing.TB) []byte {
		return tarBytes(t, tarEntry{name: "x", data: strings.Repeat("x", 5000)})[:2000]
	}},
	{name: "two archives", code: "image_bad_format", stream: func(t testing.TB) []byte {
		return append(tarBytes(t, tarEntry{name: "x"}), tarBytes(t, tarEntry{name: "../x"})...)
	}},
	{name: "text behind", code: "image_bad_format", stream: func(t testing.TB) []byte { return append(tarBytes(t, tarEntry{name: "x"}), "tail"...) }},
	{name: "control: zeroes behind", stream: func(t testing.TB) []byte {
		return append(tarBytes(t, tarEntry{name: "x", data: "1"}), make([]byte, 10240)...)
	}, want: map[string]string{"x": "file 644 1"}},
	{name: "text", code: "image_bad_format", stream: func(testing.TB) []byte { return bytes.Repeat([]byte("hello world\n"), 100) }},
	{name: "checksum", code: "image_bad_format", stream: func(t testing.TB) []byte { b := tarBytes(t, tarEntry{name: "x"}); b[0] = 'y'; return b }},
	{name: "size below zero", code: "image_bad_format", stream: patched(124, "-0000000001\x00", tarEntry{name: "x"})},
	{name: "size below zero, base 256", code: "image_bad_format", stream: patched(124, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", tarEntry{name: "x"})},
	{name: "size below zero, pax", code: "image_bad_format", stream: paxStream("size", "-1")},
	{name: "size beyond all", code: "image_too_large", stream: patched(124, "\x80\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff", tarEntry{name: "x"})},
	{name: "files too large together", code: "image_too_large", entries: slices.Repeat([]tarEntry{{name: "x", data: strings.Repeat("x", 8<<20)}}, 9)},
	{name: "too many entries", code: "image_too_large", entries: slices.Repeat([]tarEntry{{name: "x"}}, 301)},
	{name: "too many deletions", code: "image_too_large", entries: slices.Repeat([]tarEntry{{name: ".wh.x"}}, 301)},
	{name: "too many implied directories", code: "image_too_large", entries: []tarEntry{{name: strings.Repeat("d/", 200) + "x"}, {name: strings.Repeat("e/", 200) + "x"}}},
	{name: "control: entries", entries: slices.Repeat([]tarEntry{{name: "x", data: "1"}}, 300), want: map[string]string{"x": "file 644 1"}},
	{name: "headers without end", code: "image_too_large", stream: func(t testing.TB) []byte { return bytes.Repeat(tarBytes(t, tarEntry{name: "x"})[:512], 400) }},
	{name: "pax too large", code: "image_bad_format", stream: paxStream("SCHILY.xattr.user.x", strings.Repeat("x", 1<<20+1))},
	{name: "pax record that lies", code: "image_bad_format", stream: func(t testing.TB) []byte {
		b := tarBytes(t, tarEntry{name: "p", data: "999 path=x\n"}, tarEntry{name: "x"})
		b[156] = tar.TypeXHeader
		fixSum(b)
		return b
	}},
	{name: "pax without an entry", stream: func(t testing.TB) []byte { return paxStream("path", "x")(t)[:1024] }, want: map[string]string{"x": "none"}},
	{name: "sparse map beyond the size", code: "image_bad_format", stream: sparse(1000, 512, [2]int64{1 << 20, 512})},
	{name: "sparse map backwards", code: "image_bad_format", stream: sparse(1<<20, 1024, [2]int64{8192, 512}, [2]int64{0, 512})},
	{name: "sparse map overlaps", code: "image_bad_format", stream: sparse(1<<20, 1024, [2]int64{0, 1024}, [2]int64{512, 512})},
	{name: "sparse map below zero", code: "image_bad_format", stream: sparse(1<<20, 512, [2]int64{-512, 512})},
	{name: "sparse map of more than is there", code: "image_bad_format", stream: sparse(1<<20, 512, [2]int64{0, 4096})},
	{name: "sparse size beyond all", code: "image_too_large", stream: sparse(1<<50, 512, [2]int64{0, 512})},
	{name: "control: sparse", stream: sparse(32<<20, 512, [2]int64{32<<20 - 512, 512}), want: map[string]string{"hole": "hole 644"}},
	{name: "gzip bomb", code: "image_too_large", stream: func(t testing.TB) []byte { return gzipped(t, make([]byte, 80<<20)) }},
	{name: "zstd bomb", code: "image_too_large", stream: func(t testing.TB) []byte { return zstded(t, make([]byte, 80<<20)) }},
	{name: "gzip of no archive", code: "image_bad_format", stream: func(t testing.TB) []byte { return gzipped(t, bytes.Repeat([]byte("no tar "), 100)) }},
}

// xfsACL begins the names under which XFS shows ACLs a second time.
const xfsACL = "trusted.SGI_ACL_"

// show says what a path of a view is: its kind, its mode, and what it holds.
func show(t testing.TB, path string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); errors.Is(err, unix.ENOENT) {
		return "none"
	} else if err != nil {
		t.Fatal(err)
	}
	mode := fmt.Sprintf(" %o", st.Mode&0o7777)
	attrs, err := listXattrs(func(buf []byte) (int, error) { return unix.Llistxattr(path, buf) })
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(attrs)
	more := ""
	for _, a := range attrs {
		if strings.HasPrefix(a, xfsACL) {
			continue
		}
		more += " " + a
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return strings.TrimRight("dir"+mode+" "+names(t, path), " ") + more
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		if err != nil {
			t.Fatal(err)
		}
		return "link " + target + more
	case unix.S_IFIFO:
		return "pipe" + mode + more
	case unix.S_IFREG:
		if st.Size > 1<<20 && st.Blocks*512 < st.Size/2 {
			return "hole" + mode + more
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return "file" + mode + " " + string(b) + more
	}
	return fmt.Sprintf("mode %o", st.Mode)
}

func (c layerCase) bytes(t testing.TB) []byte {
	if c.stream != nil {
		return c.stream(t)
	}
	return tarBytes(t, c.entries...)
}

var hostileLayers = slices.Concat(badNames, badLinks, badMarks, badMeta, badStreams)

// TestHostileLayers imports the tables. What is refused leaves nothing; what
// is taken does nothing but what it should.
func TestHostileLayers(t *testing.T) {
	refused := 0
	cfg := hostileConfig
	cfg.Dir = t.TempDir()
	if err := os.MkdirAll(filepath.Join(cfg.Dir, "volume", layersDir), 0o700); err != nil {
		t.Fatal(err)
	}
	s := openIn(t, cfg)
	base := layerTest(t, s, hostileBase...)
	around := names(t, s.dir) + names(t, s.vol.dir)
	for _, c := range hostileLayers {
		t.Run(c.name, func(t *testing.T) {
			b := c.bytes(t)
			id := diffIDOf(b)
			_, err := s.ImportLayer(t.Context(), id, bytes.NewReader(b))
			if got := names(t, s.vol.path(stagingDir)); got != "" {
				t.Errorf("left in staging: %s", got)
			}
			if got := names(t, s.dir) + names(t, s.vol.dir); got != around {
				t.Errorf("around the layer is now %s, was %s", got, around)
			}
			if c.code != "" {
				refused++
				wantCode(t, err, c.code)
				if s.HasLayer(id) {
					t.Error("refused, and there")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			v := view(t, s, base, id)
			for path, want := range c.want {
				if got := show(t, v+"/"+path); got != want {
					t.Errorf("%.40s is %q, want %q", path, got, want)
				}
			}
			if len(c.want) == 0 {
				t.Error("the row asserts nothing")
			}
		})
	}
	if len(hostileLayers) < 60 || refused < 40 {
		t.Errorf("%d rows, %d refused: the table shrank", len(hostileLayers), refused)
	}
}

// TestHostilePacking covers what is wrong with the compression around a layer,
// or with its name.
func TestHostilePacking(t *testing.T) {
	s := openTest(t)
	good := tarBytes(t, tarEntry{name: "x", data: strings.Repeat("content", 1000)})
	gz, zs := gzipped(t, good), zstded(t, good)
	flipped := bytes.Clone(gz)
	flipped[len(flipped)-6] ^= 1
	half := len(good) / 2
	for _, c := range []struct {
		name, code string
		data       []byte
	}{
		{"gzip cut", "image_truncated", gz[:len(gz)-20]},
		{"gzip cut in its head", "image_truncated", gz[:5]},
		{"gzip cut in its tail", "image_truncated", gz[:len(gz)-3]},
		{"gzip checksum", "image_bad_format", flipped},
		{"text behind gzip", "image_bad_format", append(bytes.Clone(gz), "text behind the end"...)},
		{"zstd cut", "image_truncated", zs[:len(zs)-8]},
		{"zstd of nonsense", "image_bad_format", append([]byte("\x28\xb5\x2f\xfd"), bytes.Repeat([]byte{0xff}, 100)...)},
		{"xz", "image_bad_format", []byte("\xfd7zXZ\x00rest")},
		{"cut between blocks", "image_digest_mismatch", good[:len(good)-1024]},
		{"another layer", "image_digest_mismatch", tarBytes(t, tarEntry{name: "y"})},
		{"the layer twice, gzip", "image_bad_format", append(bytes.Clone(gz), gz...)},
		{"more zeroes", "image_digest_mismatch", gzipped(t, append(bytes.Clone(good), make([]byte, 512)...))},
	} {
		_, err := s.ImportLayer(t.Context(), diffIDOf(good), bytes.NewReader(c.data))
		if err == nil || sandbox.CodeOf(err) != c.code || sandbox.ClassOf(err) == nil {
			t.Errorf("%s: %v, want %s", c.name, err, c.code)
		}
		if s.HasLayer(diffIDOf(good)) || names(t, s.vol.path(stagingDir)) != "" {
			t.Fatalf("%s: something was kept", c.name)
		}
	}
	for name, data := range map[string][]byte{
		"plain": good, "gzip": gz, "zstd": zs,
		"gzip in two members": append(gzipped(t, good[:half]), gzipped(t, good[half:])...),
		"zstd in two frames":  append(zstded(t, good[:half]), zstded(t, good[half:])...),
	} {
		if _, err := s.ImportLayer(t.Context(), diffIDOf(good), bytes.NewReader(data)); err != nil {
			t.Errorf("%s, sound: %v", name, err)
		}
		if err := s.RemoveLayer(diffIDOf(good)); err != nil {
			t.Fatal(err)
		}
	}
}

// FuzzUnpackLayer looks for layers that crash the import, leave the root, or
// unpack to what no layer may hold.
func FuzzUnpackLayer(f *testing.F) {
	for _, c := range hostileLayers {
		if b := c.bytes(f); len(b) < 1<<16 {
			f.Add(b)
		}
	}
	for _, entries := range oddLayers() {
		f.Add(gzipped(f, tarBytes(f, entries...)))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<18 {
			return
		}
		dir := filepath.Join(t.TempDir(), "stage", "root")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		// The name of the layer is known only afterwards: any will do.
		_, err = unpackLayer(t.Context(), root, digestN(0), bytes.NewReader(data), testLimits)
		if err == nil || sandbox.ClassOf(err) == nil {
			t.Errorf("%v: no error, or one without a class", err)
		}
		if got := names(t, filepath.Dir(dir)) + names(t, filepath.Dir(filepath.Dir(dir))); got != "rootstage" {
			t.Fatalf("outside of the root: %s", got)
		}
		err = filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			return soundInLayer(path)
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// soundInLayer refuses what a layer never holds.
func soundInLayer(path string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR, unix.S_IFREG, unix.S_IFLNK, unix.S_IFIFO:
	default:
		if !isWhiteout(&st) {
			return fmt.Errorf("%q has mode %o", path, st.Mode)
		}
	}
	if st.Uid > maxID || st.Gid > maxID {
		return fmt.Errorf("%q belongs to %d:%d", path, st.Uid, st.Gid)
	}
	attrs, err := listXattrs(func(buf []byte) (int, error) { return unix.Llistxattr(path, buf) })
	for _, a := range attrs {
		if !keepsXattr(a) && !strings.HasPrefix(a, xfsACL) && (a != overlayOpaque || st.Mode&unix.S_IFMT != unix.S_IFDIR) {
			return fmt.Errorf("%q has the attribute %s", path, a)
		}
	}
	return err
}
