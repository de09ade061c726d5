package e2b

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"

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

func newSecret(path string) ([]byte, error) {
	key := make([]byte, secretBytes)
	_, _ = rand.Read(key) // never fails (crypto/rand)
	if err := writeFile(path, key); err != nil {
		return nil, fmt.Errorf("make the key of sandbox tokens: %w", err)
	}
	return key, nil
}

// writeFile puts a file of mode 0600 in its place, whole and on disk.
func writeFile(path string, content []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".e2b-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(content) // CreateTemp makes it 0600
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	return err
}

// syncDir has the names in a directory last.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// tokenOf returns the token of a sandbox's data plane that is given to an API
// key: the sandbox, the key, and what only this daemon can derive of both. It
// lasts as long as the key may act in the sandbox, unless it is changed.
func (s *Server) tokenOf(id sandbox.ID, key string) string {
	return string(id) + key + "." + s.derive("data", id, key)
}

// trafficTokenOf returns the token for the ports of a sandbox that asks for one.
func (s *Server) trafficTokenOf(id sandbox.ID) string { return s.derive("traffic", id, "") }

func (s *Server) derive(use string, id sandbox.ID, key string) string {
	mac := hmac.New(sha256.New, s.secret)
	_, _ = fmt.Fprintf(mac, "%q", []string{use, string(id), key, s.rotated.of(id)})
	return hex.EncodeToString(mac.Sum(nil))
}

// readToken returns the sandbox and the API key whose token of the data plane
// this is. It asks no database: what is not ours is refused as quickly whether
// there is such a sandbox or not.
func (s *Server) readToken(token string) (id sandbox.ID, key string, ok bool) {
	if len(token) <= idLength {
		return "", "", false
	}
	id, err := sandbox.ParseID(token[:idLength])
	key, _, dotted := strings.Cut(token[idLength:], ".")
	return id, key, err == nil && dotted && same(token, s.tokenOf(id, key))
}

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// Rotations remembers which sandboxes had their tokens changed, in a file. A nil
// one remembers nothing.
type Rotations struct {
	path string

	mu  sync.Mutex
	all map[sandbox.ID]string // guarded by mu: what the tokens are derived with beside the key
}

// OpenRotations reads the file, and forgets sandboxes that do not live.
func OpenRotations(path string, living []sandbox.ID) (*Rotations, error) {
	b, err := os.ReadFile(path)
	read := map[sandbox.ID]string{}
	if err == nil {
		err = json.Unmarshal(b, &read)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read which tokens of sandboxes were changed: %w", err)
	}
	r := &Rotations{path: path, all: map[sandbox.ID]string{}}
	for _, id := range living {
		if salt, ok := read[id]; ok {
			r.all[id] = salt
		}
	}
	return r, nil
}

func (r *Rotations) of(id sandbox.ID) string {
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all[id]
}

// change draws anew what a sandbox's tokens are derived with. It is on disk
// before it holds: a token that was changed never opens again.
func (r *Rotations) change(id sandbox.ID) error {
	if r == nil {
		return errors.New("nothing remembers that tokens were changed")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	next := maps.Clone(r.all)
	next[id] = rand.Text()
	b, err := json.Marshal(next)
	if err == nil {
		err = writeFile(r.path, b)
	}
	if err != nil {
		return fmt.Errorf("change the tokens of a sandbox: %w", err)
	}
	r.all = next
	return nil
}
