//go:build root

package integration

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestJavaScriptClient compares the types of the JavaScript client with the
// document of a real daemon, and runs the client's own tests against it.
func TestJavaScriptClient(t *testing.T) {
	sdk, err := filepath.Abs("../sdk/js")
	if err != nil {
		t.Fatal(err)
	}
	d := install(t, "")
	overSocket := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(d.host(), "unix://"))
	}}}
	resp, err := overSocket.Get("http://sandboxd/openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var doc any
	if err := json.NewDecoder(resp.Body).Decode(&doc); err != nil {
		t.Fatal(err)
	}
	sorted, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(sorted)
	types, err := os.ReadFile(filepath.Join(sdk, "src", "schema.d.ts"))
	if err != nil {
		t.Fatal(err)
	}
	if first, _, _ := strings.Cut(string(types), "\n"); !strings.Contains(first, hex.EncodeToString(sum[:])) {
		t.Errorf("sdk/js/src/schema.d.ts is not of this daemon's document: 'make sdk' writes it anew")
	}

	node, err := exec.LookPath("node")
	if err == nil {
		_, err = os.Stat(filepath.Join(sdk, "node_modules", "openapi-fetch"))
	}
	if err != nil {
		if slices.Contains(strings.Split(os.Getenv("SANDBOXD_TEST_PROMISES"), ","), "node") {
			t.Fatalf("node was promised: %v", err)
		}
		t.Skipf("the client itself needs node, and 'npm ci' in sdk/js: %v", err)
	}
	cmd := exec.CommandContext(t.Context(), node, "--test", "--test-reporter=spec", "test/client.test.mjs")
	cmd.Dir = sdk
	cmd.Env = append(os.Environ(), "SANDBOX_HOST="+d.host())
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "pass 5") {
		t.Errorf("%v\n%s", err, out)
	}
}
