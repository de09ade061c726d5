//go:build root

package integration

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// file is one entry of a test's archive: a name that ends with / is a
// directory, a target makes it a symbolic link.
type file struct {
	name, data, target string
	mode               int64
}

func archiveOf(t testing.TB, files ...file) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), Linkname: f.target, Typeflag: tar.TypeReg, ModTime: time.Unix(1e9, 0)}
		switch {
		case f.target != "":
			h.Typeflag = tar.TypeSymlink
		case strings.HasSuffix(f.name, "/"):
			h.Typeflag = tar.TypeDir
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// built is a build that came to its end.
type built struct {
	image  sandbox.Image
	steps  []string // of each step its stage, number and how it went
	output string
	notes  []string
	took   time.Duration
	err    error
}

// build builds, with a context of the given files.
func (d *daemon) build(ctx context.Context, req sandbox.BuildRequest, tarball []byte) (b built) {
	var files func(io.Writer) error
	if tarball != nil {
		files = func(w io.Writer) error { _, err := w.Write(tarball); return err }
	}
	began := time.Now()
	b.image, b.err = d.Build(ctx, req, files, func(e sandbox.BuildEvent) error {
		switch e.Type {
		case sandbox.BuildStep:
			how := "RUN"
			if e.Cached {
				how = "CACHED"
			}
			if e.Step > 1 { // 1 is FROM
				b.steps = append(b.steps, fmt.Sprintf("%s %d %s", e.Stage, e.Step, how))
			}
		case sandbox.BuildOutput:
			b.output += string(e.Data)
		case sandbox.BuildNote:
			b.notes = append(b.notes, e.Text)
		}
		return nil
	})
	b.took = time.Since(began)
	return b
}

// mustBuild is build for one that must work.
func (d *daemon) mustBuild(t testing.TB, req sandbox.BuildRequest, tarball []byte) built {
	t.Helper()
	b := d.build(t.Context(), req, tarball)
	if b.err != nil {
		t.Fatalf("build: %v\n%s", b.err, b.output)
	}
	return b
}

// only picks the steps of one stage.
func (b built) only(stage string) []string {
	var out []string
	for _, s := range b.steps {
		if rest, ok := strings.CutPrefix(s, stage+" "); ok {
			out = append(out, rest)
		}
	}
	return out
}

// everMade counts the sandboxes there ever were.
func (d *daemon) everMade(t testing.TB) (n int) {
	t.Helper()
	for _, err := range d.All(t.Context(), sandbox.Filter{All: true}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}

// noStrays wants that no build has left a sandbox, a snapshot, an upper or a
// file of a context.
func (d *daemon) noStrays(t testing.TB) {
	t.Helper()
	look := func() (strays []string) {
		for sb, err := range d.All(t.Context(), sandbox.Filter{}) {
			if err != nil {
				t.Fatal(err)
			}
			strays = append(strays, fmt.Sprintf("sandbox %s %s", sb.ID, sb.Status))
		}
		snaps, err := d.Snapshots(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range snaps {
			strays = append(strays, "snapshot "+string(s.ID))
		}
		for _, n := range entries(t, filepath.Join(d.Dir, "state", "builds")) {
			strays = append(strays, "file of a build "+n)
		}
		return strays
	}
	var left []string
	if !testenv.Within(30*time.Second, func() bool { left = look(); return len(left) == 0 }) {
		t.Errorf("a build left %v", left)
	}
}

// entries lists a directory.
func entries(t testing.TB, dir string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}

// layersAre wants so many layers on the volume, once those nobody needs are
// gone.
func (d *daemon) layersAre(t testing.TB, want int) {
	t.Helper()
	var got []string
	if !testenv.Within(30*time.Second, func() bool {
		got = d.layers(t)
		return len(got) == want
	}) {
		t.Errorf("%d layers on the volume, want %d: %v", len(got), want, got)
	}
}

const greeter = `#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
	char b[100] = "";
	FILE *f = fopen("/share/asset.txt", "r");
	if (f) fgets(b, 100, f);
	printf("GREETING %s %s <nil> %d\n", getenv("WHO"), b, argc);
	return 0;
}
`

// TestBuildThreeStages compiles a program in one stage, makes a file for it in
// another, and puts both on a small image.
func TestBuildThreeStages(t *testing.T) {
	testenv.Need(t, testenv.Compiler)
	source := file{name: "src/greet.c", data: greeter}
	d := install(t, "")
	small := archiveOf(t, file{name: "etc/"}, file{name: "etc/passwd", data: "root:x:0:0::/:/bin/sh\napp:x:1000:1001::/:/bin/sh\n"},
		file{name: "etc/group", data: "root:x:0:\nstaff:x:50:\n"}, file{name: "usr/"}, file{name: "usr/bin/"}, file{name: "bin", target: "usr/bin"})
	if _, err := d.ImportImage(t.Context(), "small", bytes.NewReader(small)); err != nil {
		t.Fatal(err)
	}
	text := `# syntax=docker/dockerfile:1
ARG BASE=small
FROM host AS compile
WORKDIR /src
COPY src/ .
ARG GREETING=hello
RUN mkdir /out && sed -i "s/GREETING/$GREETING/" greet.c && gcc -static -o /out/greet greet.c
FROM host AS assets
RUN <<EOF
mkdir -p /out/share
printf asset >/out/share/asset.txt
EOF
FROM ${BASE}
COPY --from=compile --chown=app:staff --chmod=0755 /out/greet /bin/
COPY --from=assets /out /
ENV WHO=world
USER app
LABEL made.by="test of $BASE"
ENTRYPOINT ["/bin/greet"]
CMD ["x"]
`
	req := sandbox.BuildRequest{Names: []string{"greet", "greet:again"}, Dockerfile: text, Limits: sandbox.Limits{MemoryBytes: 1 << 30, CPUs: 2, PIDs: 1024}}
	files := archiveOf(t, source, file{name: "README", data: "not copied"})
	first := d.mustBuild(t, req, files)
	if diff := cmp.Diff([]string{"2 RUN", "3 RUN", "4 RUN"}, first.only("compile")); diff != "" {
		t.Errorf("steps of the first stage (-want +got):\n%s", diff)
	}
	img := first.image
	if img.Config.User != "app" || img.Config.Labels["made.by"] != "test of " || len(img.Config.Entrypoint) != 1 || len(img.Config.Cmd) != 1 {
		t.Errorf("the image's configuration: %+v", img.Config)
	}
	d.runs(t, "greet", "hello world asset <nil> 1\n")
	d.runs(t, "greet:again", "hello world asset <nil> 1\n")
	d.noStrays(t)

	// Again: nothing is run, and no sandbox is started.
	made := d.everMade(t)
	again := d.mustBuild(t, req, archiveOf(t, source, file{name: "README", data: "changed, and not copied"}))
	for _, s := range again.steps {
		if !strings.HasSuffix(s, "CACHED") {
			t.Errorf("step %s of an unchanged build", s)
		}
	}
	if n := d.everMade(t); n != made {
		t.Errorf("an unchanged build made %d sandboxes", n-made)
	}
	if again.image.Digest != img.Digest || len(again.steps) != len(first.steps) {
		t.Errorf("an unchanged build made %s of %v, the first %s of %v", again.image.Digest, again.steps, img.Digest, first.steps)
	}
	if again.took > first.took/5 {
		t.Errorf("an unchanged build took %v, the first %v", again.took, first.took)
	}
	t.Logf("first build %v, unchanged %v", first.took, again.took)

	// An argument: what follows it in its stage, and what takes files of that.
	req.Args = map[string]string{"GREETING": "servus"}
	changed := d.mustBuild(t, req, files)
	for stage, want := range map[string][]string{
		"compile": {"2 CACHED", "3 CACHED", "4 RUN"}, "assets": {"2 CACHED"}, "2": {"2 RUN", "3 RUN"},
	} {
		if diff := cmp.Diff(want, changed.only(stage)); diff != "" {
			t.Errorf("after a change of an argument, stage %s (-want +got):\n%s", stage, diff)
		}
	}
	d.runs(t, "greet", "servus world asset <nil> 1\n")

	// A command whose outcome is the same: what is copied is, too.
	req.Dockerfile = strings.Replace(text, "printf asset >", "printf %s asset >", 1)
	same := d.mustBuild(t, req, files)
	for stage, want := range map[string][]string{
		"compile": {"2 CACHED", "3 CACHED", "4 CACHED"}, "assets": {"2 RUN"}, "2": {"2 CACHED", "3 CACHED"},
	} {
		if diff := cmp.Diff(want, same.only(stage)); diff != "" {
			t.Errorf("after a change that changes no file, stage %s (-want +got):\n%s", stage, diff)
		}
	}

	// Without the cache, and only one stage of it.
	req.Target, req.NoCache, req.Names = "assets", true, nil
	if got := d.mustBuild(t, req, files).steps; !cmp.Equal(got, []string{"assets 2 RUN"}) {
		t.Errorf("a target without the cache: %v", got)
	}

	// What the cache and the images kept goes with them.
	if _, err := d.PruneBuildCache(t.Context(), sandbox.BuildCachePrune{}); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"greet", "greet:again"} {
		if err := d.RemoveImage(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	d.layersAre(t, 2) // host and small
}

// runs runs an image's own command.
func (d *daemon) runs(t testing.TB, image, want string) {
	t.Helper()
	img, err := d.Image(t.Context(), image)
	if err != nil {
		t.Fatal(err)
	}
	sb := d.create(t, sandbox.Spec{Image: image})
	defer func() { _, _ = d.Remove(context.WithoutCancel(t.Context()), string(sb.ID)) }()
	r, err := d.try(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: img.Config.Entrypoint})
	if err != nil || r.stdout != want {
		t.Errorf("image %s says %q, %v (%s); want %q", image, r.stdout, err, r.stderr, want)
	}
}

// TestBuildCopies looks at what COPY, ADD and WORKDIR leave, from inside.
func TestBuildCopies(t *testing.T) {
	d := install(t, "")
	packed := archiveOf(t, file{name: "in/deep/"}, file{name: "in/deep/f", data: "packed", mode: 0o600})
	files := archiveOf(t, file{name: "a.txt", data: "A"}, file{name: "b.txt", data: "B", mode: 0o600}, file{name: "d/", mode: 0o711}, file{name: "d/run", data: "#!/bin/sh\n", mode: 0o755},
		file{name: "d/up", target: "../a.txt"}, file{name: "p.tar", data: string(packed)}, file{name: "abs", target: "/etc"})
	b := d.mustBuild(t, sandbox.BuildRequest{Names: []string{"copies"}, Dockerfile: `FROM host AS src
RUN mkdir -p /out/x && echo owned >/out/x/f && chown -R 7:8 /out && ln -s /out/x /link && ln -s x/f /out/l && ln /out/x/f /out/x/hard
FROM host
RUN echo 'app:x:1000:1001::/:/bin/sh' >>/etc/passwd; echo 'staff2:x:51:' >>/etc/group; mkdir /there; chmod 750 /there; ln -s there /linked
USER app
WORKDIR /work/deep
COPY a.txt .
COPY *.txt many/
COPY d /there
COPY d /linked/under
COPY --chown=app:staff2 d new/
COPY --chown=9 --chmod=0440 a.txt /n/m/o.txt
ADD p.tar a.txt /added/
COPY p.tar /p.tar
COPY <<one <<"two" /lines/
uid $HOME
one
raw $HOME
two
COPY --from=src /link/ /from/
COPY --from=src /out/l /from/l2
COPY --from=src /out/x/* /from/globbed/
USER root
RUN cd / && find work there n added p.tar lines from \( -type l -printf '%p %U:%G -> %l\n' \) -o \( -type f -printf '%p %m %U:%G %n %s\n' \) -o -printf '%p/ %m %U:%G\n' | sort && cat /lines/*
`}, files)
	want := fmt.Sprintf(`added/ 755 0:0
added/a.txt 644 0:0 1 1
added/in/ 755 0:0
added/in/deep/ 755 0:0
added/in/deep/f 600 0:0 1 6
from/ 755 0:0
from/f 644 7:8 1 6
from/globbed/ 755 0:0
from/globbed/f 644 7:8 1 6
from/globbed/hard 644 7:8 1 6
from/hard 644 7:8 1 6
from/l2 644 7:8 1 6
lines/ 755 0:0
lines/one 644 0:0 1 %d
lines/two 644 0:0 1 10
n/ 755 9:9
n/m/ 755 9:9
n/m/o.txt 440 9:9 1 1
p.tar 644 0:0 1 %d
there/ 750 0:0
there/run 755 0:0 1 10
there/under/ 755 0:0
there/under/run 755 0:0 1 10
there/under/up 0:0 -> ../a.txt
there/up 0:0 -> ../a.txt
work/ 755 1000:1001
work/deep/ 755 1000:1001
work/deep/a.txt 644 0:0 1 1
work/deep/many/ 755 0:0
work/deep/many/a.txt 644 0:0 1 1
work/deep/many/b.txt 600 0:0 1 1
work/deep/new/ 755 1000:51
work/deep/new/run 755 1000:51 1 10
work/deep/new/up 1000:51 -> ../a.txt
uid 
raw $HOME
`, len("uid \n"), len(packed))
	if diff := cmp.Diff(want, b.output); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

// TestBuildCommands: how RUN runs what, as whom, where and with what.
func TestBuildCommands(t *testing.T) {
	d := install(t, "")
	b := d.mustBuild(t, sandbox.BuildRequest{
		Args: map[string]string{"GIVEN": "given", "http_proxy": "http://proxy.example"}, Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen},
		Dockerfile: `FROM host
ENV A=1
ARG GIVEN
ARG DEFAULT=d$A
RUN echo $A $GIVEN $DEFAULT $http_proxy $(pwd) $(id -u):$(id -g) $HOME
RUN ["/bin/echo", "$A"]
USER 1000:1001
WORKDIR /w
RUN <<EOF
echo $(pwd) $(id -u):$(id -g)
echo $0 | cut -c1-10
EOF
RUN cat <<ONE - <<TWO
first $A
ONE
second
TWO
RUN <<SCRIPT
#!/usr/bin/env -S sed -n 2p
this is said
SCRIPT
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN false | true || echo pipefail ${BASH_VERSION:0:0}
RUN ls -A /dev/shm | wc -l
RUN ls /sys/class/net | grep -vc lo
RUN --network=none ls /sys/class/net | grep -vc lo || true
`,
	}, nil)
	const want = `1 given d1 http://proxy.example / 0:0 /root
$A
/w 1000:1001
/bin/sh
second
this is said
pipefail
0
1
0
`
	if diff := cmp.Diff(want, b.output); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
	for _, h := range b.image.Config.Env {
		if strings.Contains(h, "proxy") {
			t.Errorf("the image remembers %q", h)
		}
	}
}

// TestBuildOfAWholeSystem: the way base images are made, of an archive with
// all that such archives have.
func TestBuildOfAWholeSystem(t *testing.T) {
	d := install(t, "")
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./dev/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./dev/console", Typeflag: tar.TypeChar, Devmajor: 5, Devminor: 1},
		{Name: "./proc/", Typeflag: tar.TypeDir, Mode: 0o555},
		{Name: "./sys/", Typeflag: tar.TypeDir, Mode: 0o555},
		{Name: "./tmp/", Typeflag: tar.TypeDir, Mode: 0o1777},
		{Name: "./usr/bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./bin", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"},
		{Name: "./bin/su", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 3, Gid: 4},
		{Name: "./usr/bin/su2", Typeflag: tar.TypeLink, Linkname: "./usr/bin/su"},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	out := d.mustBuild(t, sandbox.BuildRequest{Dockerfile: `FROM scratch AS system
ADD root.tar /
FROM host
COPY --from=system / /system/
RUN cd /system && find . \( -type l -printf '%p -> %l\n' \) -o -printf '%p %y %m %U:%G\n' | grep -v '^./etc' | sort
`}, archiveOf(t, file{name: "root.tar", data: b.String()})).output
	const want = `. d 755 0:0
./bin -> usr/bin
./tmp d 1777 0:0
./usr d 755 0:0
./usr/bin d 755 0:0
./usr/bin/su f 4755 3:4
./usr/bin/su2 f 4755 3:4
`
	if diff := cmp.Diff(want, out); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

// TestBuildFailures: each leaves no image and nothing else, and says where.
func TestBuildFailures(t *testing.T) {
	d := install(t, "")
	hostile := archiveOf(t, file{name: "l", target: "/etc"}, file{name: "l/passwd", data: "x"})
	outside := archiveOf(t, file{name: "a", data: "x"}, file{name: "l", target: "/etc"})
	for _, c := range []struct {
		name, text, code string
		files            []byte
		tells            []string
	}{
		{"a command fails", "FROM host\nRUN echo before\nRUN echo the end >&2; exit 7", "build_step_failed", nil, []string{"line 3", "exit status 7", "the end", "RUN echo the end"}},
		{"no such command", "FROM host\nRUN [\"/no/such\"]", "build_step_failed", nil, []string{"line 2", "/no/such"}},
		{"no such user", "FROM host\nUSER nobody-here\nRUN id", "build_step_failed", nil, []string{"line 3", "nobody-here"}},
		{"no such source", "FROM host\nCOPY x y", "build_step_failed", nil, []string{"line 2", "x", "context"}},
		{"no such source in a stage", "FROM host AS a\nFROM host\nCOPY --from=a /x/y /z", "build_step_failed", nil, []string{"line 3", "stage a"}},
		{"no such owner", "FROM host\nCOPY --chown=nobody-here a b", "invalid_user", archiveOf(t, file{name: "a"}), []string{"line 2", "nobody-here"}},
		{"no such image", "FROM host\nCOPY --from=nothing:1 /a /b", "image_not_found", nil, []string{"line 2", "nothing:1"}},
		{"no such base", "FROM nothing:1", "image_not_found", nil, []string{"line 1", "nothing:1"}},
		{"a directory over a file", "FROM host\nRUN touch /f\nCOPY d /f/", "not_a_directory", archiveOf(t, file{name: "d/x"}), []string{"line 3"}},
		{"a file the kernel has", "FROM host\nCOPY a /proc/x", "kernel_file", archiveOf(t, file{name: "a"}), []string{"line 2"}},
		{"no Dockerfile", "hello", "dockerfile_invalid", nil, []string{"line 1"}},
		{"what is not supported", "FROM host\nRUN --mount=type=cache,target=/c x", "dockerfile_unsupported", nil, []string{"line 2", "--mount"}},
		{"a context that leads out", "FROM host\nCOPY l /x/", "bad_context", hostile, nil},
		{"a context that is none", "FROM host", "bad_context", []byte(strings.Repeat("no archive", 100)), nil},
		{"a link out of the context", "FROM host\nCOPY l/passwd /x", "build_step_failed", outside, []string{"line 2"}},
		{"an archive that leads out", "FROM host\nADD p.tar /x/", "archive_escapes", archiveOf(t, file{name: "p.tar", data: string(hostile)}), []string{"line 2"}},
		{"an archive packed with xz", "FROM host\nADD p.xz /x/", "build_step_failed", archiveOf(t, file{name: "p.xz", data: "\xfd7zXZ\x00 and more"}), []string{"line 2", "xz"}},
		{"the network is off", "FROM host\nRUN ls /sys/class/net | grep -v lo", "build_step_failed", nil, []string{"line 2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := d.build(t.Context(), sandbox.BuildRequest{Names: []string{"failed"}, Dockerfile: c.text}, c.files)
			if sandbox.CodeOf(b.err) != c.code {
				t.Errorf("%v (%s), want code %s", b.err, sandbox.CodeOf(b.err), c.code)
			}
			for _, s := range c.tells {
				if b.err != nil && !strings.Contains(b.err.Error(), s) {
					t.Errorf("%q does not tell %q", b.err, s)
				}
			}
			if _, err := d.Image(t.Context(), "failed"); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("there is an image: %v", err)
			}
		})
	}
	d.noStrays(t)
	// The steps before the one that failed stay.
	if b := d.mustBuild(t, sandbox.BuildRequest{Dockerfile: "FROM host\nRUN echo before\nRUN true"}, nil); !cmp.Equal(b.steps, []string{"0 2 CACHED", "0 3 RUN"}) {
		t.Errorf("after a failure: %v", b.steps)
	}
}

// TestBuildEndsWhatRunsOn: a step is over with its command; what it left
// running ends, and the layer holds still.
func TestBuildEndsWhatRunsOn(t *testing.T) {
	d := install(t, "")
	b := d.mustBuild(t, sandbox.BuildRequest{Dockerfile: "FROM host\nRUN (trap '' TERM; while :; do echo >>/grows; done) >/dev/null 2>&1 & while [ ! -s /grows ]; do sleep 0.01; done\nRUN wc -l </grows; sleep 0.2; wc -l </grows; ps ax | grep -c '[g]rows' || true\n"}, nil)
	lines := strings.Fields(b.output)
	if len(lines) != 3 || lines[0] == "0" || lines[0] != lines[1] || lines[2] != "1" { // the shell that asks
		t.Errorf("the next step sees %q", b.output)
	}
	d.noStrays(t)
}

// TestBuildCancelled: a client that goes away ends its build.
func TestBuildCancelled(t *testing.T) {
	d := install(t, "")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan built, 1)
	go func() {
		done <- d.build(ctx, sandbox.BuildRequest{Names: []string{"never"}, Dockerfile: "FROM host AS a\nRUN echo kept\nRUN sleep 1000\nFROM host AS b\nRUN sleep 1000\nFROM a\nCOPY --from=b /x /y\n"}, nil)
	}()
	testenv.Eventually(t, 60*time.Second, "both stages run", func() bool {
		n := 0
		for sb, err := range d.All(t.Context(), sandbox.Filter{}) {
			if err != nil {
				t.Fatal(err)
			}
			if procs, err := d.Processes(t.Context(), string(sb.ID)); err == nil && len(procs) == 1 && strings.Contains(strings.Join(procs[0].Argv, " "), "sleep 1000") {
				n++
			}
		}
		return n == 2
	})
	cancel()
	if b := <-done; !errors.Is(b.err, context.Canceled) {
		t.Errorf("the client: %v", b.err)
	}
	d.noStrays(t)
	if _, err := d.Image(t.Context(), "never"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("there is an image: %v", err)
	}
	b := d.build(t.Context(), sandbox.BuildRequest{Dockerfile: "FROM host AS a\nRUN echo kept\nRUN sleep 1000\n", TimeoutSeconds: 10}, nil)
	if sandbox.CodeOf(b.err) != "build_timeout" || !cmp.Equal(b.steps, []string{"a 2 CACHED", "a 3 RUN"}) {
		t.Errorf("a build that takes too long: %v, %v", b.err, b.steps)
	}
	d.noStrays(t)
}

// TestBuildKilled kills the daemon at some moment of a build: afterwards there
// is nothing of it but whole steps in the cache, and the build works.
func TestBuildKilled(t *testing.T) {
	d := install(t, "")
	text := "FROM host AS a\nWORKDIR /w\nCOPY a /w/\nRUN echo 1 >/one\nRUN echo 2 >/two; sleep 0.05\nFROM scratch\nCOPY --from=a /one /two /\nCOPY a /\n"
	files := archiveOf(t, file{name: "a", data: strings.Repeat("data", 1<<16)})
	req := sandbox.BuildRequest{Names: []string{"killed"}, Dockerfile: text}
	length := d.mustBuild(t, req, files).took
	d.mustForget(t)
	for i := range testenv.Cycles(t, 6, 60) {
		done := make(chan built, 1)
		go func() { done <- d.build(t.Context(), req, files) }()
		<-time.After(time.Duration(rand.Int64N(int64(length)))) // the moment is what is tried
		d.kill()
		<-done
		d.start()
		d.noStrays(t)
		if t.Failed() {
			t.Fatalf("cycle %d", i)
		}
		if i%2 == 1 {
			d.mustForget(t)
		}
	}
	d.mustBuild(t, req, files)
	d.noStrays(t)
	d.mustForget(t)
}

// mustForget removes what builds left on purpose, and wants nothing to remain.
func (d *daemon) mustForget(t testing.TB) {
	t.Helper()
	if _, err := d.PruneBuildCache(t.Context(), sandbox.BuildCachePrune{}); err != nil {
		t.Fatal(err)
	}
	if err := d.RemoveImage(t.Context(), "killed"); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		t.Fatal(err)
	}
	d.layersAre(t, 1) // the host's
}

// TestBuildDiskLimit: a step that writes too much fails, and says why.
func TestBuildDiskLimit(t *testing.T) {
	testenv.Need(t, testenv.Quota)
	d := install(t, "")
	big := archiveOf(t, file{name: "big", data: strings.Repeat("x", 12<<20)})
	limits := sandbox.Limits{DiskBytes: 8 << 20}
	b := d.build(t.Context(), sandbox.BuildRequest{Dockerfile: "FROM host\nCOPY big /big\n", Limits: limits}, big)
	if sandbox.CodeOf(b.err) != "disk_full" || !strings.Contains(fmt.Sprint(b.err), "line 2") {
		t.Errorf("COPY over the limit: %v", b.err)
	}
	b = d.build(t.Context(), sandbox.BuildRequest{Dockerfile: "FROM host\nRUN dd if=/dev/zero of=/big bs=1M count=12\n", Limits: limits}, nil)
	if sandbox.CodeOf(b.err) != "build_step_failed" || !strings.Contains(fmt.Sprint(b.err), "No space left") && !strings.Contains(fmt.Sprint(b.err), "quota exceeded") {
		t.Errorf("RUN over the limit: %v", b.err)
	}
	limits.DiskBytes = 32 << 20
	d.mustBuild(t, sandbox.BuildRequest{Dockerfile: "FROM host\nCOPY big /big\nRUN dd if=/dev/zero of=/big2 bs=1M count=12\n", Limits: limits}, big)
	d.noStrays(t)
}
