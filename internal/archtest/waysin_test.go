package archtest

import (
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// openers are the calls by which bytes or connections from outside come in:
// listeners, servers, and decoders of formats that somebody else writes.
var openers = map[string][]string{
	"net":                                {"Listen", "ListenTCP", "ListenUDP", "ListenUnix", "ListenPacket", "ListenUnixgram", "ListenConfig", "FileListener"},
	"golang.org/x/sys/unix":              {"Bind", "Listen", "Mkfifo"},
	"net/http":                           {"Server"},
	"archive/tar":                        {"NewReader"},
	module + "internal/tarfile":          {"NewReader"},
	"archive/zip":                        {"NewReader", "OpenReader"},
	"compress/gzip":                      {"NewReader"},
	"compress/bzip2":                     {"NewReader"},
	"encoding/gob":                       {"NewDecoder"},
	"encoding/xml":                       {"NewDecoder", "Unmarshal"},
	"encoding/json":                      {"NewDecoder", "Unmarshal"},
	"github.com/goccy/go-yaml":           {"NewDecoder", "Unmarshal", "YAMLToJSON"},
	"github.com/coder/websocket":         {"Accept"},
	"github.com/miekg/dns":               {"Server"},
	"github.com/klauspost/compress/gzip": {"NewReader"},
	"github.com/klauspost/compress/zstd": {"NewReader"},
	"github.com/moby/buildkit/frontend/dockerfile/parser":       {"Parse"},
	"github.com/moby/buildkit/frontend/dockerfile/instructions": {"Parse"},
}

// trusted are packages whose decoders read what this project wrote itself, or
// what the one user of a command hands it; the reason is beside each.
var trusted = map[string]string{
	"state":          "columns of the daemon's own database",
	"api/client":     "answers of the daemon; a client has its user's rights and no more",
	"cmd/sandbox":    "files of the user who runs it",
	"internal/sbx":   "answers of PID 1 to the program that runs beside it",
	"runtime/launch": "the run directory of the daemon",
}

// waysIn names, for each package with a way in, the tests that send it hostile
// input. A new listener, server or decoder needs its line, and its test.
var waysIn = map[string][]string{
	"api/e2b":          {"api/e2b.FuzzRequests", "api/e2b.TestMethodsRefuse", "api/e2b.TestFilesRefuse"},
	"api/server":       {"api/server.TestBadInputs", "api/server.TestHalfARequest", "integration.TestMadeUpRequests"},
	"build":            {"build.FuzzParse", "build.FuzzTree", "build.TestHostileContexts"},
	"cmd/sandboxd":     {"cmd/sandboxd.FuzzConfig", "integration.TestMadeUpRequests", "api/server.TestHalfARequest"},
	"cost":             {"cost.TestBookRefuses"},
	"gate":             {"gate.FuzzHello", "gate.FuzzAuthority", "integration.TestNetworkFlood"},
	"image":            {"image.FuzzManifest", "image.TestImportRefuses", "integration.TestHostileRegistry"},
	"ingress":          {"ingress.FuzzParseHost", "ingress.FuzzLocalOf"},
	"internal/initd":   {"internal/initd.FuzzResolveUser", "internal/initproto.FuzzFramesFromDaemon"},
	"internal/tarfile": {"internal/tarfile.TestReaderWantsTheEnd", "rootfs.FuzzUnpack"},
	"netns":            {"netns.FuzzParseLogged", "netns.FuzzAttribute"},
	"resolver":         {"resolver.FuzzMessage", "resolver.FuzzUpstream"},
	"rootfs":           {"rootfs.FuzzUnpack", "rootfs.FuzzUnpackLayer", "rootfs.FuzzAccount", "rootfs.TestHostileLayers"},
	"runtime":          {"runtime.TestHostilePID1", "integration/escape.TestImageWithLinkedDevices"},
	"runtime/guest":    {"runtime/guest.TestHalfAnswers", "internal/initproto.FuzzFramesFromInit"},
}

// TestWaysInHaveHostileTests finds every way in that has no test of its own.
func TestWaysInHaveHostileTests(t *testing.T) {
	tests := testNames(t)
	seen := map[string]bool{}
	for _, p := range load(t) {
		name := p.short()
		if below(name, "integration") || below(name, "bench") || below(name, "internal/testenv") || below(name, "internal/archtest") || strings.HasSuffix(name, "test") {
			continue
		}
		selectors(t, p, func(pos token.Position, imp, sel string) {
			if !slices.Contains(openers[imp], sel) {
				return
			}
			if _, ok := trusted[name]; ok {
				return
			}
			seen[name] = true
			if len(waysIn[name]) == 0 {
				t.Errorf("%s: %s.%s is a way in, and waysIn names no hostile test for package %s: write one and add it",
					filepath.Base(pos.Filename), path.Base(imp), sel, name)
			}
		})
	}
	for name, list := range waysIn {
		if !seen[name] {
			t.Errorf("waysIn has package %s, which has no way in: take the line out", name)
		}
		for _, test := range list {
			if !tests[test] {
				t.Errorf("waysIn of %s names the test %s, which does not exist", name, test)
			}
		}
	}
}

// TestWaysInControl is the control: without its line a known way in is found.
func TestWaysInControl(t *testing.T) {
	found := 0
	for _, p := range load(t) {
		if p.short() == "rootfs" || p.short() == "cmd/sandboxd" {
			selectors(t, p, func(_ token.Position, imp, sel string) {
				if slices.Contains(openers[imp], sel) {
					found++
				}
			})
		}
	}
	if found < 4 {
		t.Errorf("%d ways into rootfs and cmd/sandboxd were found, want its archives, streams and listeners", found)
	}
}

// testNames are the tests and fuzz targets there are, as package.Name.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	pattern := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	for _, p := range load(t) {
		files, err := filepath.Glob(filepath.Join(p.Dir, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range pattern.FindAllSubmatch(b, -1) {
				names[p.short()+"."+string(m[1])] = true
			}
		}
	}
	return names
}

// TestSecurityPageNamesTests: each test that docs/SECURITY.md names exists.
func TestSecurityPageNamesTests(t *testing.T) {
	page, err := os.ReadFile("../../docs/SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for name := range testNames(t) {
		there[name[strings.LastIndexByte(name, '.')+1:]] = true
	}
	named := regexp.MustCompile("`(Test\\w+)`").FindAllSubmatch(page, -1)
	if len(named) < 40 {
		t.Errorf("docs/SECURITY.md names %d tests: its table is gone", len(named))
	}
	for _, m := range named {
		if !there[string(m[1])] {
			t.Errorf("docs/SECURITY.md names %s, which does not exist", m[1])
		}
	}
}
