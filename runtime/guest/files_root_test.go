//go:build root

package guest_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

func readAll(t *testing.T, b *box, user, path string) (string, error) {
	t.Helper()
	_, r, err := b.Read(ctx(t), user, path, 0, -1)
	if err != nil {
		return "", err
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	return string(data), err
}

func TestFilesRoundTrip(t *testing.T) {
	b, dir := newRooted(t)
	big := strings.Repeat("0123456789", 1<<17)
	info, err := b.Write(ctx(t), "alice", "/home/alice/a/b/file", 0o640, strings.NewReader(big))
	if err != nil || info.Size != int64(len(big)) || info.Mode != 0o640 || info.UID != 1000 || info.User != "alice" || info.Type != sandbox.FileRegular {
		t.Fatalf("write: %+v %v", info, err)
	}
	if got, err := readAll(t, b, "", "/home/alice/a/b/file"); err != nil || got != big {
		t.Errorf("read: %d bytes, %v", len(got), err)
	}
	_, r, err := b.Read(ctx(t), "", "/home/alice/a/b/file", 12, 5)
	if err != nil {
		t.Fatal(err)
	}
	if part, err := io.ReadAll(r); err != nil || string(part) != "23456" {
		t.Errorf("part: %q %v", part, err)
	}
	// Replacing keeps mode and owner, and goes through a link.
	if err := os.Symlink("b/file", filepath.Join(dir, "home/alice/a/link")); err != nil {
		t.Fatal(err)
	}
	if info, err = b.Write(ctx(t), "root", "/home/alice/a/link", 0o777, strings.NewReader("new")); err != nil || info.Mode != 0o640 || info.UID != 1000 {
		t.Errorf("replace: %+v %v", info, err)
	}
	if got, _ := readAll(t, b, "", "/home/alice/a/b/file"); got != "new" {
		t.Errorf("through the link: %q", got)
	}
	if info, err := b.Stat(ctx(t), "", "/home/alice/a/link"); err != nil || info.Type != sandbox.FileSymlink || info.Target != "b/file" {
		t.Errorf("stat: %+v %v", info, err)
	}
	if info, err := b.Mkdir(ctx(t), "alice", "/home/alice/x/y", 0o700); err != nil || info.Mode != 0o700 || info.Type != sandbox.FileDir {
		t.Errorf("mkdir: %+v %v", info, err)
	}
	if err := b.Move(ctx(t), "alice", "/home/alice/a/b/file", "/home/alice/x/y/moved"); err != nil {
		t.Error(err)
	}
	if err := b.Chmod(ctx(t), "alice", "/home/alice/x/y/moved", 0o600); err != nil {
		t.Error(err)
	}
	list, err := b.List(ctx(t), "alice", "/home/alice", 3)
	var names []string
	for _, i := range list {
		names = append(names, i.Path)
	}
	if want := "/home/alice/a /home/alice/a/b /home/alice/a/link /home/alice/x /home/alice/x/y /home/alice/x/y/moved"; err != nil || strings.Join(names, " ") != want {
		t.Errorf("list: %v %v", names, err)
	}
	if err := b.Remove(ctx(t), "alice", "/home/alice/x", false); sandbox.CodeOf(err) != "directory_not_empty" {
		t.Errorf("remove of a full directory: %v", err)
	}
	if err := b.Remove(ctx(t), "alice", "/home/alice/x", true); err != nil {
		t.Error(err)
	}
	if _, err := b.Stat(ctx(t), "", "/home/alice/x"); sandbox.CodeOf(err) != "file_not_found" {
		t.Errorf("after remove: %v", err)
	}
}

func TestFilesObeyTheUsersRights(t *testing.T) {
	b, dir := newRooted(t)
	if err := os.WriteFile(filepath.Join(dir, "root/secret"), []byte("s"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readAll(t, b, "alice", "/root/secret"); !errors.Is(sandbox.ClassOf(err), sandbox.ErrForbidden) {
		t.Errorf("alice read root's file: %v", err)
	}
	if got, err := readAll(t, b, "root", "/root/secret"); err != nil || got != "s" {
		t.Errorf("control: %q %v", got, err)
	}
	if _, err := b.Write(ctx(t), "alice", "/etc/passwd", 0, strings.NewReader("x")); !errors.Is(sandbox.ClassOf(err), sandbox.ErrForbidden) {
		t.Errorf("alice wrote /etc: %v", err)
	}
	if err := b.Remove(ctx(t), "alice", "/etc/passwd", false); !errors.Is(sandbox.ClassOf(err), sandbox.ErrForbidden) {
		t.Errorf("alice removed: %v", err)
	}
	if _, err := b.Write(ctx(t), "alice", "/tmp/mine", 0, strings.NewReader("x")); err != nil {
		t.Errorf("control: %v", err)
	}
	if _, err := b.Write(ctx(t), "root", "/usr/bin/evil", 0, strings.NewReader("x")); sandbox.CodeOf(err) != "read_only" {
		t.Errorf("read-only mount: %v", err)
	}
}

func TestFilesOpenOnlyWhatIsAFile(t *testing.T) {
	b, dir := newRooted(t)
	if err := unix.Mkfifo(filepath.Join(dir, "tmp/fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"/tmp/fifo", "/dev/zero", "/dev/null"} {
		if _, err := readAll(t, b, "", p); !errors.Is(sandbox.ClassOf(err), sandbox.ErrInvalid) {
			t.Errorf("read of %s: %v", p, err)
		}
		if _, err := b.Write(ctx(t), "", p, 0, strings.NewReader("x")); !errors.Is(sandbox.ClassOf(err), sandbox.ErrInvalid) {
			t.Errorf("write of %s: %v", p, err)
		}
	}
	for _, p := range []string{"/proc/1/mem", "/proc/1/environ", "/proc/self/maps", "/proc/self/root/etc/passwd", "/proc/self/exe"} {
		if got, err := readAll(t, b, "root", p); err == nil {
			t.Errorf("read %d bytes of %s", len(got), p)
		}
	}
	if _, err := readAll(t, b, "alice", "/proc/meminfo"); err != nil {
		t.Errorf("control: %v", err)
	}
	for _, p := range []string{"/proc/sys/kernel/hostname", "/proc/1/oom_score_adj", "/sys/kernel/x"} {
		if _, err := b.Write(ctx(t), "root", p, 0, strings.NewReader("1")); !errors.Is(sandbox.ClassOf(err), sandbox.ErrForbidden) {
			t.Errorf("write of %s: %v", p, err)
		}
	}
	if _, err := b.Stat(ctx(t), "", "relative"); sandbox.CodeOf(err) != "invalid_path" {
		t.Errorf("relative path: %v", err)
	}
}

type broken struct{ r io.Reader }

func (b broken) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func TestBrokenWriteLeavesTheOldContent(t *testing.T) {
	b, dir := newRooted(t)
	if _, err := b.Write(ctx(t), "", "/tmp/f", 0o600, strings.NewReader("old")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Write(ctx(t), "", "/tmp/f", 0, broken{strings.NewReader(strings.Repeat("new", 1<<18))}); err == nil {
		t.Fatal("a broken stream passed for a whole one")
	}
	if got, err := readAll(t, b, "", "/tmp/f"); err != nil || got != "old" {
		t.Errorf("content %.20q %v", got, err)
	}
	testenv.Eventually(t, 5*time.Second, "the temporary file to go", func() bool {
		left, _ := os.ReadDir(filepath.Join(dir, "tmp"))
		return len(left) == 1
	})
}

func archiveOf(t *testing.T, hs ...*tar.Header) *bytes.Buffer {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range hs {
		body := h.Xattrs["body"] //nolint:staticcheck // a place to carry it
		h.Xattrs = nil           //nolint:staticcheck // see above
		h.Size = int64(len(body))
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &buf
}

func file(name, body string) *tar.Header {
	return &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Xattrs: map[string]string{"body": body}} //nolint:staticcheck // see archiveOf
}

func TestTarRoundTrip(t *testing.T) {
	b, _ := newRooted(t)
	b.sh("mkdir -p /tmp/t/sub && echo hello > /tmp/t/sub/f && chmod 751 /tmp/t/sub/f && ln /tmp/t/sub/f /tmp/t/hard && ln -s sub/f /tmp/t/soft && mkfifo /tmp/t/pipe && touch -d @1000000000 /tmp/t/sub/f && touch -d @10413792000 /tmp/t/sub && chown 1000:44 /tmp/t/sub/f && chmod 500 /tmp/t/sub")
	r, err := b.TarOut(ctx(t), "", "/tmp/t")
	if err != nil {
		t.Fatal(err)
	}
	archive, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.TarIn(ctx(t), "", "/tmp/new/place", bytes.NewReader(archive)); err != nil {
		t.Fatal(err)
	}
	const look = " && find . -printf '%p %y %m %U:%G %l %n\\n' | sort && stat -c %Y sub sub/f && cat soft && test hard -ef sub/f && echo same"
	if want, got := b.sh("cd /tmp/t"+look), b.sh("cd /tmp/new/place/t"+look); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if err := b.TarIn(ctx(t), "alice", "/home/alice/in", bytes.NewReader(archive)); err != nil {
		t.Fatal(err)
	}
	if got := b.sh("stat -c %U:%G /home/alice/in/t/sub/f"); got != "alice:alice" {
		t.Errorf("alice's files belong to %s", got)
	}
	if err := b.TarIn(ctx(t), "", "/tmp/new/place", bytes.NewReader(archive[:len(archive)/2])); err == nil {
		t.Error("half an archive passed for a whole one")
	}
}

func TestTarStaysBeneathItsTarget(t *testing.T) {
	b, _ := newRooted(t)
	b.sh("mkdir /tmp/out /tmp/in")
	link := func(name, to string) *tar.Header {
		return &tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink, Mode: 0o777}
	}
	for name, archive := range map[string]*bytes.Buffer{
		"absolute link": archiveOf(t, link("l", "/tmp/out"), file("l/x", "evil")),
		"relative link": archiveOf(t, link("m", "../out"), file("m/x", "evil")),
		"link chain":    archiveOf(t, link("c", "."), link("c/d", ".."), file("c/d/out/x", "evil")),
		"hard link out": archiveOf(t, &tar.Header{Name: "h", Linkname: "l/../../etc/passwd", Typeflag: tar.TypeLink}),
	} {
		if err := b.TarIn(ctx(t), "", "/tmp/in", archive); err == nil && name != "hard link out" {
			t.Errorf("%s: unpacked", name)
		}
	}
	if err := b.TarIn(ctx(t), "", "/tmp/in", archiveOf(t, file("../../../tmp/out/y", "dots"), file("/abs/z", "abs"))); err != nil {
		t.Errorf("names are cleaned, not refused: %v", err)
	}
	if got := b.sh("ls -A /tmp/out; cat /tmp/in/tmp/out/y /tmp/in/abs/z"); got != "dotsabs" {
		t.Errorf("got %q", got)
	}
	if err := b.TarIn(ctx(t), "", "/tmp/in", archiveOf(t, link("ok", "abs"), file("ok/inside", "control"))); err != nil {
		t.Errorf("control: %v", err)
	}
	if got := b.sh("cat /tmp/in/abs/inside"); got != "control" {
		t.Errorf("control: %q", got)
	}
}

func TestWatch(t *testing.T) {
	b, _ := newRooted(t)
	b.sh("mkdir -p /tmp/w/old")
	w, err := b.Watch(ctx(t), "", "/tmp/w", true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	seen := make(chan sandbox.FileEvent, 100)
	go func() {
		defer close(seen)
		for {
			e, err := w.Next()
			if err != nil {
				return
			}
			seen <- e
		}
	}()
	b.sh("cd /tmp/w; echo x > old/f; mkdir -p new/deep; echo y > new/deep/g; mv old/f moved; rm moved; chmod 700 old")
	want := map[string]bool{
		"create /tmp/w/old/f": true, "write /tmp/w/old/f": true, "create /tmp/w/new": true, "create /tmp/w/new/deep": true,
		"create /tmp/w/new/deep/g": true, "rename /tmp/w/old/f": true, "create /tmp/w/moved": true, "remove /tmp/w/moved": true, "chmod /tmp/w/old": true,
	}
	limit := time.After(10 * time.Second)
	for len(want) > 0 {
		select {
		case e, ok := <-seen:
			if !ok {
				t.Fatalf("watch ended; missing %v", want)
			}
			delete(want, e.Op+" "+e.Path)
		case <-limit:
			t.Fatalf("missing %v", want)
		}
	}
}

func TestSwitchCutsFileWork(t *testing.T) {
	b, _ := newRooted(t)
	w, err := b.Watch(ctx(t), "", "/tmp", false)
	if err != nil {
		t.Fatal(err)
	}
	cfg := b.config()
	if err := b.Configure(ctx(t), cfg); err != nil {
		t.Fatalf("settings alone wait for nobody: %v", err)
	}
	cfg.Root, _ = b.newRoot()
	if err := b.Configure(ctx(t), cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Next(); err == nil {
		t.Error("the watch of the old root goes on")
	}
}

// TestTarTellsWhatItLacks: an archive has what is there, or breaks off and says why.
func TestTarTellsWhatItLacks(t *testing.T) {
	b, _ := newRooted(t)
	b.sh("mkdir -p /tmp/t/real && echo in > /tmp/t/real/f && ln -s real /tmp/t/link && cat /proc/cpuinfo > /tmp/cpuinfo && head -c 30000000 /dev/zero > /tmp/big")
	entries := func(path string) (map[string]string, error) {
		r, err := b.TarOut(ctx(t), "", path)
		if err != nil {
			return nil, err
		}
		defer r.Close()
		all, tr := map[string]string{}, tar.NewReader(r)
		for {
			h, err := tr.Next()
			if errors.Is(err, io.EOF) {
				return all, nil
			}
			if err != nil {
				return all, err
			}
			content, err := io.ReadAll(tr)
			if err != nil {
				return all, err
			}
			all[h.Name] = string(content) + h.Linkname + h.PAXRecords["comment"]
		}
	}
	if all, err := entries("/tmp/t/link/."); err != nil || all["link/f"] != "in\n" {
		t.Errorf("what a link leads to: %v, %v", all, err)
	}
	if all, err := entries("/tmp/t/link"); err != nil || all["link"] != "real" {
		t.Errorf("control: the link itself: %v, %v", all, err)
	}
	if all, err := entries("/proc/version"); err != nil || strings.TrimSpace(all["version"]) != b.sh("cat /proc/version") || len(all["version"]) == 0 {
		t.Errorf("a file of /proc: %v, %v", all, err)
	}
	if _, err := entries("/dev/null"); sandbox.CodeOf(err) != "not_a_file" {
		t.Errorf("a device: %v", err)
	}
	if _, err := entries("/tmp/cpuinfo/."); sandbox.CodeOf(err) != "not_a_directory" {
		t.Errorf("the content of a file: %v", err)
	}
	b.sh("mkfifo /tmp/t/fifo; perl -MSocket -e 'socket(S,AF_UNIX,SOCK_STREAM,0); bind(S,sockaddr_un(\"/tmp/t/sock\"))' || exit 1")
	// Said of an entry: a header of none at the end breaks other readers.
	if all, err := entries("/tmp/t"); err != nil || !strings.Contains(all["t/"], `left out 1 sockets`) || !strings.Contains(all["t/"], `"t/sock"`) || all["comment"] != "" {
		t.Errorf("a tree with a socket: %v, %v", all, err)
	}
	for _, shrink := range []bool{true, false} {
		r, err := b.TarOut(ctx(t), "", "/tmp/big")
		if err != nil {
			t.Fatal(err)
		}
		tr := tar.NewReader(r)
		if _, err := tr.Next(); err != nil {
			t.Fatal(err)
		}
		if shrink {
			b.sh("cp /tmp/big /tmp/copy && truncate -s 1000 /tmp/big")
		}
		n, err := io.Copy(io.Discard, tr)
		if shrink && sandbox.CodeOf(err) != "file_changed" || !shrink && (err != nil || n != 30000000) {
			t.Errorf("it shrank %t: %d bytes, %v", shrink, n, err)
		}
		_ = r.Close() // read only
		b.sh("mv /tmp/copy /tmp/big 2>/dev/null; true")
	}
}

// TestCutTarKeepsTheOldFile: a file is replaced when all of the new one is there.
func TestCutTarKeepsTheOldFile(t *testing.T) {
	b, _ := newRooted(t)
	b.sh("mkdir /tmp/in && echo -n old > /tmp/in/f")
	archive := archiveOf(t, file("f", "new one")).Bytes()
	if err := b.TarIn(ctx(t), "", "/tmp/in", bytes.NewReader(archive[:515])); err == nil {
		t.Error("half an archive passed for a whole one")
	}
	for what, cut := range map[string][]byte{"nothing": nil, "a header": archive[:512], "entries without an end": archive[:1024], "one of two": slices.Concat(archive, archive)} {
		if err := b.TarIn(ctx(t), "", "/tmp/cut", bytes.NewReader(cut)); sandbox.CodeOf(err) != "bad_archive" {
			t.Errorf("%s passed for a whole archive: %v", what, err)
		}
	}
	cut := io.MultiReader(bytes.NewReader(archive[:515]), iotest.ErrReader(io.ErrUnexpectedEOF)) // as a request's body that breaks off
	if err := b.TarIn(ctx(t), "", "/tmp/in", cut); sandbox.CodeOf(err) != "upload_broken" {
		t.Errorf("a broken upload: %v", err)
	}
	if got := b.sh("cat /tmp/in/f; ls -A /tmp/in"); got != "oldf" {
		t.Errorf("after half an archive: %q", got)
	}
	if err := b.TarIn(ctx(t), "", "/tmp/in", bytes.NewReader(archive)); err != nil {
		t.Error(err)
	}
	if got := b.sh("cat /tmp/in/f; ls -A /tmp/in"); got != "new onef" {
		t.Errorf("control: %q", got)
	}
}

// TestDirectoriesAfterWhatIsInThem: an archive may name a directory again, or only,
// after what is in it, and keep its unpacker out of it.
func TestDirectoriesAfterWhatIsInThem(t *testing.T) {
	b, _ := newRooted(t)
	dir := func(name string, mode int64) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: mode}
	}
	if err := b.TarIn(ctx(t), "alice", "/home/alice/in", archiveOf(t, dir("d/", 0o755), dir("d/sub/", 0o711), dir("d/", 0o600))); err != nil {
		t.Error(err)
	}
	if got := b.sh("stat -c %a /home/alice/in/d /home/alice/in/d/sub"); got != "600\n711" {
		t.Errorf("modes %q", got)
	}
}

// TestRefusedEntriesKeepTheOldFile: what cannot be unpacked leaves what is in its
// place, also a file that is said to be a link to itself, as GNU tar does where it
// is named twice. The controls replace it.
func TestRefusedEntriesKeepTheOldFile(t *testing.T) {
	b, _ := newRooted(t)
	entry := func(kind byte, to string) *tar.Header {
		return &tar.Header{Name: "f", Typeflag: kind, Linkname: to, Mode: 0o644}
	}
	for name, tc := range map[string]struct {
		h          *tar.Header
		code, want string
	}{
		"device":              {entry(tar.TypeChar, ""), "bad_archive", "old"},
		"contiguous":          {entry(tar.TypeCont, ""), "bad_archive", "old"},
		"link to the missing": {entry(tar.TypeLink, "gone"), "file_not_found", "old"},
		"link to itself":      {entry(tar.TypeLink, "f"), "", "old"},
		"control: hard":       {entry(tar.TypeLink, "g"), "", "other"},
		"control: symbolic":   {entry(tar.TypeSymlink, "g"), "", "other"},
	} {
		b.sh("rm -rf /tmp/in; mkdir /tmp/in && echo -n old > /tmp/in/f && echo -n other > /tmp/in/g")
		err := b.TarIn(ctx(t), "", "/tmp/in", archiveOf(t, tc.h))
		if (err == nil) != (tc.code == "") || err != nil && sandbox.CodeOf(err) != tc.code {
			t.Errorf("%s: %v", name, err)
		}
		if got := b.sh("cat /tmp/in/f; ls -A /tmp/in"); got != tc.want+"f\ng" {
			t.Errorf("%s: %q", name, got)
		}
	}
	if err := b.TarIn(ctx(t), "", "/tmp/in", archiveOf(t, file("x/..", "lost"))); sandbox.CodeOf(err) != "bad_archive" {
		t.Errorf("a file in the place of the directory: %v", err)
	}
	b.sh("rm -f /tmp/in/f; mkfifo /tmp/in/f")
	if err := b.TarIn(ctx(t), "", "/tmp/in", archiveOf(t, entry(tar.TypeFifo, ""))); err != nil || b.sh("ls -A /tmp/in") != "f\ng" {
		t.Errorf("FIFO: %v", err)
	}
}
