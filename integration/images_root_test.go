//go:build root

package integration

import (
	"context"
	"encoding/base64"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/imagetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// runImage runs an image as it says, or with arguments, and returns what it
// prints.
func (d *daemon) runImage(t testing.TB, img string, args ...string) string {
	t.Helper()
	_, p, err := d.Run(t.Context(), api.RunRequest{
		Sandbox: sandbox.Spec{Image: img},
		Process: api.ExecRequest{ProcessSpec: sandbox.ProcessSpec{Argv: args, ImageCommand: true, Main: true}},
	}, "")
	if err != nil {
		t.Fatalf("run image %s: %v", img, err)
	}
	defer p.Close()
	r, err := collect(p)
	if err != nil || r.exit.Code != 0 {
		t.Fatalf("run image %s: %+v %v", img, r, err)
	}
	return strings.TrimSpace(r.stdout)
}

// removeImage removes an image once the sandboxes of it that have just ended
// are gone.
func (d *daemon) removeImage(t testing.TB, name string) {
	t.Helper()
	var err error
	testenv.Within(15*time.Second, func() bool {
		err = d.RemoveImage(t.Context(), name)
		return sandbox.CodeOf(err) != "image_in_use"
	})
	if err != nil {
		t.Fatal(err)
	}
}

// listing is the digest of an image's tree, as a sandbox sees it.
func (d *daemon) listing(t testing.TB, img string) string {
	t.Helper()
	sb := d.create(t, sandbox.Spec{Image: img, User: "0", WorkDir: "/"})
	defer func() {
		if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
			t.Error(err)
		}
	}()
	return d.sh(t, string(sb.ID), `find usr srv -type d -printf '%p d %m %U %G %T@\n' -o -printf '%p %y %m %U %G %s %l %T@ %n\n' | LC_ALL=C sort | sha256sum; find usr srv -type f -print0 | LC_ALL=C sort -z | xargs -0 cat | sha256sum; test ! -e etc/removed-later`)
}

// TestRegistry brings an image of Debian packages in, runs it, sends it out
// again in every way there is, and gets the same tree back each time.
func TestRegistry(t *testing.T) {
	l := makeLayout(t, int64(soak(8, 220))<<20)
	g, other := startRegistry(t, false), startRegistry(t, false)
	l.push(g, "team/app:1")
	d := install(t, "")
	before := d.imageFiles(t)
	begin := time.Now()
	var downloaded atomic.Int64
	img, err := d.PullImage(t.Context(), sandbox.PullRequest{Reference: g.host + "/team/app:1"}, func(p sandbox.ImageProgress) {
		if p.Status == sandbox.StepDone {
			downloaded.Add(p.Total)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("pulled %d MiB of files in %v", img.SizeBytes>>20, time.Since(begin))
	if img.Digest != l.digest || !slices.Equal(img.Layers, l.diffIDs) || img.SizeBytes < l.bytes || img.Config.User != "app" {
		t.Errorf("%+v; want digest %s", img, l.digest)
	}
	if downloaded.Load() == 0 {
		t.Error("no progress was told")
	}
	name := img.Name
	if got := d.runImage(t, name); got != "hello world from app in /srv with hi" {
		t.Errorf("as it says: %q", got)
	}
	if got := d.runImage(t, name, "you", "there"); got != "hello you there from app in /srv with hi" {
		t.Errorf("with arguments: %q", got)
	}
	tree := d.listing(t, name)

	// Back to the registry it came from: nothing is sent, and the digest stays.
	out, err := d.PushImage(t.Context(), sandbox.PushRequest{Source: name, Reference: g.host + "/another/name:2"}, nil)
	if err != nil || out.Digest != l.digest || out.Uploaded != 0 {
		t.Errorf("push to the same registry: %+v %v", out, err)
	}
	if got := skopeo(t, "inspect", "--tls-verify=false", "--format", "{{.Digest}}", "docker://"+g.host+"/another/name:2"); strings.TrimSpace(got) != l.digest {
		t.Errorf("another tool sees %s there", got)
	}
	again, err := d.PullImage(t.Context(), sandbox.PullRequest{Reference: g.host + "/another/name@" + l.digest, Name: "pinned"}, nil)
	if err != nil || again.Digest != l.digest || !slices.Equal(again.Layers, img.Layers) {
		t.Errorf("pull by digest: %+v %v", again, err)
	}
	// To a registry that has none of it: made anew, and the same tree.
	out, err = d.PushImage(t.Context(), sandbox.PushRequest{Source: name, Reference: other.host + "/app:1"}, nil)
	if err != nil || out.Uploaded == 0 || out.Rebuilt != 4 {
		t.Fatalf("push to another registry: %+v %v", out, err)
	}
	skopeo(t, "copy", "--src-tls-verify=false", "docker://"+other.host+"/app:1", "oci:"+t.TempDir()+"/check:1") // verifies all digests
	archives := map[string]string{}
	for _, format := range []string{"oci", "docker", "tar"} {
		archives[format] = filepath.Join(t.TempDir(), format+".tar")
		if _, errs, code := d.cli(t, nil, "", "image", "export", "--format", format, "-f", archives[format], name); code != 0 {
			t.Fatalf("export %s: %s", format, errs)
		}
	}
	skopeo(t, "copy", "oci-archive:"+archives["oci"], "oci:"+t.TempDir()+"/check:1")
	skopeo(t, "copy", "docker-archive:"+archives["docker"], "oci:"+t.TempDir()+"/check:1")
	archives["skopeo"] = filepath.Join(t.TempDir(), "skopeo.tar") // layers first, the manifest last
	skopeo(t, "copy", "oci-archive:"+archives["oci"], "docker-archive:"+archives["skopeo"]+":app:1")

	// All of it away, with every layer; then in again by each way.
	for _, n := range []string{name, "pinned"} {
		d.removeImage(t, n)
	}
	d.imagesGone(t, before)
	ways := map[string]func() (string, string, int){
		"registry": func() (string, string, int) {
			return d.cli(t, nil, "", "image", "pull", "--name", "back", other.host+"/app:1")
		},
		"oci":    func() (string, string, int) { return d.cli(t, nil, "", "image", "import", "back", archives["oci"]) },
		"docker": func() (string, string, int) { return d.cli(t, nil, "", "image", "import", "back", archives["docker"]) },
		"skopeo": func() (string, string, int) { return d.cli(t, nil, "", "image", "import", "back", archives["skopeo"]) },
		"tar":    func() (string, string, int) { return d.cli(t, nil, "", "image", "import", "back", archives["tar"]) },
		"folder": func() (string, string, int) { return d.cli(t, nil, "", "image", "import", "back", l.dir) },
	}
	if soak(0, 1) == 0 { // these differ in what package image tests by itself
		delete(ways, "oci")
		delete(ways, "folder")
	}
	for way, bring := range ways {
		if _, errs, code := bring(); code != 0 {
			t.Fatalf("%s: %s", way, errs)
		}
		if got := d.listing(t, "back"); got != tree {
			t.Errorf("%s: the tree is another\n%s\nwas\n%s", way, got, tree)
		}
		if way != "tar" {
			if got := d.runImage(t, "back"); got != "hello world from app in /srv with hi" {
				t.Errorf("%s: %q", way, got)
			}
		}
		d.removeImage(t, "back")
		d.imagesGone(t, before)
	}
}

// TestPushOfFiles sends the files of a sandbox and of a snapshot to the registry
// their image is of: only what was written is sent, and it comes back.
func TestPushOfFiles(t *testing.T) {
	l := makeLayout(t, 1<<20)
	g := startRegistry(t, false)
	l.push(g, "app:1")
	d := install(t, "")
	before := d.imageFiles(t)
	// The image is pulled because its name says which registry has it.
	out, errs, code := d.cli(t, nil, "", "run", "--rm", "--image", g.host+"/app:1", "--", "again")
	if code != 0 || out != "hello again from app in /srv with hi\n" {
		t.Fatalf("exit %d, %q, %s", code, out, errs)
	}
	if out, errs, code = d.cli(t, nil, "", "run", "--rm", "--image", g.host+"/app:1", "--entrypoint", "id", "--", "-un"); code != 0 || out != "app\n" {
		t.Errorf("another entrypoint: exit %d, %q, %s", code, out, errs)
	}
	if _, errs, code = d.cli(t, nil, "", "run", "--rm", "--image", "nothere:1"); code == 0 || !strings.Contains(errs, "image pull") {
		t.Errorf("an image that is not here: exit %d, %s", code, errs)
	}
	sb := d.create(t, sandbox.Spec{Image: g.host + "/app:1", User: "0"})
	ref := string(sb.ID)
	d.sh(t, ref, "echo first > /srv/made; rm /srv/app-again; mkdir -p /opt/new && mv /srv /srv2 && mv /srv2 /srv")
	snap, err := d.Snapshot(t.Context(), ref, sandbox.SnapshotRequest{Name: "one"})
	if err != nil {
		t.Fatal(err)
	}
	d.sh(t, ref, "echo second > /srv/made")
	for i, source := range []string{string(snap.ID), ref} {
		to := g.host + "/states/app:" + []string{"snapshot", "sandbox"}[i]
		pushed, err := d.PushImage(t.Context(), sandbox.PushRequest{Source: source, Reference: to}, nil)
		if err != nil || pushed.Uploaded == 0 || pushed.Uploaded > pushed.Size/10 {
			t.Errorf("push of %s: %+v %v", source, pushed, err)
		}
		img, err := d.PullImage(t.Context(), sandbox.PullRequest{Reference: to}, nil)
		if err != nil || img.Config.User != "app" {
			t.Fatalf("%+v %v", img, err)
		}
		back := d.create(t, sandbox.Spec{Image: to, User: "0"})
		want := []string{"first", "second"}[i]
		if got := d.sh(t, string(back.ID), "cat /srv/made; test ! -e /srv/app-again && test -d /opt/new && ls /srv"); got != want+"\napp\nmade" {
			t.Errorf("%s came back as %q", source, got)
		}
	}
	if all, err := d.Snapshots(t.Context(), ""); err != nil || len(all) != 1 {
		t.Errorf("%d snapshots, %v; want the one that was asked for", len(all), err)
	}
	// The same by archive, and refused for what stands on the host's files.
	archive := filepath.Join(t.TempDir(), "x.tar")
	if _, errs, code := d.cli(t, nil, "", "image", "export", "-f", archive, string(snap.ID)); code != 0 {
		t.Error(errs)
	}
	skopeo(t, "copy", "oci-archive:"+archive, "oci:"+t.TempDir()+"/check:1")
	host := d.create(t, sandbox.Spec{})
	if _, err := d.PushImage(t.Context(), sandbox.PushRequest{Source: string(host.ID), Reference: g.host + "/x"}, nil); sandbox.CodeOf(err) != "image_unsupported" {
		t.Errorf("a sandbox of the host image: %v", err)
	}
	if pruned, err := d.PruneImages(t.Context(), sandbox.PruneRequest{All: true}); err != nil || len(pruned.Images) != 0 {
		t.Errorf("pruned what is in use: %+v %v", pruned, err)
	}
	d.RemoveAll(t.Context())
	if _, err := d.RemoveSnapshot(t.Context(), string(snap.ID)); err != nil {
		t.Fatal(err)
	}
	d.agree(t) // what has ended holds its layers until its files are gone
	var pruned sandbox.Pruned
	if !testenv.Within(15*time.Second, func() bool { // sandboxes that have just ended
		more, err := d.PruneImages(t.Context(), sandbox.PruneRequest{})
		pruned.Images, pruned.FreedBytes = append(pruned.Images, more.Images...), pruned.FreedBytes+more.FreedBytes
		return err == nil && len(pruned.Images) == 3
	}) {
		t.Errorf("pruned %+v", pruned)
	}
	if pruned.FreedBytes < l.bytes {
		t.Errorf("%d bytes were freed, want at least %d", pruned.FreedBytes, l.bytes)
	}
	d.imagesGone(t, before)
}

// TestRegistryAuth needs a password, which comes from where docker login keeps
// it, from a helper, from the command line or from the daemon's configuration.
func TestRegistryAuth(t *testing.T) {
	l := tinyLayout(t)
	g := startRegistry(t, true)
	l.push(g, "private/app:1", "--dest-creds", registryUser+":"+registryPassword)
	d := install(t, "")
	ref := g.host + "/private/app:1"
	docker := func(config string) []string {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		return []string{"DOCKER_CONFIG=" + dir, "HOME=" + dir}
	}
	auth := func(userPassword string) []string {
		return docker(`{"auths":{"` + g.host + `":{"auth":"` + base64.StdEncoding.EncodeToString([]byte(userPassword)) + `"}}}`)
	}
	helpers := t.TempDir()
	script := "#!/bin/sh\nread host\necho '{\"ServerURL\":\"x\",\"Username\":\"" + registryUser + "\",\"Secret\":\"" + registryPassword + "\"}'\n"
	if err := os.WriteFile(filepath.Join(helpers, "docker-credential-test"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	helper := append(docker(`{"credHelpers":{"`+g.host+`":"test"}}`), "PATH="+helpers+":"+os.Getenv("PATH"))
	for _, tc := range []struct {
		name, in string
		env      []string
		args     []string
		ok       bool
	}{
		{"nobody", "", docker("{}"), nil, false},
		{"docker login", "", auth(registryUser + ":" + registryPassword), nil, true},
		{"docker login, wrong password", "", auth(registryUser + ":wrong"), nil, false},
		{"a helper", "", helper, nil, true},
		{"command line", registryPassword + "\n", docker("{}"), []string{"--user", registryUser, "--password-stdin"}, true},
		{"command line, wrong password", "wrong\n", docker("{}"), []string{"--user", registryUser, "--password-stdin"}, false},
	} {
		out, errs, code := d.cli(t, tc.env, tc.in, append(append([]string{"image", "pull", "-q"}, tc.args...), ref)...)
		if tc.ok {
			if code != 0 || strings.TrimSpace(out) != l.digest {
				t.Errorf("%s: exit %d, %q, %s", tc.name, code, out, errs)
			}
			d.removeImage(t, ref)
		} else if code == 0 || !strings.Contains(errs, "image_unauthorized") || !strings.Contains(errs, "docker login") && !strings.Contains(errs, "password") {
			t.Errorf("%s: exit %d, %s", tc.name, code, errs)
		}
	}
	if strings.Contains(d.Log.String(), registryPassword) {
		t.Error("the password stands in the daemon's log")
	}
	d.stop() // one network namespace has room for one daemon
	configured := install(t, "registries:\n  '"+g.host+"': {username: "+registryUser+", password: "+registryPassword+"}\n")
	if _, err := configured.PullImage(t.Context(), sandbox.PullRequest{Reference: ref}, nil); err != nil {
		t.Errorf("by the daemon's configuration: %v", err)
	}
}

// TestRegistryMirror asks mirrors first, and the registry where they fail.
func TestRegistryMirror(t *testing.T) {
	l := tinyLayout(t)
	g, empty := startRegistry(t, false), startRegistry(t, false)
	l.push(g, "team/app:1")
	d := install(t, "registries:\n"+
		"  registry.invalid: {mirrors: ['"+g.host+"']}\n"+
		"  '"+g.host+"': {mirrors: ['"+empty.host+"', '127.0.0.1:1'], plain_http: true}\n")
	img, err := d.PullImage(t.Context(), sandbox.PullRequest{Reference: "registry.invalid/team/app:1"}, nil)
	if err != nil || img.Digest != l.digest || img.Name != "registry.invalid/team/app:1" {
		t.Errorf("by a mirror of a registry that is not there: %+v %v", img, err)
	}
	if img, err = d.PullImage(t.Context(), sandbox.PullRequest{Reference: g.host + "/team/app:1"}, nil); err != nil || img.Digest != l.digest {
		t.Errorf("past mirrors that have nothing and are not there: %+v %v", img, err)
	}
	if _, err = d.PullImage(t.Context(), sandbox.PullRequest{Reference: g.host + "/team/absent:1"}, nil); sandbox.CodeOf(err) != "image_not_found" {
		t.Errorf("what nobody has: %v", err)
	}
	g.stop()
	if _, err = d.PullImage(t.Context(), sandbox.PullRequest{Reference: "registry.invalid/team/app:1"}, nil); sandbox.CodeOf(err) != "registry_unreachable" {
		t.Errorf("without the mirror: %v", err)
	}
}

// TestRegistryInPlain reaches a registry that has no TLS at an address that is
// not this machine's loopback: only where that was asked for.
func TestRegistryInPlain(t *testing.T) {
	const address = "192.0.2.77"
	if err := run("ip", "addr", "add", address+"/32", "dev", "lo"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = run("ip", "addr", "del", address+"/32", "dev", "lo") })
	l := tinyLayout(t)
	g := startRegistry(t, false)
	l.push(g, "app:1")
	host := strings.Replace(g.host, "127.0.0.1", address, 1)
	// The address is one of this host's own: only a registry that the operator
	// names may have one.
	d := install(t, "")
	ref := host + "/app:1"
	if _, errs, code := d.cli(t, nil, "", "image", "pull", "--plain-http", host, ref); code == 0 || !strings.Contains(errs, "registry_own_address") {
		t.Errorf("an address of the host's own: exit %d, %s", code, errs)
	}
	d.stop() // one network namespace has room for one daemon
	d = install(t, "registries: {'"+host+"': {}}\n")
	if _, errs, code := d.cli(t, nil, "", "image", "pull", ref); code == 0 || !strings.Contains(errs, "registry_unreachable") || !strings.Contains(errs, "--plain-http") {
		t.Errorf("without a word: exit %d, %s", code, errs)
	}
	if _, errs, code := d.cli(t, nil, "", "image", "pull", "--plain-http", "other:5000", ref); code == 0 {
		t.Errorf("allowed for another: %s", errs)
	}
	if out, errs, code := d.cli(t, nil, "", "image", "pull", "-q", "--plain-http", host, ref); code != 0 || strings.TrimSpace(out) != l.digest {
		t.Errorf("allowed: exit %d, %q, %s", code, out, errs)
	}
	d.stop() // one network namespace has room for one daemon
	configured := install(t, "registries: {'"+host+"': {plain_http: true}}\n")
	if _, err := configured.PullImage(t.Context(), sandbox.PullRequest{Reference: ref}, nil); err != nil {
		t.Errorf("configured: %v", err)
	}
}

// TestPullOntoAFullDisk has no room for what is on its way.
func TestPullOntoAFullDisk(t *testing.T) {
	l := tinyLayout(t)
	g := startRegistry(t, false)
	l.push(g, "app:1")
	d := install(t, "")
	before := d.imageFiles(t)
	d.stop()
	small := filepath.Join(d.Dir, "state", "images", "partial")
	if err := run("mount", "-t", "tmpfs", "-o", "size=1m", "small", small); err != nil {
		t.Fatal(err)
	}
	unmount := sync.OnceFunc(func() {
		d.stop()
		if err := run("umount", small); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(unmount)
	d.start()
	req := sandbox.PullRequest{Reference: g.host + "/app:1"}
	if _, err := d.PullImage(t.Context(), req, nil); sandbox.CodeOf(err) != "disk_full" || !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("%v", err)
	}
	if _, err := d.Image(t.Context(), req.Reference); sandbox.CodeOf(err) != "image_not_found" {
		t.Errorf("half of it is there: %v", err)
	}
	unmount()
	d.start()
	if _, err := d.PullImage(t.Context(), req, nil); err != nil {
		t.Errorf("with room: %v", err)
	}
	d.removeImage(t, req.Reference)
	d.imagesGone(t, before)
}

// TestHostileRegistry points a daemon at registries that lie, break and
// dawdle, all at once: each pull ends with its code, nothing stays, and the
// daemon stays small.
func TestHostileRegistry(t *testing.T) {
	d := install(t, "")
	before := d.imageFiles(t)
	t.Run("all", func(t *testing.T) {
		for _, h := range imagetest.Hostiles() {
			if h.Slow {
				continue // they wait for the daemon's 30 s; package image has them faster
			}
			t.Run(h.Name, func(t *testing.T) {
				t.Parallel()
				g := imagetest.Start(t)
				img, err := d.PullImage(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/" + h.Set(g)}, nil)
				if sandbox.CodeOf(err) != h.Code && (err != nil || h.Code != "") {
					t.Errorf("%v; want %q", err, h.Code)
				}
				if err == nil {
					d.removeImage(t, img.Name)
				}
			})
		}
		t.Run("a bomb", func(t *testing.T) {
			t.Parallel()
			g := imagetest.Start(t)
			m := &imagetest.Image{Blobs: map[string][]byte{}, Kind: imagetest.OCIManifest}
			m.AddLayer(imagetest.Tar("zeroes", make([]byte, 512<<20)))
			g.Put("app", "1", m.Seal(nil))
			if _, err := d.PullImage(t.Context(), sandbox.PullRequest{Reference: g.Host() + "/app:1"}, nil); sandbox.CodeOf(err) != "image_too_large" {
				t.Errorf("%v", err)
			}
		})
	})
	if rss := d.peakRSS(t); rss > 256<<20 {
		t.Errorf("the daemon had %d MiB", rss>>20)
	} else {
		t.Logf("the daemon had %d MiB at most", rss>>20)
	}
	// What broke off may wait to be continued; nothing else of it is left.
	for _, name := range d.names(t, "images", "partial") {
		if err := os.Remove(d.stateOf("images", "partial", name)); err != nil {
			t.Error(err)
		}
	}
	d.imagesGone(t, before)
}

// TestKillDuringPull kills the daemon at random moments of a pull. After each
// the image is there whole or not at all, a repeated pull brings it, and when
// it is removed nothing of it is left.
func TestKillDuringPull(t *testing.T) {
	l := makeLayout(t, int64(soak(2, 30))<<20)
	g := startRegistry(t, false)
	l.push(g, "app:1")
	d := install(t, "")
	before := d.imageFiles(t)
	req := sandbox.PullRequest{Reference: g.host + "/app:1", Name: "app"}
	begin := time.Now()
	if _, err := d.PullImage(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
	whole := time.Since(begin)
	tree := d.listing(t, "app")
	d.removeImage(t, "app")
	d.imagesGone(t, before)
	done, resumed := 0, 0
	for round := range soak(3, 20) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := d.PullImage(ctx, req, nil)
			ended <- err
		}()
		<-time.After(time.Duration(rand.Int64N(int64(whole)))) // the kill comes at a random moment
		d.kill()
		cancel()
		<-ended
		d.start()
		switch _, err := d.Image(t.Context(), "app"); {
		case err == nil:
			done++
			if got := d.listing(t, "app"); got != tree {
				t.Fatalf("round %d: the image is there, and not whole", round)
			}
		case sandbox.CodeOf(err) != "image_not_found":
			t.Fatalf("round %d: %v", round, err)
		}
		resumed += len(d.names(t, "images", "partial"))
		if n := len(d.names(t, "images", "spool")); n != 0 {
			t.Errorf("round %d: %d spools are left", round, n)
		}
		if _, err := d.PullImage(t.Context(), req, nil); err != nil {
			t.Fatalf("round %d: pull again: %v", round, err)
		}
		if got := d.listing(t, "app"); got != tree {
			t.Fatalf("round %d: another tree", round)
		}
		d.removeImage(t, "app")
		d.imagesGone(t, before)
	}
	t.Logf("a pull takes %v; %d were over before the kill, %d layers were continued", whole, done, resumed)
}
