package e2b

import (
	"crypto/sha256"
	"encoding/base64"
	"net/http"
)

// reproduces reports whether a URL's signature was made with a sandbox's
// token: by its path, whether it reads or writes, its user, and its end.
func reproduces(r *http.Request, token string) bool {
	q := r.URL.Query()
	op := "read"
	if r.Method == http.MethodPost {
		op = "write"
	}
	return same(q.Get("signature"), signatureOf(q.Get("path"), op, q.Get("username"), token, q.Get("signature_expiration")))
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
