package sandbox

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestVolumeMountValidate(t *testing.T) {
	many := make([]VolumeMount, 33)
	for i := range many {
		many[i] = VolumeMount{Volume: "v", Path: fmt.Sprintf("/v%d", i)}
	}
	v := func(path string) []VolumeMount { return []VolumeMount{{Volume: "v", Path: path}} }
	host := func(path string) []VolumeMount { return []VolumeMount{{HostPath: path, Path: "/v"}} }
	for name, c := range map[string]struct {
		mounts []VolumeMount
		code   string // "" is fine
	}{
		"plain":                {v("/v"), ""},
		"deep":                 {v("/a/b/c"), ""},
		"below etc":            {v("/etc/app"), ""},
		"beside proc":          {v("/process"), ""},
		"one below another":    {[]VolumeMount{{Volume: "a", Path: "/a/b"}, {Volume: "b", Path: "/a"}}, ""},
		"one volume twice":     {[]VolumeMount{{Volume: "a", Path: "/a"}, {Volume: "a", Path: "/b", ReadOnly: true}}, ""},
		"32":                   {many[:32], ""},
		"host path":            {host("/srv/x"), ""},
		"writable host path":   {[]VolumeMount{{HostPath: "/srv", Path: "/v", Writable: true}}, ""},
		"33":                   {many, "invalid_volumes"},
		"same place":           {[]VolumeMount{{Volume: "a", Path: "/a"}, {Volume: "b", Path: "/a"}}, "invalid_volumes"},
		"neither":              {[]VolumeMount{{Path: "/a"}}, "invalid_volumes"},
		"both":                 {[]VolumeMount{{Volume: "a", HostPath: "/a", Path: "/a"}}, "invalid_volumes"},
		"writable volume":      {[]VolumeMount{{Volume: "a", Path: "/a", Writable: true}}, "invalid_volumes"},
		"both ways":            {[]VolumeMount{{HostPath: "/a", Path: "/a", Writable: true, ReadOnly: true}}, "invalid_volumes"},
		"bad name":             {[]VolumeMount{{Volume: "../a", Path: "/a"}}, "invalid_name"},
		"no path":              {v(""), "invalid_volumes"},
		"relative":             {v("v"), "invalid_volumes"},
		"root":                 {v("/"), "invalid_volumes"},
		"dots":                 {v("/a/../b"), "invalid_volumes"},
		"dot":                  {v("/a/./b"), "invalid_volumes"},
		"trailing slash":       {v("/a/"), "invalid_volumes"},
		"two slashes":          {v("//a"), "invalid_volumes"},
		"zero byte":            {v("/a\x00b"), "invalid_volumes"},
		"long":                 {v(strings.Repeat("/a", 3000)), "invalid_volumes"},
		"long part":            {v("/" + strings.Repeat("a", 256)), "invalid_volumes"},
		"proc":                 {v("/proc"), "invalid_volumes"},
		"below sys":            {v("/sys/fs/cgroup"), "invalid_volumes"},
		"shm":                  {v("/dev/shm"), "invalid_volumes"},
		"etc":                  {v("/etc"), "invalid_volumes"},
		"host root":            {host("/"), "invalid_volumes"},
		"relative host path":   {host("srv"), "invalid_volumes"},
		"host path with dots":  {host("/srv/../etc"), "invalid_volumes"},
		"host path with slash": {host("/srv/"), "invalid_volumes"},
	} {
		err := Spec{Volumes: c.mounts}.Validate()
		if c.code == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if !errors.Is(err, ErrInvalid) || CodeOf(err) != c.code {
			t.Errorf("%s: %v (code %s), want code %s", name, err, CodeOf(err), c.code)
		}
	}
}

func TestVolumeRequestValidate(t *testing.T) {
	tiny, fine, below := int64(1), int64(1<<20), int64(-1)
	for name, c := range map[string]struct {
		err  error
		code string
	}{
		"plain":          {VolumeRequest{Name: "a"}.Validate(), ""},
		"all set":        {VolumeRequest{Name: "a", SizeBytes: 1 << 20, Inodes: 64, Labels: map[string]string{"a": "b"}}.Validate(), ""},
		"no name":        {VolumeRequest{}.Validate(), "invalid_name"},
		"label":          {VolumeRequest{Name: "a", Labels: map[string]string{"a=b": ""}}.Validate(), "invalid_labels"},
		"tiny":           {VolumeRequest{Name: "a", SizeBytes: 1}.Validate(), "invalid_limits"},
		"few files":      {VolumeRequest{Name: "a", Inodes: 1}.Validate(), "invalid_limits"},
		"no change":      {VolumeChange{}.Validate(), ""},
		"fine change":    {VolumeChange{SizeBytes: &fine, Inodes: &fine}.Validate(), ""},
		"tiny change":    {VolumeChange{SizeBytes: &tiny}.Validate(), "invalid_limits"},
		"negative files": {VolumeChange{Inodes: &below}.Validate(), "invalid_limits"},
	} {
		if c.code == "" && c.err != nil || c.code != "" && CodeOf(c.err) != c.code {
			t.Errorf("%s: %v, want code %q", name, c.err, c.code)
		}
	}
}
