package e2b

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/sandbox"
)

// secretBytes is the length of the key that tokens are derived with.
const secretBytes = 32

// idLength is that of every sandbox id.
const idLength = len(sandbox.ID("sb")) + 12

// Secret returns the daemon's own key for tokens, kept in a file that it makes
// on the first call, readable by its owner alone. Without the file, tokens
// given out before open nothing any more.
func Secret(path string) ([]byte, error) {
	key, err := os.ReadFile(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return newSecret(path)
	case err != nil:
		return nil, fmt.Errorf("read the key of sandbox tokens: %w", err)
	case len(key) != secretBytes:
		return nil, fmt.Errorf("the key of sandbox tokens in %s has %d bytes, not %d: remove the file to have a new one made", path, len(key), secretBytes)
	}
	return key, nil
}

// newSecret writes the key beside its place first: a crash leaves none or all
// of it.
func newSecret(path string) (key []byte, err error) {
	key = make([]byte, secretBytes)
	_, _ = rand.Read(key) // never fails (crypto/rand)
	f, err := os.CreateTemp(filepath.Dir(path), ".e2b-*")
	if err != nil {
		return nil, fmt.Errorf("make the key of sandbox tokens: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(key) // CreateTemp makes it 0600
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return nil, fmt.Errorf("write the key of sandbox tokens: %w", err)
	}
	return key, nil
}

// tokenOf returns the token of a sandbox's data plane: its id, and what only
// this daemon can derive of it. The same each time.
func (s *Server) tokenOf(id sandbox.ID) string { return string(id) + s.derive("data", id) }

// trafficTokenOf returns the token for the ports of a sandbox that asks for one.
func (s *Server) trafficTokenOf(id sandbox.ID) string { return s.derive("traffic", id) }

func (s *Server) derive(use string, id sandbox.ID) string {
	mac := hmac.New(sha256.New, s.secret)
	mac.Write([]byte(use + ":" + string(id)))
	return hex.EncodeToString(mac.Sum(nil))
}

// idOfToken returns the sandbox whose token of the data plane this is.
func (s *Server) idOfToken(token string) (sandbox.ID, bool) {
	if len(token) <= idLength {
		return "", false
	}
	id, err := sandbox.ParseID(token[:idLength])
	return id, err == nil && same(token, s.tokenOf(id))
}

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
