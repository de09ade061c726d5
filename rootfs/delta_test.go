package rootfs

import (
	"crypto/sha256"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// seenOf makes an account of names such as "d/", "d/f", "w!" for a whiteout,
// "o/=" for an opaque directory, "r/>x" for one redirected to x. Each is an
// inode of its own, of the change time 1, unless "#ino" or "@time" follow.
func seenOf(names ...string) *seen {
	s := &seen{root: seenFile{mode: unix.S_IFDIR | 0o755, ino: 1, ctime: 1, dir: &seenDir{}}}
	for _, n := range names {
		f := seenFile{mode: unix.S_IFREG | 0o644, ctime: 1}
		if i := strings.IndexByte(n, '@'); i >= 0 {
			_, _ = fmt.Sscan(n[i+1:], &f.ctime)
			n = n[:i]
		}
		if i := strings.IndexByte(n, '#'); i >= 0 {
			_, _ = fmt.Sscan(n[i+1:], &f.ino)
			f.links = true
			n = n[:i]
		}
		n, to, _ := strings.Cut(n, ">")
		path, gone := strings.CutSuffix(n, "!")
		path, opaque := strings.CutSuffix(path, "=")
		if strings.HasSuffix(path, "/") {
			f.mode, f.dir = unix.S_IFDIR|0o755, &seenDir{opaque: opaque, redirect: to}
		}
		if gone {
			f.mode, f.size = unix.S_IFCHR, seenWhiteout
		}
		s.put(strings.TrimSuffix(path, "/"), f)
	}
	return s
}

func (s *seen) put(path string, f seenFile) {
	s.files++
	if f.ino == 0 {
		f.ino = 100 + uint64(sha256.Sum256([]byte(path))[0]) + uint64(len(path))<<8
	}
	d := s.root.dir
	parts := strings.Split(path, "/")
	for _, p := range parts[:len(parts)-1] {
		i, _ := slices.BinarySearchFunc(d.files, p, func(f seenFile, n string) int { return strings.Compare(f.name, n) })
		d = d.files[i].dir
	}
	f.name = parts[len(parts)-1]
	i, _ := slices.BinarySearchFunc(d.files, f.name, func(f seenFile, n string) int { return strings.Compare(f.name, n) })
	d.files = slices.Insert(d.files, i, f)
}

// told writes a plan down: "+f" is copied, "-f" hidden, "d/" a directory over
// the earlier copy's, "+d/" a new one, "=d/" one that is made opaque.
func (d *deltaDir) told(path string) (out []string) {
	for _, f := range d.files {
		out = append(out, "+"+path+f.name)
	}
	for _, n := range d.gone {
		out = append(out, "-"+path+n)
	}
	for _, sub := range d.dirs {
		p := path + sub.of.name + "/"
		switch {
		case sub.over:
			out = append(out, p)
		case sub.opaque:
			out = append(out, "="+p)
		default:
			out = append(out, "+"+p)
		}
		out = append(out, sub.told(p)...)
	}
	return out
}

func TestPlanDelta(t *testing.T) {
	for name, c := range map[string]struct{ was, now, want []string }{
		"nothing":                            {[]string{"d/", "d/f", "w!"}, []string{"d/", "d/f", "w!@9"}, nil},
		"a file changed":                     {[]string{"d/", "d/f", "d/g"}, []string{"d/", "d/f@2", "d/g"}, []string{"d/", "+d/f"}},
		"one too fresh to tell":              {[]string{"f@0", "g"}, []string{"f@0", "g"}, []string{"+f"}},
		"one fresh then":                     {[]string{"f@0"}, []string{"f@1"}, []string{"+f"}},
		"another inode":                      {[]string{"f"}, []string{"f#7"}, []string{"+f"}},
		"a directory's own attributes":       {[]string{"d/", "d/f"}, []string{"d/@2", "d/f"}, []string{"d/"}},
		"one deep down":                      {[]string{"a/", "a/b/", "a/b/c/"}, []string{"a/", "a/b/", "a/b/c/", "a/b/c/f"}, []string{"a/", "a/b/", "a/b/c/", "+a/b/c/f"}},
		"gone":                               {[]string{"a", "b", "c"}, []string{"b"}, []string{"-a", "-c"}},
		"a directory gone":                   {[]string{"d/", "d/f"}, nil, []string{"-d"}},
		"a whiteout gone":                    {[]string{"d/", "w!"}, []string{"d/"}, nil},
		"deleted":                            {[]string{"f"}, []string{"f!"}, []string{"-f"}},
		"a new one":                          {[]string{"b"}, []string{"a/", "a/f", "a/w!", "b"}, []string{"+a/", "+a/f", "-a/w"}},
		"a file where a directory was":       {[]string{"d/", "d/f"}, []string{"d"}, []string{"+d"}},
		"a directory over what was deleted":  {[]string{"d!"}, []string{"d/=", "d/f"}, []string{"=d/", "+d/f"}},
		"one over a file":                    {[]string{"o/=", "o/d"}, []string{"o/=", "o/d/"}, []string{"o/", "=o/d/"}},
		"over a file, merged":                {[]string{"d"}, []string{"d/"}, []string{"whole"}},
		"become opaque":                      {[]string{"d/", "d/f"}, []string{"d/=", "d/f"}, []string{"=d/", "+d/f"}},
		"no more opaque":                     {[]string{"d/=", "d/f"}, []string{"d/", "d/f"}, []string{"whole"}},
		"no more opaque, nor could it be":    {[]string{"o/=", "o/d/="}, []string{"o/=", "o/d/"}, []string{"o/", "=o/d/"}},
		"renamed":                            {[]string{"d/"}, []string{"d/>e"}, []string{"whole"}},
		"renamed, new":                       {nil, []string{"d/>e"}, []string{"whole"}},
		"renamed, new, in a new one":         {nil, []string{"n/", "n/d/>/e"}, []string{"whole"}},
		"renamed in what is closed":          {[]string{"o/=", "o/d/"}, []string{"o/=", "o/d/>/e"}, []string{"whole"}},
		"renamed before":                     {[]string{"d/>e", "d/f"}, []string{"d/>e", "d/f@2"}, []string{"d/", "+d/f"}},
		"merged again in what is closed":     {[]string{"o/=", "o/r/>/e", "o/r/d"}, []string{"o/=", "o/r/>/e", "o/r/d/"}, []string{"whole"}},
		"names of one file":                  {[]string{"a#7", "b#7"}, []string{"a#7", "b#7"}, nil},
		"one of them elsewhere":              {[]string{"a/", "a/f#7", "b#7"}, []string{"b#7", "c/", "c/f#7"}, []string{"+b", "-a", "+c/", "+c/f"}},
		"one of them in what is replaced":    {[]string{"a/", "a/f#7", "b/", "b/f#7"}, []string{"a/=", "a/f#7", "b/", "b/f#7"}, []string{"=a/", "+a/f", "b/", "+b/f"}},
		"more names":                         {[]string{"a", "c"}, []string{"a#7@2", "b#7@2", "c"}, []string{"+a", "+b"}},
		"whiteouts of one node change times": {[]string{"a!#5", "b!#5"}, []string{"a!#5@3", "b!#5@3", "c!#5@3"}, []string{"-c"}},
	} {
		d, ok := planDelta(seenOf(c.was...), seenOf(c.now...))
		got := []string{"whole"}
		if ok {
			got = d.told("")
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// TestPlanDeltaMuch: where nearly all changed, all is copied.
func TestPlanDeltaMuch(t *testing.T) {
	var was, now []string
	for i := range 3000 {
		was = append(was, fmt.Sprintf("f%04d", i))
		now = append(now, was[i])
	}
	for _, c := range []struct {
		changed int
		ok      bool
	}{{0, true}, {1500, true}, {1501, false}, {3000, false}} {
		for i := range c.changed {
			now[i] = was[i] + "@2"
		}
		d, ok := planDelta(seenOf(was...), seenOf(now...))
		if ok != c.ok || ok && len(d.files) != c.changed {
			t.Errorf("%d changed: %v", c.changed, ok)
		}
	}
}

func testAccount() *account {
	return &account{
		Boot: "boot", Kind: 129, Handle: []byte{0, 1, 255}, Layers: []string{NewUpperLayer(), NewUpperLayer()},
		seen: seenOf("a/", "a/b/=", "a/b/\xff\n#7@-5", "c/>/x/y", "d!", "e@0", "f#7@9223372036854775807"),
	}
}

func TestAccount(t *testing.T) {
	want := testAccount()
	b, err := want.marshal()
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseAccount(b)
	if err != nil || !reflect.DeepEqual(want, got) {
		t.Fatalf("%v: %+v, want %+v", err, got, want)
	}
	for i := range b {
		for _, bad := range [][]byte{b[:i], slices.Concat(b[:i], []byte{b[i] ^ 1}, b[i+1:])} {
			if _, err := parseAccount(bad); err == nil {
				t.Fatalf("byte %d of %d: cut off or changed, it is taken", i, len(b))
			}
		}
	}
}

// FuzzAccount gives the parser records whose checksum is right: it takes none
// that it would write differently, and none it could fall over.
func FuzzAccount(f *testing.F) {
	b, err := testAccount().marshal()
	if err != nil {
		f.Fatal(err)
	}
	head := len(accountMagic) + sha256.Size
	f.Add(b[head:])
	f.Fuzz(func(t *testing.T, body []byte) {
		sum := sha256.Sum256(body)
		a, err := parseAccount(slices.Concat([]byte(accountMagic), sum[:], body))
		if err != nil {
			return
		}
		again, err := a.marshal()
		if err != nil {
			t.Fatal(err)
		}
		if b, err := parseAccount(again); err != nil || !reflect.DeepEqual(a, b) {
			t.Fatalf("%v: read back %+v, it was %+v", err, b, a)
		}
		planDelta(a.seen, a.seen)
	})
}
