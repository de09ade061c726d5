package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The files of a directory.
const (
	AuthorityFile    = "ca.pem"         // for clients
	AuthorityKeyFile = "ca-key.pem"     // of the authority; may be kept elsewhere
	ServerFile       = "server.pem"     // the daemon's, for tls_cert
	ServerKeyFile    = "server-key.pem" // for tls_key
)

// Lifetimes. Clients on Apple's systems take no server certificate that is
// good for more than 825 days.
const (
	authorityYears = 10
	serverDays     = 820
	backdate       = time.Hour // for clients whose clock is late
)

var hostForm = regexp.MustCompile(`^(\*\.)?[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$`)

// Make writes an authority into dir, and a certificate of it for hosts, names or
// addresses, and its key to the files of these names. It makes directories, and
// refuses to overwrite any of the files. Classes ErrInvalid and ErrConflict.
func Make(dir, cert, key string, hosts []string, now time.Time) error {
	server := template("sandboxd", now, now.AddDate(0, 0, serverDays))
	server.KeyUsage, server.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	for _, h := range hosts {
		if a, err := netip.ParseAddr(h); err == nil {
			server.IPAddresses = append(server.IPAddresses, a.WithZone("").AsSlice())
		} else if len(h) <= 253 && hostForm.MatchString(h) {
			server.DNSNames = append(server.DNSNames, h)
		} else {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_host", "host %.100q: use a name or an address that clients connect to, without a port", h)
		}
	}
	if len(hosts) == 0 {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_host", "a certificate is for at least one name or address")
	}
	authority := template("sandboxd authority", now, now.AddDate(authorityYears, 0, 0))
	authority.IsCA, authority.BasicConstraintsValid, authority.MaxPathLenZero = true, true, true
	authority.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign

	authorityKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make a key: %w", err)
	}
	serverKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make a key: %w", err)
	}
	authorityCert, err := x509.CreateCertificate(rand.Reader, authority, authority, authorityKey.Public(), authorityKey)
	if err != nil {
		return fmt.Errorf("make the authority: %w", err)
	}
	serverCert, err := x509.CreateCertificate(rand.Reader, server, authority, serverKey.Public(), authorityKey)
	if err != nil {
		return fmt.Errorf("make the certificate: %w", err)
	}
	files := []file{{filepath.Join(dir, AuthorityFile), "CERTIFICATE", authorityCert, 0o644}, {cert, "CERTIFICATE", serverCert, 0o644}}
	for _, k := range []struct {
		path string
		key  *ecdsa.PrivateKey
	}{{filepath.Join(dir, AuthorityKeyFile), authorityKey}, {key, serverKey}} {
		der, err := x509.MarshalPKCS8PrivateKey(k.key)
		if err != nil {
			return fmt.Errorf("write a key: %w", err)
		}
		files = append(files, file{k.path, "PRIVATE KEY", der, 0o600})
	}
	return writeAll(files)
}

func template(name string, from, to time.Time) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)) // never fails (crypto/rand)
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: from.Add(-backdate), NotAfter: to,
	}
}

type file struct {
	path, kind string
	der        []byte
	mode       os.FileMode
}

// writeAll writes all files or, where one is there already, none.
func writeAll(files []file) (err error) {
	for _, f := range files {
		if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
			return fmt.Errorf("make the directory: %w", err)
		}
		if _, err := os.Lstat(f.path); err == nil {
			return sandbox.Errorf(sandbox.ErrConflict, "file_exists", "%s is there already, and nothing is overwritten: choose another --dir or --tls-cert and --tls-key, or move what is there away first (clients that trust the old authority must be given the new one)", f.path)
		}
	}
	var done []string
	defer func() {
		if err != nil {
			for _, path := range done {
				err = errors.Join(err, os.Remove(path))
			}
		}
	}()
	for _, f := range files {
		path := f.path
		w, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, f.mode)
		if err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
		done = append(done, path)
		err = pem.Encode(w, &pem.Block{Type: f.kind, Bytes: f.der})
		if err := errors.Join(err, w.Sync(), w.Close()); err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
	}
	return nil
}
