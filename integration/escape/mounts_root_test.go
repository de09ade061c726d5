//go:build root

package escape

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// swapping makes $1/way a directory and a link to $2 in turns.
const swapping = `while :; do ln -sfn $2 $1/way; rm -rf $1/way; mkdir $1/way; rm -rf $1/way; done`

// TestMountTargetRaces starts sandboxes that mount beneath a volume, while
// another that has the same volume swaps the way there for a link
// (CVE-2021-30465), also where the place must be made first (CVE-2024-45310).
// Each is mounted where it was asked for, or refused. The control mounts and
// makes directories by name here: both lead out.
func TestMountTargetRaces(t *testing.T) {
	d := harness.Install(t, "")
	outside := filepath.Dir(canary(t))
	for _, name := range []string{"v", "w"} {
		if _, err := d.CreateVolume(t.Context(), sandbox.VolumeRequest{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	filler := d.New(t, sandbox.Spec{Volumes: []sandbox.VolumeMount{{Volume: "w", Path: "/w"}}})
	d.Sh(t, string(filler.ID), "echo here >/w/mark")

	t.Run("control", func(t *testing.T) {
		here, source := t.TempDir(), t.TempDir()
		background(t, "sh", "-c", swapping, "sh", here, outside)
		testenv.Eventually(t, 60e9, "a mount by name leads out", func() bool {
			if exec.Command("mount", "--bind", source, filepath.Join(here, "way")).Run() != nil {
				return false
			}
			// Lazily: who swaps may be in it, and a mount that stays ends the swapping.
			out := exec.Command("umount", "--lazy", outside).Run() == nil
			_ = exec.Command("umount", "--lazy", filepath.Join(here, "way")).Run()
			return out
		})
		testenv.Eventually(t, 60e9, "a directory made by name lies outside", func() bool {
			_ = os.MkdirAll(filepath.Join(here, "way/made"), 0o755)
			return os.Remove(filepath.Join(outside, "made")) == nil
		})
	})

	const baseline = `cut -d' ' -f5 /proc/self/mountinfo | sort`
	common := strings.Fields(d.Sh(t, string(d.New(t, sandbox.Spec{Volumes: []sandbox.VolumeMount{{Volume: "v", Path: "/data"}}}).ID), baseline))
	before := listed(t, outside)
	for cve, at := range map[string]string{"CVE-2021-30465": "/data/way", "CVE-2024-45310": "/data/way/made/deep"} {
		t.Run(cve, func(t *testing.T) {
			mounted, refused := 0, 0
			for _, to := range []string{"/etc", "../../../../../../../.." + outside, "/proc/self/fd", "/proc"} {
				swapper := d.New(t, sandbox.Spec{Volumes: []sandbox.VolumeMount{{Volume: "v", Path: "/v"}}})
				if _, err := d.StartProcess(t.Context(), string(swapper.ID), sandbox.ProcessSpec{Argv: []string{"sh", "-c", swapping, "sh", "/v", to}}); err != nil {
					t.Fatal(err)
				}
				for range harness.Soak(8, 500) {
					sb, err := d.Create(t.Context(), sandbox.Spec{Volumes: []sandbox.VolumeMount{{Volume: "v", Path: "/data"}, {Volume: "w", Path: at}}}, "")
					if err != nil {
						if codeOf(err) != "mount_point" {
							t.Errorf("refused otherwise: %v", err)
						}
						refused++
						continue
					}
					mounted++
					got := strings.Fields(d.Sh(t, string(sb.ID), baseline))
					got = slices.DeleteFunc(got, func(m string) bool { return slices.Contains(common, m) })
					// Where the other has removed the directory since, the mount is gone with it.
					if len(got) > 1 || len(got) == 1 && !strings.HasPrefix(got[0], "/data/") {
						t.Errorf("with %s -> %s it is mounted on %v", at, to, got)
					}
					if said := d.Sh(t, string(sb.ID), "ls -d /etc/made /proc/made 2>/dev/null || stat -f -c %T /proc"); said != "proc" {
						t.Errorf("with %s -> %s there is %s", at, to, said)
					}
					if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := d.Remove(t.Context(), string(swapper.ID)); err != nil {
					t.Fatal(err)
				}
			}
			t.Logf("%d mounted, %d refused", mounted, refused)
			if mounted == 0 || refused == 0 {
				t.Errorf("%d mounted, %d refused: want some of both, or there was no race", mounted, refused)
			}
		})
	}
	if after := listed(t, outside); !slices.Equal(after, before) {
		t.Errorf("beside the canary: %v, were %v", after, before)
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", d.PID()))
	if err != nil || strings.Contains(string(mounts), outside) {
		t.Errorf("the daemon has something mounted on %s: %v", outside, err)
	}
}

func listed(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestMountOverProc mounts volumes over /proc and its kin, by name, by an
// image's links and by its VOLUME entries, so that what is written to labels,
// limits and maps there would go to plain files (CVE-2019-16884). The control
// mounts beside them.
func TestMountOverProc(t *testing.T) {
	d := harness.Install(t, "")
	if _, err := d.CreateVolume(t.Context(), sandbox.VolumeRequest{Name: "v"}); err != nil {
		t.Fatal(err)
	}
	volumes := map[string]struct{}{}
	var links []entry
	for i, to := range []string{"/proc", "proc", "/proc/self", "/proc/self/attr", "../../proc", "/sys", "/dev", "/proc/1/root/proc"} {
		links = append(links, link(fmt.Sprintf("l%d", i), to))
	}
	for _, v := range []string{"/proc", "/proc/self", "/proc/self/attr", "/sys/fs/cgroup", "/dev/pts", "/l0", "/l3/current"} {
		volumes[v] = struct{}{}
	}
	if err := ociImage(t, d, "over", imageConfig{Volumes: volumes}, append(links, dir("place"))...); err != nil {
		t.Fatal(err)
	}
	try := func(at string) (string, string) {
		sb, err := d.Create(t.Context(), sandbox.Spec{Image: "over", Volumes: []sandbox.VolumeMount{{Volume: "v", Path: at}}}, "")
		if err != nil {
			return "", codeOf(err)
		}
		defer d.Remove(t.Context(), string(sb.ID))
		return d.Sh(t, string(sb.ID), `while read -r _ _ _ _ at _; do busybox printf '%s ' "$at"; done </proc/self/mountinfo; for p in /proc /sys /proc/self/attr /dev/pts; do busybox stat -f -c %T $p; done; busybox grep -c . /proc/self/attr/current 2>/dev/null; busybox sed -n 's/^Seccomp:\t//p' /proc/self/status`), ""
	}
	want, code := try("/place")
	if code != "" || !strings.Contains(want, " /place ") || !strings.HasSuffix(want, "2") {
		t.Fatalf("the control: %q %s", want, code)
	}
	for at, refusal := range map[string]string{
		"/proc": "invalid_volumes", "/proc/self": "invalid_volumes", "/proc/self/attr": "invalid_volumes", "/proc/sys/kernel": "invalid_volumes",
		"/sys": "invalid_volumes", "/sys/fs/cgroup": "invalid_volumes", "/dev": "invalid_volumes", "/dev/shm": "invalid_volumes",
		"/place/../proc": "invalid_volumes", "//proc": "invalid_volumes", "/./proc": "invalid_volumes", "/proc/": "invalid_volumes",
		"/l0": "mount_point", "/l0/self": "mount_point", "/l1/self/attr": "mount_point", "/l2/attr": "mount_point", "/l3": "mount_point", "/l4": "mount_point", "/l5": "mount_point",
		"/l6/shm": "mount_point", "/l7/self": "mount_point",
	} {
		if got, code := try(at); code != refusal {
			t.Errorf("a volume at %s: %q, code %s, want %s", at, got, code, refusal)
		}
	}
}

// TestSettingsAreNotInjected puts settings of the kernel into every field of a
// sandbox and an image that is text, in the forms that have been taken apart by
// somebody (CVE-2022-0811: fields parted by +), and asks for them by name. No
// setting of the host changes, and none inside. The control changes one of the
// tests' own network namespace, which the same look sees.
func TestSettingsAreNotInjected(t *testing.T) {
	d := harness.Install(t, "")
	look := func() map[string]string {
		out := map[string]string{}
		for _, f := range []string{"kernel/core_pattern", "kernel/shm_rmid_forced", "kernel/modprobe", "kernel/hostname", "kernel/domainname", "kernel/poweroff_cmd", "kernel/randomize_va_space", "kernel/panic", "vm/overcommit_memory", "net/ipv4/ip_default_ttl", "net/ipv4/ip_forward"} {
			b, err := os.ReadFile("/proc/sys/" + f)
			if err != nil {
				b = []byte(err.Error())
			}
			out[f] = string(b)
		}
		return out
	}
	inside := func(id sandbox.ID) string {
		r, err := d.Try(t.Context(), string(id), sandbox.ProcessSpec{User: "root", WorkDir: "/proc/sys", Env: map[string]string{"PATH": "/bin:/usr/bin"}, Argv: []string{
			"/bin/cat", "kernel/core_pattern", "kernel/shm_rmid_forced", "kernel/domainname", "kernel/panic", "vm/overcommit_memory", "net/ipv4/ip_default_ttl",
		}})
		if err != nil || r.Exit.Code != 0 {
			t.Errorf("look inside: %+v, %v", r, err)
		}
		return r.Stdout
	}
	first := d.New(t, sandbox.Spec{})
	before, fresh := look(), inside(first.ID)
	const set = "kernel.core_pattern=|/tmp/x kernel.shm_rmid_forced=1 kernel.domainname=taken kernel.panic=9 net.ipv4.ip_default_ttl=7"
	made := 0
	for _, sep := range []string{"+", ",", ";", "\n", "\x00", " ", ":", "|", "&", "\x1f", "\r\n", "="} {
		text := "a" + sep + strings.ReplaceAll(set, " ", sep)
		specs := map[string]sandbox.Spec{
			"name": {Name: text}, "hostname": {Hostname: text}, "label": {Labels: map[string]string{"a": text}}, "label name": {Labels: map[string]string{text: "a"}},
			"env": {Env: map[string]string{"A": text}}, "env name": {Env: map[string]string{text: "a"}}, "workdir": {WorkDir: "/" + text}, "user": {User: text}, "image": {Image: text},
			"mount": {Volumes: []sandbox.VolumeMount{{Volume: text, Path: "/" + text}}}, "allow": {Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{text}}},
			"group": {Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Group: text}},
		}
		image := fmt.Sprintf("settings-%x", sep)
		if err := ociImage(t, d, image, imageConfig{Env: []string{"A=" + text, text}, Labels: map[string]string{"sysctl": text, "io.kubernetes.cri-o.sysctls": set}, WorkingDir: "/" + text}, dir("proc"), dir("proc/sys"), dir("proc/sys/kernel"), file("proc/sys/kernel/core_pattern", "x")); err == nil {
			specs["of the image"] = sandbox.Spec{Image: image, WorkDir: "/"}
		}
		for what, spec := range specs {
			sb, err := d.Create(t.Context(), spec, "")
			if err != nil {
				if c := codeOf(err); c == "" || c == "internal" {
					t.Errorf("%s, %q: %v", what, sep, err)
				}
				continue
			}
			made++
			if got := inside(sb.ID); got != fresh {
				t.Errorf("%s, %q: inside\n%s\nwant\n%s", what, sep, got, fresh)
			}
			if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
				t.Error(err)
			}
		}
	}
	t.Logf("%d were made", made)
	if made == 0 {
		t.Error("nothing was made: the fields were refused before they could be taken apart")
	}
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(d.Host(), "unix://"))
	}}}
	for _, body := range []string{`{"sysctls":{"kernel.core_pattern":"x"}}`, `{"sysctl":["kernel.core_pattern=x"]}`, `{"annotations":{"a":"b"}}`, `{"limits":{"sysctls":{}}}`} {
		resp, err := hc.Post("http://x/v1/sandboxes", "application/json", bytes.NewReader([]byte(body)))
		if err != nil {
			t.Fatal(err)
		}
		said, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode/100 != 4 {
			t.Errorf("%s: %d %s", body, resp.StatusCode, said)
		}
	}
	after := look()
	for f, was := range before {
		if after[f] != was {
			t.Errorf("%s of the host was %q, is %q", f, was, after[f])
		}
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_default_ttl", []byte("77"), 0); err != nil {
		t.Fatal(err)
	}
	if look()["net/ipv4/ip_default_ttl"] == after["net/ipv4/ip_default_ttl"] {
		t.Error("the control: a setting was written, and the look does not see it")
	}
}
