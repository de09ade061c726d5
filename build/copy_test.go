package build

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// copied tells what the archive of a COPY holds, beneath its anchor.
func copied(t *testing.T, tr *Tree, o *copyOp, isDir bool, anchor string, as *owner) ([]string, error) {
	t.Helper()
	chosen, err := tr.choose(o)
	if err != nil {
		return nil, err
	}
	plan, err := o.plan(chosen, isDir)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := (&archiver{tree: tr, op: o, anchor: anchor, as: as}).write(&b, plan); err != nil {
		return nil, err
	}
	var out []string
	r := tar.NewReader(&b)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		s := fmt.Sprintf("%s %o", h.Name, h.Mode)
		if h.Uid+h.Gid != 0 {
			s += fmt.Sprintf(" %d:%d", h.Uid, h.Gid)
		}
		if h.Linkname != "" {
			s += " -> " + h.Linkname
		}
		if len(data) > 0 {
			s += " = " + string(data)
		}
		out = append(out, s)
	}
}

// TestCopyRules is the table of Docker's reference, sections COPY and ADD.
func TestCopyRules(t *testing.T) {
	files := []f{
		{name: "a.txt", data: "A"},
		{name: "b.txt", data: "B", mode: 0o600, uid: 1000},
		{name: "d/", mode: 0o700},
		{name: "d/x", data: "X", mode: 0o755},
		{name: "d/sub/", mode: 0o711},
		{name: "d/sub/y", data: "Y"},
		{name: "d/up -> ../a.txt"},
		{name: "link -> d"},
		{name: "abs -> /d/sub"},
		{name: "flink -> b.txt"},
		{name: "hard = a.txt"},
		{name: "empty/"},
		{name: "out -> ../../etc/passwd"},
		{name: "loop -> loop"},
		{name: "e[1].txt", data: "E"},
		{name: ".hidden", data: "H"},
	}
	mode := uint32(0o640)
	for _, c := range []struct {
		name    string
		op      copyOp
		isDir   bool   // the destination is a directory now
		anchor  string // deepest directory there is
		as      *owner
		want    []string
		refused string
	}{
		{name: "file to a name", op: copyOp{sources: []string{"a.txt"}, dest: "/x/y"}, anchor: "/x", want: []string{"y 644 = A"}},
		{name: "file to a name, the parents are missing", op: copyOp{sources: []string{"a.txt"}, dest: "/x/y/z"}, anchor: "/", want: []string{"x/ 755", "x/y/ 755", "x/y/z 644 = A"}},
		{name: "file to a directory that is there", op: copyOp{sources: []string{"a.txt"}, dest: "/x"}, isDir: true, anchor: "/x", want: []string{"a.txt 644 = A"}},
		{name: "file to a directory to be made", op: copyOp{sources: []string{"a.txt"}, dest: "/x/"}, anchor: "/", want: []string{"x/ 755", "x/a.txt 644 = A"}},
		{name: "file to the root", op: copyOp{sources: []string{"a.txt"}, dest: "/"}, isDir: true, anchor: "/", want: []string{"a.txt 644 = A"}},
		{name: "owners of the context are root's", op: copyOp{sources: []string{"b.txt"}, dest: "/x"}, anchor: "/", want: []string{"x 600 = B"}},
		{
			name: "directory: its content, the destination is made", op: copyOp{sources: []string{"d"}, dest: "/x/y"}, anchor: "/",
			want: []string{"x/ 755", "x/y/ 755", "x/y/sub/ 711", "x/y/sub/y 644 = Y", "x/y/up 777 -> ../a.txt", "x/y/x 755 = X"},
		},
		{
			name: "directory onto one that is there: that keeps its mode", op: copyOp{sources: []string{"d"}, dest: "/x"}, isDir: true, anchor: "/x",
			want: []string{"sub/ 711", "sub/y 644 = Y", "up 777 -> ../a.txt", "x 755 = X"},
		},
		{name: "empty directory", op: copyOp{sources: []string{"empty"}, dest: "/x"}, anchor: "/", want: []string{"x/ 755"}},
		{name: "several into a directory", op: copyOp{sources: []string{"a.txt", "d/sub"}, dest: "/x/"}, anchor: "/", want: []string{"x/ 755", "x/a.txt 644 = A", "x/y 644 = Y"}},
		{
			name: "links at the top are followed", op: copyOp{sources: []string{"flink", "link", "abs", "hard"}, dest: "/x/"}, isDir: true, anchor: "/x",
			want: []string{"flink 600 = B", "sub/ 711", "sub/y 644 = Y", "up 777 -> ../a.txt", "x 755 = X", "y 644 = Y", "hard 644 = A"},
		},
		{name: "a name through a link", op: copyOp{sources: []string{"link/sub/y"}, dest: "/x"}, anchor: "/", want: []string{"x 644 = Y"}},
		{name: "a link that leads out stays in", op: copyOp{sources: []string{"out"}, dest: "/x"}, refused: "no such file"},
		{name: "a link that leads to itself", op: copyOp{sources: []string{"loop"}, dest: "/x"}, refused: "no such file"},
		{
			name: "the whole context", op: copyOp{sources: []string{""}, dest: "/w", exclude: []string{"*", "!d/sub", ".*"}}, anchor: "/",
			want: []string{"w/ 755", "w/d/ 755", "w/d/sub/ 711", "w/d/sub/y 644 = Y"},
		},
		{name: "pattern", op: copyOp{sources: []string{"?.txt"}, dest: "/x/"}, isDir: true, anchor: "/x", want: []string{"a.txt 644 = A", "b.txt 600 = B"}},
		{name: "pattern in a directory", op: copyOp{sources: []string{"*/s*"}, dest: "/x/"}, isDir: true, anchor: "/x", want: []string{"y 644 = Y", "y 644 = Y"}},
		{name: "pattern that matches nothing", op: copyOp{sources: []string{"*.none"}, dest: "/x/"}, anchor: "/", want: nil},
		{name: "pattern that matches one file, to a name", op: copyOp{sources: []string{"a.*"}, dest: "/x"}, anchor: "/", want: []string{"x 644 = A"}},
		{name: "pattern that matches several, to a name", op: copyOp{sources: []string{"*.txt"}, dest: "/x"}, anchor: "/", refused: "end with /"},
		{name: "pattern of brackets, escaped", op: copyOp{sources: []string{"e[[]1].txt"}, dest: "/x"}, anchor: "/", want: []string{"x 644 = E"}},
		{name: "a bad pattern", op: copyOp{sources: []string{"[a"}, dest: "/x"}, refused: "pattern"},
		{name: "hidden files are files", op: copyOp{sources: []string{"."}, dest: "/w", exclude: []string{"*", "!.hidden"}}, isDir: true, anchor: "/w", want: []string{".hidden 644 = H"}},
		{name: "missing", op: copyOp{sources: []string{"nothing"}, dest: "/x"}, refused: "no such file"},
		{name: "a file is no directory", op: copyOp{sources: []string{"a.txt/x"}, dest: "/x"}, refused: "no such file"},
		{name: "chown", op: copyOp{sources: []string{"d/sub"}, dest: "/x/y"}, anchor: "/", as: &owner{5, 6}, want: []string{"x/ 755 5:6", "x/y/ 755 5:6", "x/y/y 644 5:6 = Y"}},
		{
			name: "chmod", op: copyOp{sources: []string{"d"}, dest: "/x", chmod: &mode}, anchor: "/",
			want: []string{"x/ 755", "x/sub/ 640", "x/sub/y 640 = Y", "x/up 777 -> ../a.txt", "x/x 640 = X"},
		},
		{
			name: "exclude in a directory", op: copyOp{sources: []string{"d"}, dest: "/x", exclude: []string{"sub/*"}}, anchor: "/",
			want: []string{"x/ 755", "x/sub/ 711", "x/up 777 -> ../a.txt", "x/x 755 = X"},
		},
		{name: "exclude of what a pattern matches", op: copyOp{sources: []string{"*.txt"}, dest: "/x/", exclude: []string{"b*"}}, isDir: true, anchor: "/x", want: []string{"a.txt 644 = A", "e[1].txt 644 = E"}},
		{name: "inline", op: copyOp{inlines: []inline{{"n", "data"}}, dest: "/x"}, anchor: "/", want: []string{"x 644 = data"}},
		{name: "inlines and a file", op: copyOp{sources: []string{"a.txt"}, inlines: []inline{{"n", "1"}, {"m", ""}}, dest: "/x/"}, isDir: true, anchor: "/x", want: []string{"a.txt 644 = A", "n 644 = 1", "m 644"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for i, s := range c.op.sources {
				c.op.sources[i] = clean(s)
			}
			got, err := copied(t, mustTree(t, files...), &c.op, c.isDir, c.anchor, c.as)
			if c.refused != "" {
				if err == nil || !strings.Contains(err.Error(), c.refused) {
					t.Errorf("%v, %v; want %q", got, err, c.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("archive (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHostileContexts(t *testing.T) {
	good := archive(t, f{name: "a", data: strings.Repeat("x", 400)}, f{name: "d/b"})
	for _, c := range []struct {
		name string
		data []byte
		code string // empty: accepted
		has  string // a name that must be there
	}{
		{name: "good", data: good, has: "d/b"},
		{name: "nothing", data: nil, code: "bad_context"},
		{name: "empty", data: archive(t)},
		{name: "cut off before its end mark", data: good[:512+512+512], code: "bad_context"},
		{name: "two archives", data: slices.Concat(good, good), code: "bad_context"},
		{name: "padding", data: slices.Concat(good, make([]byte, 10240)), has: "d/b"},
		{name: "dots lead to the top", data: archive(t, f{name: "../../etc/passwd", data: "x"}), has: "etc/passwd"},
		{name: "absolute", data: archive(t, f{name: "/etc/passwd", data: "x"}), has: "etc/passwd"},
		{name: "dots inside", data: archive(t, f{name: "a/../../b"}), has: "b"},
		{name: "beneath a link", data: archive(t, f{name: "l -> /etc"}, f{name: "l/passwd", data: "x"}), code: "bad_context"},
		{name: "beneath a file", data: archive(t, f{name: "l", data: "x"}, f{name: "l/passwd"}), code: "bad_context"},
		{name: "a directory becomes a link", data: archive(t, f{name: "l/x"}, f{name: "l -> /etc"}), code: "bad_context"},
		{name: "a link becomes a directory", data: archive(t, f{name: "l -> /etc"}, f{name: "l/"}), code: "bad_context"},
		{name: "second name of nothing", data: archive(t, f{name: "l = /etc/passwd"}), code: "bad_context"},
		{name: "second name of a directory", data: archive(t, f{name: "d/"}, f{name: "l = d"}), code: "bad_context"},
		{name: "second name of itself", data: archive(t, f{name: "l = l"}), code: "bad_context"},
		{name: "second name of a link", data: archive(t, f{name: "s -> /etc"}, f{name: "l = s"}), has: "l"},
		{name: "the top as a file", data: archive(t, f{name: "..", data: "x"}), code: "bad_context"},
		{name: "the top as a directory", data: archive(t, f{name: "./"}, f{name: "x"}), has: "x"},
		{name: "the same name twice", data: archive(t, f{name: "x", data: "1"}, f{name: "x", data: "2"}), has: "x"},
		{name: "long name", data: archive(t, f{name: strings.Repeat("a/", 3000) + "b"}), code: "bad_context"},
		{name: "deep", data: archive(t, f{name: strings.Repeat("a/", 900) + "b"}), has: strings.Repeat("a/", 900) + "b"},
		{name: "too many", data: archive(t, f{name: strings.Repeat("a/", 1100) + "b"}), code: "context_too_large"},
		{name: "too large", data: archive(t, f{name: "a", data: strings.Repeat("x", 1<<20+1)}), code: "context_too_large"},
		{name: "too large together", data: archive(t, f{name: "a", data: strings.Repeat("x", 1<<19)}, f{name: "b", data: strings.Repeat("x", 1<<19+1)}), code: "context_too_large"},
		{name: "just large enough", data: archive(t, f{name: "a", data: strings.Repeat("x", 1<<20)}), has: "a"},
		{name: "no archive", data: []byte(strings.Repeat("junk", 1000)), code: "bad_context"},
		{name: "cut off in a file", data: good[:512+300], code: "bad_context"},
		{name: "cut off in a header", data: good[:512+512+200], code: "bad_context"},
		{name: "a device", data: device(t), has: "after"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tr, err := tree(t, roomy, c.data)
			if c.code != "" {
				if sandbox.CodeOf(err) != c.code {
					t.Fatalf("%v, want code %s", err, c.code)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if c.has != "" && tr.entries[c.has] == nil {
				t.Errorf("no %.80q", c.has)
			}
			for name := range tr.entries {
				if name != clean(name) {
					t.Errorf("a name that is not clean: %.80q", name)
				}
			}
		})
	}
}

func device(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{{Name: "dev", Typeflag: tar.TypeBlock, Devmajor: 8}, {Name: "fifo", Typeflag: tar.TypeFifo}, {Name: "after", Typeflag: tar.TypeReg}} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestFullDisk: the daemon's own disk has no room for a context.
func TestFullDisk(t *testing.T) {
	data := archive(t, f{name: "a", data: "x"})
	for device, code := range map[string]string{"/dev/full": "volume_full", "/dev/null": "internal"} { // no error there
		tr, err := newTree(t.TempDir(), roomy)
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Close(); err != nil {
			t.Fatal(err)
		}
		if tr.spool, err = os.OpenFile(device, os.O_RDWR, 0); err != nil {
			t.Fatal(err)
		}
		err = tr.fill(t.Context(), bytes.NewReader(data), false, everything)
		if (err == nil) != (device == "/dev/null") || sandbox.CodeOf(err) != code {
			t.Errorf("contents go to %s: %v, want code %s", device, err, code)
		}
		_ = tr.Close() // nothing was written
	}
}

// TestLastContentWins: of two entries of a name the later one counts.
func TestLastContentWins(t *testing.T) {
	tr := mustTree(t, f{name: "x", data: "first"}, f{name: "y", data: "other"}, f{name: "x", data: "last"})
	got, err := copied(t, tr, &copyOp{sources: []string{"x"}, dest: "/x"}, false, "/", nil)
	if err != nil || len(got) != 1 || got[0] != "x 644 = last" {
		t.Errorf("%v, %v", got, err)
	}
}

func FuzzTree(f *testing.F) {
	f.Add(archive(f, fz("a", "x"), fz("d/", ""), fz("d/l -> ../a", ""), fz("h = a", "")), "d/*")
	f.Add(archive(f, fz("l -> l", ""), fz("../x", "y")), "l/../x")
	f.Fuzz(func(t *testing.T, data []byte, source string) {
		tr, err := tree(t, bounds{bytes: 64 << 10, entries: 200}, data)
		if err != nil {
			if sandbox.ClassOf(err) == nil {
				t.Errorf("an error without a class: %v", err)
			}
			return
		}
		o := &copyOp{sources: []string{clean(source)}, dest: "/x/"}
		chosen, err := tr.choose(o)
		if err != nil {
			return
		}
		plan, err := o.plan(chosen, true)
		if err != nil {
			return
		}
		for _, p := range plan {
			if !strings.HasPrefix(p.to, "/x") {
				t.Errorf("a file goes to %q", p.to)
			}
		}
		if err := (&archiver{tree: tr, op: o, anchor: "/x"}).write(io.Discard, plan); err != nil && !errors.Is(err, tar.ErrHeader) && !strings.Contains(err.Error(), "archiving") {
			t.Error(err)
		}
	})
}

func fz(name, data string) f { return f{name: name, data: data, at: time.Unix(5, 0)} }
