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
	text := q.Get("path") + ":" + op + ":" + q.Get("username") + ":" + token
	if q.Has("signature_expiration") {
		text += ":" + q.Get("signature_expiration")
	}
	sum := sha256.Sum256([]byte(text))
	return same(q.Get("signature"), "v1_"+base64.RawStdEncoding.EncodeToString(sum[:]))
}
