package initd

import (
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	passwd = "root:x:0:0:root:/root:/bin/bash\nbroken line\nbig:x:70000:1::/:/bin/sh\nalice:x:1000:1001:A:/home/alice:\nbare:x:7:7:::\n"
	groups = "root:x:0:\nvideo:x:44:bob,alice\nhuge:x:99999:alice\nstaff:x:50:alice\nbad\n70000:x:0:\n"
)

func TestResolveUser(t *testing.T) {
	cases := []struct {
		user, passwd string
		want         account
		ok           bool
	}{
		{"", passwd, account{"root", 0, 0, []uint32{0}, "/root", "/bin/bash"}, true},
		{"alice", passwd, account{"alice", 1000, 1001, []uint32{1001, 44, 50}, "/home/alice", "/bin/sh"}, true},
		{"1000", passwd, account{"alice", 1000, 1001, []uint32{1001, 44, 50}, "/home/alice", "/bin/sh"}, true},
		{"alice:44", passwd, account{"alice", 1000, 44, []uint32{44}, "/home/alice", "/bin/sh"}, true},
		{"alice:video", passwd, account{"alice", 1000, 44, []uint32{44}, "/home/alice", "/bin/sh"}, true},
		{"alice:nogroup", passwd, account{}, false},
		{"bare", passwd, account{"bare", 7, 7, []uint32{7}, "/", "/bin/sh"}, true},
		{"4242", passwd, account{"4242", 4242, 0, []uint32{0}, "/", "/bin/sh"}, true},
		{"4242:55", passwd, account{"4242", 4242, 55, []uint32{55}, "/", "/bin/sh"}, true},
		{"", "", account{"root", 0, 0, []uint32{0}, "/root", "/bin/sh"}, true},
		{"root", "", account{"root", 0, 0, []uint32{0}, "/root", "/bin/sh"}, true},
		{"nobody-here", passwd, account{}, false},
		{"big", passwd, account{}, false},
		{"70000", passwd, account{}, false},
		{"-1", passwd, account{}, false},
		{":5", passwd, account{}, false},
		{"alice:", passwd, account{}, false},
		{"1000", "1000:x:0:0::/:/bin/sh\n", account{"1000", 1000, 0, []uint32{0}, "/", "/bin/sh"}, true},
		{"1000:1000", "1000:x:0:0::/:/bin/sh\n", account{"1000", 1000, 1000, []uint32{1000}, "/", "/bin/sh"}, true},
		{"1000", "1000:x:0:0::/:/bin/sh\nalice:x:1000:1001::/home/alice:\n", account{"alice", 1000, 1001, []uint32{1001, 44, 50}, "/home/alice", "/bin/sh"}, true},
		{"70000", "70000:x:0:0::/:/bin/sh\n", account{}, false},
		{"alice:70000", passwd, account{}, false},
		{"x1000", "x1000:x:0:0::/:/bin/sh\n", account{"x1000", 0, 0, []uint32{0}, "/", "/bin/sh"}, true}, // the control: a name
	}
	for _, c := range cases {
		got, err := resolveUser(c.user, c.passwd, groups)
		if (err == nil) != c.ok || err != nil && sandbox.CodeOf(err) != "unknown_user" {
			t.Errorf("%q: %v", c.user, err)
			continue
		}
		same := got.name == c.want.name && got.uid == c.want.uid && got.gid == c.want.gid && got.home == c.want.home &&
			got.shell == c.want.shell && slices.Equal(got.groups, c.want.groups)
		if err == nil && !same {
			t.Errorf("%q: got %+v, want %+v", c.user, got, c.want)
		}
	}
}

// TestUserBeyondRange: an entry whose id is too large is told from none.
func TestUserBeyondRange(t *testing.T) {
	for user, want := range map[string]string{
		"big": "beyond 0 to 65535", "huge": "beyond 0 to 65535", "alice:huge": "from 0 to 65535", "ghost": "has no entry",
	} {
		_, err := resolveUser(user, passwd+"huge:x:4294967296:0::/:/bin/sh\n", groups)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", user, err, want)
		}
	}
}

func FuzzResolveUser(f *testing.F) {
	f.Add("alice:video", passwd, groups)
	f.Fuzz(func(t *testing.T, user, p, g string) {
		acc, err := resolveUser(user, p, g)
		if err == nil && (acc.uid > maxID || acc.gid > maxID || len(acc.groups) > maxGroups || acc.home == "" || acc.shell == "") {
			t.Fatalf("%+v", acc)
		}
	})
}

func TestCandidates(t *testing.T) {
	cases := []struct {
		name, path, dir string
		want            []string
	}{
		{"ls", "/a:/b", "/w", []string{"/a/ls", "/b/ls"}},
		{"ls", "/a::rel:/a", "/w", []string{"/a/ls", "/w/ls", "/w/rel/ls"}},
		{"./ls", "/a", "/w", []string{"./ls"}},
		{"/x/ls", "/a", "/w", []string{"/x/ls"}},
		{"d/ls", "", "/w", []string{"d/ls"}},
	}
	for _, c := range cases {
		if got := candidates(c.name, c.path, c.dir); !slices.Equal(got, c.want) {
			t.Errorf("%v: got %v", c, got)
		}
	}
	if got := candidates("ls", "", "/"); len(got) != 6 {
		t.Errorf("default PATH: %v", got)
	}
}

func TestRelativeTarNames(t *testing.T) {
	for in, want := range map[string]string{
		"a/b": "a/b", "/a": "a", "../../a": "a", "a/../../b": "b", ".": "", "": "", "./a/": "a", "/": "",
	} {
		if got := relative(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
