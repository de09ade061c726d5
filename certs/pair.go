package certs

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// Pair is a certificate with its key, as two files. When they change, the
// next connections get the new ones; while the new ones are no good, those
// of before.
type Pair struct {
	certFile, keyFile string
	log               *slog.Logger

	mu     sync.Mutex
	seen   [2]stamp // of the files that were read last, good or not
	looked time.Time
	pair   *tls.Certificate
}

// stamp tells versions of a file apart.
type stamp struct {
	mod  time.Time
	size int64
}

// maxPEM bounds a file, in bytes.
const maxPEM = 1 << 20

// lookEvery bounds how often the files are looked at.
const lookEvery = time.Second

// Open reads a certificate with its key, PEM files both.
func Open(certFile, keyFile string, log *slog.Logger) (*Pair, error) {
	if log == nil {
		log = slog.Default()
	}
	p := &Pair{certFile: certFile, keyFile: keyFile, log: log}
	var err error
	if p.seen, err = p.stamps(); err != nil {
		return nil, err
	}
	p.pair, err = p.read()
	p.looked = time.Now()
	return p, err
}

// TLS returns how to serve with the pair: TLS 1.2 or newer, HTTP/1.1.
func (p *Pair) TLS() *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"http/1.1"}, // WebSockets and the bounds of connections are its
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.current(), nil },
	}
}

// current returns the pair as the files have it.
func (p *Pair) current() *tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.looked) < lookEvery {
		return p.pair
	}
	p.looked = time.Now()
	now, err := p.stamps()
	if err == nil && now == p.seen {
		return p.pair
	}
	var pair *tls.Certificate
	if err == nil {
		pair, err = p.read()
	}
	if err != nil {
		if now != p.seen { // once for each version
			p.log.Error("read the changed TLS certificate; the one before stays", "err", err)
		}
	} else {
		p.pair = pair
		p.log.Info("took the changed TLS certificate", "file", p.certFile, "until", pair.Leaf.NotAfter)
	}
	p.seen = now
	return p.pair
}

func (p *Pair) stamps() (s [2]stamp, err error) {
	for i, name := range []string{p.certFile, p.keyFile} {
		st, err := os.Stat(name)
		if err != nil {
			return [2]stamp{}, fmt.Errorf("read the TLS certificate: %w", err)
		}
		s[i] = stamp{st.ModTime(), st.Size()}
	}
	return s, nil
}

func (p *Pair) read() (*tls.Certificate, error) {
	cert, err := linux.ReadRegular(p.certFile, maxPEM)
	key, kerr := linux.ReadRegular(p.keyFile, maxPEM)
	var pair tls.Certificate
	if err = errors.Join(err, kerr); err == nil {
		pair, err = tls.X509KeyPair(cert, key)
	}
	if err != nil {
		return nil, fmt.Errorf("read the TLS certificate %s with the key %s: %w", p.certFile, p.keyFile, err)
	}
	return &pair, nil
}

// Certificate is what people ask of one.
type Certificate struct {
	File, Subject, Issuer string
	Hosts                 []string
	NotBefore, NotAfter   time.Time
	Authority             bool
}

// Read returns the first certificate of a PEM file.
func Read(name string) (Certificate, error) {
	raw, err := linux.ReadRegular(name, maxPEM)
	if err != nil {
		return Certificate{}, fmt.Errorf("read the certificate: %w", err)
	}
	block, _ := pem.Decode(raw)
	if block == nil || block.Type != "CERTIFICATE" {
		return Certificate{}, fmt.Errorf("read the certificate %s: %w", name, errors.New("it begins with no PEM certificate"))
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return Certificate{}, fmt.Errorf("read the certificate %s: %w", name, err)
	}
	out := Certificate{
		File: name, Subject: c.Subject.String(), Issuer: c.Issuer.String(), Hosts: c.DNSNames,
		NotBefore: c.NotBefore, NotAfter: c.NotAfter, Authority: c.IsCA,
	}
	for _, a := range c.IPAddresses {
		out.Hosts = append(out.Hosts, a.String())
	}
	return out, nil
}
