package e2b

import (
	"crypto/sha256"
	"encoding/base64"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ambiguous is what a path may not have: the text that is signed would be that
// of another path, operation and user, too.
var ambiguous = regexp.MustCompile(`:(read|write)(:|$)`)

// isSigned reports whether a request for files brings a signature.
func isSigned(r *http.Request) bool {
	return r.URL.Path == filesPath && r.URL.Query().Has("signature")
}

// reproduces reports whether a URL's signature was made with a sandbox's
// token: by its path, whether it reads or writes, its user, and its end. The
// parts are joined by colons, as the SDK does; what could be cut in two ways is
// refused.
func reproduces(r *http.Request, token string) bool {
	q := r.URL.Query()
	op := "read"
	if r.Method == http.MethodPost {
		op = "write"
	}
	if strings.Contains(q.Get("username"), ":") || ambiguous.MatchString(q.Get("path")) {
		return false
	}
	return same(q.Get("signature"), signatureOf(q.Get("path"), op, q.Get("username"), token, q.Get("signature_expiration")))
}

// expired reports whether a signed URL's end has come, or is none.
func expired(r *http.Request) bool {
	q := r.URL.Query()
	if !q.Has("signature_expiration") {
		return false
	}
	until, err := strconv.ParseInt(q.Get("signature_expiration"), 10, 64)
	return err != nil || until < time.Now().Unix()
}

// signedWith returns the API key with whose token of a sandbox a URL was
// signed. owner is the sandbox's.
func (s *Server) signedWith(r *http.Request, id sandbox.ID, owner string) (key string, ok bool) {
	for _, key := range s.callers.ActingKeys(owner) {
		if reproduces(r, s.tokenOf(id, key)) {
			return key, true
		}
	}
	return "", false
}

// signatureOf signs with a token; until is empty where there is no end.
func signatureOf(path, op, user, token, until string) string {
	text := path + ":" + op + ":" + user + ":" + token
	if until != "" {
		text += ":" + until
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}
