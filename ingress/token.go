package ingress

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"net/url"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The ways a request brings its token. What brought it is taken out before the
// request goes on: the sandbox never sees its own token.
const (
	tokenHeader = "X-Sandbox-Token"
	tokenQuery  = "sandbox_token" // answered with a redirect that sets the cookie
	tokenCookie = "sandbox_token"
)

// NewToken makes or replaces the token of a sandbox and returns it. It is
// shown this once: the daemon keeps a hash.
func (in *Ingress) NewToken(ctx context.Context, ref, actor string) (string, error) {
	sb, err := in.cfg.Sandboxes.Living(ctx, ref)
	if err != nil {
		return "", err
	}
	token := rand.Text() // 130 bits: no salt and no slow hash are needed
	sum := sha256.Sum256([]byte(token))
	return token, in.setToken(ctx, sb.ID, sum[:], actor)
}

// RemoveToken takes the token of a sandbox away; where it has none that is
// fine.
func (in *Ingress) RemoveToken(ctx context.Context, ref, actor string) error {
	sb, err := in.cfg.Sandboxes.Living(ctx, ref)
	if err != nil {
		return err
	}
	return in.setToken(ctx, sb.ID, nil, actor)
}

// setToken writes a token down and puts it in force; one at a time, so that
// both are done in the same order.
func (in *Ingress) setToken(ctx context.Context, id sandbox.ID, hash []byte, actor string) error {
	in.tokenTurn.Lock()
	defer in.tokenTurn.Unlock()
	in.mu.Lock()
	in.making[id]++
	in.mu.Unlock()
	err := in.cfg.Sandboxes.SetPortToken(context.WithoutCancel(ctx), id, hash, actor)
	gone := in.made(id)
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case err != nil:
	case hash == nil || gone:
		delete(in.tokens, id)
	default:
		in.tokens[id] = hash
	}
	return err
}

// credential is a token a request brought, and how to take it out again.
type credential struct {
	value string
	strip func(h http.Header)
}

// credentials finds the tokens of a request.
func credentials(h http.Header) []credential {
	var found []credential
	for _, v := range h.Values(tokenHeader) {
		found = append(found, credential{v, func(http.Header) {}}) // always taken out
	}
	for _, v := range h.Values("Authorization") {
		scheme, token, ok := strings.Cut(v, " ")
		if ok && strings.EqualFold(scheme, "Bearer") {
			found = append(found, credential{strings.TrimSpace(token), func(h http.Header) { h.Del("Authorization") }})
		}
	}
	for _, c := range (&http.Request{Header: h}).CookiesNamed(tokenCookie) {
		found = append(found, credential{c.Value, func(http.Header) {}}) // always taken out
	}
	return found
}

// allowed reports whether a request brings the token whose hash is given, and
// takes that one out of out.
func allowed(h http.Header, hash []byte, out http.Header) bool {
	ok := false
	for _, c := range credentials(h) {
		if matches(c.value, hash) {
			ok = true
			c.strip(out)
		}
	}
	return ok
}

func matches(token string, hash []byte) bool {
	sum := sha256.Sum256([]byte(token))
	return len(hash) == len(sum) && subtle.ConstantTimeCompare(sum[:], hash) == 1
}

// stripOwn takes out what only this package reads, right or wrong.
func stripOwn(h http.Header) {
	h.Del(tokenHeader)
	lines := h.Values("Cookie")
	if len(lines) == 0 {
		return
	}
	var kept []string
	for _, line := range lines {
		for part := range strings.SplitSeq(line, ";") {
			part = strings.TrimSpace(part)
			if name, _, _ := strings.Cut(part, "="); part != "" && strings.TrimSpace(name) != tokenCookie {
				kept = append(kept, part)
			}
		}
	}
	h.Del("Cookie")
	if len(kept) > 0 {
		h.Set("Cookie", strings.Join(kept, "; "))
	}
}

// queryToken returns the token in a URL's query, and the URL without it.
func queryToken(u *url.URL) (token string, rest *url.URL, found bool) {
	var kept []string
	for part := range strings.SplitSeq(u.RawQuery, "&") {
		name, value, _ := strings.Cut(part, "=")
		if key, err := url.QueryUnescape(name); err != nil || key != tokenQuery {
			kept = append(kept, part)
			continue
		}
		if v, err := url.QueryUnescape(value); err == nil {
			token = v
		}
		found = true
	}
	clean := *u
	clean.RawQuery = strings.Join(kept, "&")
	return token, &clean, found
}
