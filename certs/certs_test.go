package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

func in(dir string) func(string) string {
	return func(name string) string { return filepath.Join(dir, name) }
}

func made(t *testing.T, hosts ...string) func(string) string {
	t.Helper()
	at := in(filepath.Join(t.TempDir(), "tls"))
	if err := Make(filepath.Dir(at("x")), at(ServerFile), at(ServerKeyFile), hosts, time.Now()); err != nil {
		t.Fatal(err)
	}
	return at
}

func trusting(t *testing.T, ca string) *x509.CertPool {
	t.Helper()
	raw, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(raw) {
		t.Fatal("no certificate")
	}
	return pool
}

// shake does a handshake over the loopback.
func shake(t *testing.T, server, client *tls.Config) error {
	t.Helper()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		if c, err := ln.Accept(); err == nil {
			_, _ = c.Read(make([]byte, 1)) // to the end of the handshake, or of the client
			_ = c.Close()
		}
	}()
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", ln.Addr().String(), client)
	if err == nil {
		err = c.Close()
	}
	return err
}

func TestMadeCertificateIsTrusted(t *testing.T) {
	at := made(t, "box.example", "192.0.2.7", "::1")
	p, err := Open(at(ServerFile), at(ServerKeyFile), nil)
	if err != nil {
		t.Fatal(err)
	}
	pool := trusting(t, at(AuthorityFile))
	for host, good := range map[string]bool{"box.example": true, "192.0.2.7": true, "::1": true, "other.example": false, "192.0.2.8": false} {
		if err := shake(t, p.TLS(), &tls.Config{RootCAs: pool, ServerName: host, MinVersion: tls.VersionTLS12}); (err == nil) != good {
			t.Errorf("%s: %v", host, err)
		}
	}
	if err := shake(t, p.TLS(), &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "box.example", MinVersion: tls.VersionTLS12}); err == nil {
		t.Error("a client that does not know the authority takes the certificate")
	}
	for version, good := range map[uint16]bool{tls.VersionTLS11: false, tls.VersionTLS12: true, tls.VersionTLS13: true} {
		c := &tls.Config{RootCAs: pool, ServerName: "box.example", MinVersion: version, MaxVersion: version}
		if err := shake(t, p.TLS(), c); (err == nil) != good {
			t.Errorf("TLS %x: %v", version, err)
		}
	}
	for name, mode := range map[string]os.FileMode{AuthorityFile: 0o644, ServerFile: 0o644, AuthorityKeyFile: 0o600, ServerKeyFile: 0o600} {
		if st, err := os.Stat(at(name)); err != nil || st.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", name, st.Mode(), err)
		}
	}
	c, err := Read(at(ServerFile))
	if err != nil || len(c.Hosts) != 3 || c.Authority || time.Until(c.NotAfter) < 800*24*time.Hour || c.Issuer != "CN=sandboxd authority" {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestNothingIsOverwritten(t *testing.T) {
	for _, there := range []string{AuthorityFile, AuthorityKeyFile, ServerFile, ServerKeyFile} {
		at := in(t.TempDir())
		if err := os.WriteFile(at(there), []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
		err := Make(filepath.Dir(at("x")), at(ServerFile), at(ServerKeyFile), []string{"a"}, time.Now())
		if !errors.Is(err, sandbox.ErrConflict) {
			t.Errorf("%s: %v", there, err)
		}
		if raw, err := os.ReadFile(at(there)); err != nil || string(raw) != "mine" {
			t.Errorf("%s: %q, %v", there, raw, err)
		}
		if all, err := os.ReadDir(filepath.Dir(at("x"))); err != nil || len(all) != 1 {
			t.Errorf("%s: %d files are left, %v", there, len(all), err)
		}
	}
	for _, hosts := range [][]string{nil, {""}, {"a:443"}, {"https://a"}, {"-a"}, {"a b"}} {
		if err := Make(t.TempDir(), filepath.Join(t.TempDir(), ServerFile), filepath.Join(t.TempDir(), ServerKeyFile), hosts, time.Now()); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%q: %v", hosts, err)
		}
	}
}

func TestChangedFilesAreTaken(t *testing.T) {
	at, other := made(t, "one.example"), made(t, "two.example")
	p, err := Open(at(ServerFile), at(ServerKeyFile), nil)
	if err != nil {
		t.Fatal(err)
	}
	look := func() string {
		p.looked = time.Time{}
		return p.current().Leaf.DNSNames[0]
	}
	put := func(name string) {
		t.Helper()
		raw, err := os.ReadFile(other(name))
		if err == nil {
			err = os.WriteFile(at(name), raw, 0o600)
		}
		if err == nil {
			err = os.Chtimes(at(name), time.Time{}, time.Now().Add(time.Minute))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := look(); got != "one.example" {
		t.Error(got)
	}
	put(ServerFile) // the key does not fit yet
	if got := look(); got != "one.example" {
		t.Error(got)
	}
	put(ServerKeyFile)
	if got := look(); got != "two.example" {
		t.Error(got)
	}
	if err := os.Remove(at(ServerKeyFile)); err != nil {
		t.Fatal(err)
	}
	if got := look(); got != "two.example" {
		t.Error(got)
	}
	if _, err := Open(at(ServerFile), at(ServerKeyFile), nil); err == nil {
		t.Error("a pair without a key")
	}
}

// TestFilesWithoutAnEnd: a certificate is a file, not a pipe that nobody writes to.
func TestFilesWithoutAnEnd(t *testing.T) {
	at := made(t, "one.example")
	pipe := at("pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	_, shown := Read(pipe)
	_, cert := Open(pipe, at(ServerKeyFile), nil)
	_, key := Open(at(ServerFile), pipe, nil)
	for what, err := range map[string]error{"show": shown, "certificate": cert, "key": key} {
		if !errors.Is(err, linux.ErrNotRegular) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := Open(at(ServerFile), at(ServerKeyFile), nil); err != nil {
		t.Error(err)
	}
}
