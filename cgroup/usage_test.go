package cgroup

import (
	"os"
	"path/filepath"
	"testing"
)

func TestStacked(t *testing.T) {
	sysfs := t.TempDir()
	for name, content := range map[string]string{
		"254:0/slaves/.keep": "", "7:0/loop/dio": "1\n", "7:0/slaves/": "", "7:1/loop/dio": "0\n", "253:0/slaves/sda": "", "8:0/size": "1\n",
	} {
		path := filepath.Join(sysfs, "dev/block", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if filepath.Base(name) == ".keep" || name[len(name)-1] == '/' {
			continue
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		what         string
		major, minor uint64
		want         bool
	}{
		{"a disk", 254, 0, false},
		{"a disk without a list", 8, 0, false},
		{"one that is gone", 9, 9, false},
		{"a loop device with direct access", 7, 0, true},
		{"a loop device through the page cache", 7, 1, false},
		{"a mapped device", 253, 0, true},
	} {
		if got := stacked(sysfs, c.major, c.minor); got != c.want {
			t.Errorf("%s: stacked %v, want %v", c.what, got, c.want)
		}
	}
}
