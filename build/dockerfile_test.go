package build

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// describe tells what an evaluated Dockerfile does, a line for each thing.
func describe(stages []*stage) string {
	var b strings.Builder
	line := func(parts ...string) { b.WriteString(strings.Join(parts, " ") + "\n") }
	for _, s := range stages {
		from := s.base.image
		if s.base.stage >= 0 {
			from = "stage"
		}
		line("FROM", from, "AS", s.name)
		for _, o := range s.ops {
			switch {
			case o.run != nil:
				r := o.run
				line("RUN", strings.Join(r.argv, "|"), "env="+strings.Join(r.env.pairs(), ","), "user="+r.user, "dir="+r.workdir)
				if r.offline {
					line("  offline")
				}
				if r.script != nil {
					line("  script", r.script.name, strings.ReplaceAll(r.script.data, "\n", "/"))
				}
				if len(r.proxies) > 0 {
					line("  proxies", strings.Join(r.proxies.pairs(), ","))
				}
			case o.copy != nil:
				c := o.copy
				words := []string{"COPY", strings.Join(c.sources, "|"), "to", c.dest}
				for _, in := range c.inlines {
					words = append(words, "inline="+in.name+":"+strings.ReplaceAll(in.data, "\n", "/"))
				}
				if c.chown != "" {
					words = append(words, "chown="+c.chown)
				}
				if c.chmod != nil {
					words = append(words, "chmod")
				}
				if len(c.exclude) > 0 {
					words = append(words, "exclude="+strings.Join(c.exclude, "|"))
				}
				if c.unpack {
					words = append(words, "unpack")
				}
				if c.from.stage >= 0 {
					words = append(words, "fromstage")
				} else if c.from.image != "" {
					words = append(words, "from="+c.from.image)
				}
				line(words...)
			case o.dir != nil:
				line("DIR", o.dir.path, o.dir.user)
			}
		}
	}
	return b.String()
}

func TestSupportedInstructions(t *testing.T) {
	env := "env=FROMBASE=yes,PATH=/bin"
	for _, c := range []struct {
		name, text string
		args       map[string]string
		target     string
		want       string
		config     func(*sandbox.ImageConfig)
	}{
		{
			name: "run in both forms", text: "FROM base\nRUN echo $X \\\n  and more\nRUN [\"/bin/echo\", \"$X\"]",
			want: "FROM base AS 0\nRUN /bin/sh|-c|echo $X   and more " + env + " user= dir=/\nRUN /bin/echo|$X " + env + " user= dir=/\n",
		},
		{
			name: "env, user, workdir", text: "FROM base\nENV A=1 B=$A\nENV C=${A}x D=${NONE:-d}\nUSER 5:6\nWORKDIR /a\nWORKDIR b/$C\nRUN x",
			want: "FROM base AS 0\nDIR /a 5:6\nDIR /a/b/1x 5:6\nRUN /bin/sh|-c|x env=A=1,B=,C=1x,D=d,FROMBASE=yes,PATH=/bin user=5:6 dir=/a/b/1x\n",
			config: func(c *sandbox.ImageConfig) {
				c.Env, c.User, c.WorkDir = []string{"A=1", "B=", "C=1x", "D=d", "FROMBASE=yes", "PATH=/bin"}, "5:6", "/a/b/1x"
			},
		},
		{
			name: "args: default, given, global, undeclared", args: map[string]string{"GIVEN": "g", "ALSO": "no", "V": "base"},
			text: "ARG V=none\nARG GLOBAL=glob\nFROM $V\nARG GIVEN=x\nARG DEF=d$GIVEN\nARG GLOBAL\nARG NOTHING\nRUN x\n",
			want: "FROM base AS 0\nRUN /bin/sh|-c|x env=DEF=dg,FROMBASE=yes,GIVEN=g,GLOBAL=glob,PATH=/bin user= dir=/\n",
		},
		{
			name: "env wins over arg", text: "FROM base\nARG A=arg\nENV A=env\nRUN x", args: map[string]string{"A": "given"},
			want:   "FROM base AS 0\nRUN /bin/sh|-c|x env=A=env,FROMBASE=yes,PATH=/bin user= dir=/\n",
			config: func(c *sandbox.ImageConfig) { c.Env = []string{"A=env", "FROMBASE=yes", "PATH=/bin"} },
		},
		{
			name: "proxies are passed and not kept", text: "FROM base\nRUN x", args: map[string]string{"http_proxy": "p"},
			want: "FROM base AS 0\nRUN /bin/sh|-c|x " + env + " user= dir=/\n  proxies http_proxy=p\n",
		},
		{
			name: "platform arguments", text: "FROM --platform=$BUILDPLATFORM base\nARG TARGETOS\nRUN x",
			want: "FROM base AS 0\nRUN /bin/sh|-c|x env=FROMBASE=yes,PATH=/bin,TARGETOS=linux user= dir=/\n",
		},
		{
			name: "stages: only those needed", text: "FROM base AS a\nRUN a\nFROM base AS unused\nHEALTHCHECK CMD x\nFROM a AS c\nCOPY --from=a /x /y\nCOPY --from=0 /x /y\nCOPY --from=other:1 /x /y\nFROM base\nRUN last", target: "C",
			want: "FROM base AS a\nRUN /bin/sh|-c|a " + env + " user= dir=/\nFROM stage AS c\nCOPY x to /y fromstage\nCOPY x to /y fromstage\nCOPY x to /y from=other:1\n",
		},
		{
			name: "a stage hands its args and env down", text: "FROM base AS a\nARG X=1\nENV E=2\nFROM a\nRUN x",
			want: "FROM base AS a\nFROM stage AS 1\nRUN /bin/sh|-c|x env=E=2,FROMBASE=yes,PATH=/bin,X=1 user= dir=/\n", config: func(c *sandbox.ImageConfig) { c.Env = []string{"E=2", "FROMBASE=yes", "PATH=/bin"} },
		},
		{
			name: "args end with their stage", text: "FROM base AS a\nARG X=1\nFROM base\nRUN x",
			want: "FROM base AS 1\nRUN /bin/sh|-c|x " + env + " user= dir=/\n",
		},
		{
			name: "scratch", text: "FROM scratch\nCOPY a b /c/", want: "FROM scratch AS 0\nCOPY a|b to /c/\n",
			config: func(c *sandbox.ImageConfig) { *c = sandbox.ImageConfig{Env: []string{}, WorkDir: "/"} },
		},
		{
			name: "copy with everything", text: "FROM base\nARG U=me\nWORKDIR /w\nCOPY --chown=$U:5 --chmod=0750 --link --exclude=*.$U ./a/ ../b [x]* .\nCOPY [\"with space\", \"d/\"]",
			want: "FROM base AS 0\nDIR /w \nCOPY a|b|[x]* to /w/ chown=me:5 chmod exclude=*.me\nCOPY with space to /w/d/\n", config: func(c *sandbox.ImageConfig) { c.WorkDir = "/w" },
		},
		{
			name: "copy of heredocs", text: "FROM base\nENV W=world\nCOPY <<A <<'B' <<-C /d/\nhello $W\nA\nraw $W\nB\n\ttabs\nC\n",
			want: "FROM base AS 0\nCOPY  to /d/ inline=A:hello world/ inline=B:raw $W/ inline=C:tabs/\n", config: func(c *sandbox.ImageConfig) { c.Env = append(c.Env, "W=world") },
		},
		{
			name: "run of heredocs", text: "FROM base\nRUN <<EOF\necho 1\necho 2\nEOF\nRUN python3 <<EOF\nprint()\nEOF\nRUN <<X\n#!/usr/bin/env perl\nsay\nX\n",
			want: "FROM base AS 0\nRUN /bin/sh|-c|echo 1\necho 2\n " + env + " user= dir=/\nRUN /bin/sh|-c|python3 <<EOF\nprint()\nEOF " + env + " user= dir=/\nRUN  " + env + " user= dir=/\n  script X #!/usr/bin/env perl/say/\n",
		},
		{name: "add", text: "FROM base\nADD a.tgz b.txt /x/\nADD --unpack=false a.tgz /y", want: "FROM base AS 0\nCOPY a.tgz|b.txt to /x/ unpack\nCOPY a.tgz to /y\n"},
		{
			name: "shell, cmd, entrypoint", text: "FROM base\nSHELL [\"/bin/bash\",\"-ec\"]\nRUN x\nCMD serve it\nENTRYPOINT [\"/e\", \"$A\"]",
			want: "FROM base AS 0\nRUN /bin/bash|-ec|x " + env + " user= dir=/\n", config: func(c *sandbox.ImageConfig) {
				c.Shell, c.Cmd, c.Entrypoint = []string{"/bin/bash", "-ec"}, []string{"/bin/bash", "-ec", "serve it"}, []string{"/e", "$A"}
			},
		},
		{name: "an entrypoint forgets the base's cmd", text: "FROM base\nENTRYPOINT e", want: "FROM base AS 0\n", config: func(c *sandbox.ImageConfig) {
			c.Cmd, c.Entrypoint = nil, []string{"/bin/sh", "-c", "e"}
		}},
		{
			name: "what is recorded", text: "FROM base\nLABEL a=1 \"b c\"=\"$FROMBASE x\"\nMAINTAINER me\nEXPOSE 80 53/UDP 8000-8001\nEXPOSE 80/tcp\nVOLUME /data /data\nVOLUME [\"/more\"]\nSTOPSIGNAL SIG$NONE\nSTOPSIGNAL 9",
			want: "FROM base AS 0\n", config: func(c *sandbox.ImageConfig) {
				c.Labels = map[string]string{"a": "1", "b c": "yes x", "maintainer": "me"}
				c.ExposedPorts, c.Volumes, c.StopSignal = []string{"53/udp", "80/tcp", "8000/tcp", "8001/tcp"}, []string{"/data", "/more"}, "9"
			},
		},
		{
			name: "escape directive", text: "# escape=`\nFROM base\nRUN a `\n b\\\nENV P=c:\\x", want: "FROM base AS 0\nRUN /bin/sh|-c|a  b\\ " + env + " user= dir=/\n",
			config: func(c *sandbox.ImageConfig) { c.Env = []string{"FROMBASE=yes", "P=c:\\x", "PATH=/bin"} },
		},
		{name: "network of a step", text: "FROM base\nRUN --network=none x\nRUN --network=default y", want: "FROM base AS 0\nRUN /bin/sh|-c|x " + env + " user= dir=/\n  offline\nRUN /bin/sh|-c|y " + env + " user= dir=/\n"},
		{
			name: "windows line ends, a byte order mark, comments", text: "\ufeff# syntax=docker/dockerfile:1.7\r\nFROM base\r\n# c\r\nRUN a \\\r\n# in between\r\n b\r\n",
			want: "FROM base AS 0\nRUN /bin/sh|-c|a  b " + env + " user= dir=/\n",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, stages, err := evaluated(c.text, c.args, c.target)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, describe(stages)); diff != "" {
				t.Errorf("operations (-want +got):\n%s", diff)
			}
			want := cloneConfig(base.Config)
			want.WorkDir = "/"
			want.Env = []string{"FROMBASE=yes", "PATH=/bin"}
			if c.config != nil {
				c.config(&want)
			}
			got := stages[len(stages)-1].config
			got.History = nil // TestHistory
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("config (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRefusedInstructions(t *testing.T) {
	for _, c := range []struct {
		text, code string
		line       string // "line N:"
		tells      string
	}{
		{"FROM base\n\nHEALTHCHECK CMD true", codeUnsupported, "line 3:", "HEALTHCHECK"},
		{"FROM base\nONBUILD RUN x", codeUnsupported, "line 2:", "ONBUILD"},
		{"FROM base\nADD https://example.com/x /x", codeUnsupported, "line 2:", "ADD of a URL"},
		{"FROM base\nARG U=https://example.com/x\nADD $U /x", codeUnsupported, "line 3:", "ADD of a URL"},
		{"FROM base\nADD git@github.com:a/b.git /x", codeUnsupported, "line 2:", "git"},
		{"FROM base\nCOPY http://example.com/x /x", codeUnsupported, "line 2:", "COPY of a URL"},
		{"FROM base\nADD --keep-git-dir=true a b", codeUnsupported, "line 2:", "--keep-git-dir"},
		{"FROM base\nADD --checksum=sha256:00 a b", codeUnsupported, "line 2:", "--checksum"},
		{"FROM base\nRUN --mount=type=cache,target=/c x", codeUnsupported, "line 2:", "--mount"},
		{"FROM base\nRUN x\nRUN \\\n --mount=type=secret,id=x \\\n x", codeUnsupported, "line 3:", "--mount"},
		{"FROM base\nRUN --security=insecure x", codeUnsupported, "line 2:", "--security"},
		{"FROM base\nRUN --device=x x", codeUnsupported, "line 2:", "--device"},
		{"FROM base\nRUN --network=host x", codeUnsupported, "line 2:", "--network=host"},
		{"FROM base\nRUN --network=bridge x", codeInvalid, "line 2:", "bridge"},
		{"FROM base\nCOPY --parents a b", codeUnsupported, "line 2:", "--parents"},
		{"FROM base\nCOPY --chmod=u+x a b", codeUnsupported, "line 2:", "octal"},
		{"FROM base\nCOPY --chmod=99999 a b", codeInvalid, "line 2:", "octal"},
		{"FROM base\nCOPY --chown=a:b:c a b", codeInvalid, "line 2:", "chown"},
		{"FROM base\nCOPY --frm=x a b", codeInvalid, "line 2:", "no flag --frm"},
		{"FROM base\nFETCH x", codeInvalid, "line 2:", "FETCH"},
		{"FROM base\nrunn x", codeInvalid, "line 2:", "runn"},
		{"FROM base\nENV --x a=b", codeInvalid, "line 2:", "no flag --x"},
		{"FROM --platform=plan9/mips base", codeUnsupported, "line 1:", "plan9/mips"},
		{"FROM base AS x\nCOPY --from=later a b\nFROM base AS later\nFROM x", codeInvalid, "line 2:", "comes later"},
		{"FROM base AS x\nCOPY --from=x a b", codeInvalid, "line 2:", "must stand before"},
		{"FROM base\nCOPY --from=7 a b", codeInvalid, "line 2:", "no such stage"},
		{"FROM base\nCOPY --from=scratch a b", codeInvalid, "line 2:", "nothing"},
		{"FROM base\nCOPY --from=$X a b", codeUnsupported, "line 2:", "variables"},
		{"FROM base\nCOPY a", codeInvalid, "line 2:", "two arguments"},
		{"FROM base\nCOPY a b /c", codeInvalid, "line 2:", "end with /"},
		{"FROM base\nCOPY --from=x <<A /c/\nA", codeInvalid, "line 2:", "heredoc"},
		{"FROM base\nCOPY <<A /c\nno end", codeInvalid, "line 2:", "heredoc"},
		{"FROM base\nSHELL /bin/sh", codeInvalid, "line 2:", "JSON"},
		{"FROM base\nUSER a b", codeInvalid, "line 2:", "USER"},
		{"FROM base\nEXPOSE 99999", codeInvalid, "line 2:", "99999"},
		{"FROM base\nEXPOSE 5-1", codeInvalid, "line 2:", "5-1"},
		{"FROM base\nRUN ${", "", "", ""}, // the shell's business
		{"FROM base\nENV A=${B", codeInvalid, "line 2:", "${B"},
		{"FROM $NOTHING", codeInvalid, "line 1:", "names nothing"},
		{"FROM Bad::Name", codeInvalid, "line 1:", "Bad::Name"},
		{"FROM base AS 9bad", codeInvalid, "line 1:", "9bad"},
		{"FROM", codeInvalid, "line 1:", "FROM"},
		{"RUN x\nFROM base", codeInvalid, "line 1:", "no build stage"},
		{"ARG X=1", codeInvalid, "line 1:", "no FROM"},
		{"# only a comment", codeInvalid, "", "no instructions"},
		{"# escape=x\nFROM base", codeInvalid, "line 1:", "escape"},
		{"FROM base\nSTOPSIGNAL a b", codeInvalid, "line 2:", "STOPSIGNAL"},
		{"FROM base\nWORKDIR $NONE", codeInvalid, "line 2:", "WORKDIR"},
		{"FROM base\nRUN []", codeInvalid, "line 2:", "no command"},
	} {
		_, _, err := evaluated(c.text, nil, "")
		if c.code == "" {
			if err != nil {
				t.Errorf("%q: %v", c.text, err)
			}
			continue
		}
		if sandbox.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.line) || !strings.Contains(err.Error(), c.tells) {
			t.Errorf("%q: %q %v\nwant %q %q %q", c.text, sandbox.CodeOf(err), err, c.code, c.line, c.tells)
			continue
		}
		if c.line != "" { // the line itself is quoted
			n := int(c.line[5] - '0')
			if quoted := strings.TrimSpace(strings.Split(c.text, "\n")[n-1]); !strings.Contains(err.Error(), "| "+quoted) {
				t.Errorf("%q: the line is not quoted: %v", c.text, err)
			}
		}
	}
}

func TestNotes(t *testing.T) {
	for text, tells := range map[string]string{
		"# syntax=example/other:3\nFROM base":         "syntax directive",
		"# syntax=docker/dockerfile:2\nFROM base":     "syntax directive",
		"FROM base\nCOPY --link a b":                  "--link is ignored",
		"FROM base\nMAINTAINER x":                     "MAINTAINER",
		"FROM base\nVOLUME /x":                        "VOLUME",
		"FROM base\nRUN a \\\n\n b":                   "Empty continuation",
		"FROM base\n# takes none of what was given\n": "no ARG takes these build arguments: EXTRA",
	} {
		d, _, err := evaluated(text, map[string]string{"EXTRA": "1", "https_proxy": "2"}, "")
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, n := range d.notes {
			all = append(all, n.text)
		}
		if !strings.Contains(strings.Join(all, "\n"), tells) || strings.Contains(strings.Join(all, "\n"), "https_proxy") {
			t.Errorf("%q: notes %q, want %q", text, all, tells)
		}
	}
	for _, text := range []string{"FROM base", "# syntax=docker/dockerfile:1\nFROM base", "# syntax=docker.io/docker/dockerfile:1.4-labs\nFROM base"} {
		if d, _, err := evaluated(text, nil, ""); err != nil || len(d.notes) > 0 {
			t.Errorf("%q: notes %v, %v", text, d.notes, err)
		}
	}
}

// TestHistory: what an image tells of its making has no values of arguments.
func TestHistory(t *testing.T) {
	_, stages, err := evaluated("FROM base AS a\nARG SECRET\nRUN echo $SECRET\nFROM a\nENV A=1\nCOPY x /y\nRUN "+strings.Repeat("x", 600), map[string]string{"SECRET": "hidden"}, "")
	if err != nil {
		t.Fatal(err)
	}
	got := stages[1].config.History
	want := []sandbox.ImageHistory{
		{CreatedBy: "ARG SECRET", Empty: true},
		{CreatedBy: "RUN echo $SECRET"},
		{CreatedBy: "ENV A=1", Empty: true},
		{CreatedBy: "COPY x /y"},
		{CreatedBy: "RUN " + strings.Repeat("x", 508) + "…"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("history (-want +got):\n%s", diff)
	}
	_, stages, err = evaluated("FROM base\n"+strings.Repeat("RUN x\n", 200), nil, "")
	if err != nil || len(stages[0].config.History) != keptHistory {
		t.Errorf("%d entries of 200, %v", len(stages[0].config.History), err)
	}
}

func TestTargets(t *testing.T) {
	const text = "FROM base AS a\nFROM a AS b\nFROM base\n"
	for target, want := range map[string]string{"": "2", "a": "a", "B": "b", "0": "a", "2": "2"} {
		_, stages, err := evaluated(text, nil, target)
		if err != nil || stages[len(stages)-1].name != want {
			t.Errorf("target %q: %v, %v", target, stages, err)
		}
	}
	if _, _, err := evaluated(text, nil, "zz"); sandbox.CodeOf(err) != "build_no_stage" || !strings.Contains(err.Error(), "a, b, 2") {
		t.Errorf("an unknown target: %v", err)
	}
}

// TestExpansionIsBounded: each line would double what the one before made.
func TestExpansionIsBounded(t *testing.T) {
	text := "FROM base\nENV A=xxxxxxxxxxxxxxxx\n" + strings.Repeat("ENV A=$A$A$A$A\n", 10)
	if _, _, err := evaluated(text, nil, ""); sandbox.CodeOf(err) != codeInvalid {
		t.Errorf("an environment of 16 MiB: %v", err)
	}
	wide := "FROM base\nENV A=" + strings.Repeat("x", 60000) + "\nLABEL l=" + strings.Repeat("$A", 20000)
	if _, _, err := evaluated(wide, nil, ""); sandbox.CodeOf(err) != codeInvalid {
		t.Errorf("a label of 1 GiB: %v", err)
	}
	if _, _, err := evaluated("FROM base\nENV A=xx\n"+strings.Repeat("ENV A=$A$A\n", 8), nil, ""); err != nil {
		t.Errorf("512 bytes: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"FROM base\nRUN x", "FROM base\nCOPY <<A /b\nx\nA", "# escape=`\nFROM a AS b\nRUN [\"x\"]", "ARG A=${B:-c}\nFROM $A\nLABEL a=\"b\" c='d'",
		"FROM a\nENV a ${b//c/d}\nHEALTHCHECK --interval=5s CMD x", "FROM a\nRUN --mount=type=cache x", "{\"syntax\":\"x\"}\nFROM a", "FROM a\nEXPOSE 1-2",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if (sandbox.BuildRequest{Dockerfile: text}).Validate() != nil {
			return
		}
		_, _, err := evaluated(text, map[string]string{"A": "$B"}, "")
		if err != nil && sandbox.ClassOf(err) == nil {
			t.Errorf("an error without a class: %v", err)
		}
	})
}
