package server

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Office knows who calls, and keeps keys and owners.
type Office interface {
	ByKey(ctx context.Context, secret, from string) (access.Caller, error)
	BySocket(uid uint32) (access.Caller, error)
	// Pace counts a request.
	Pace(c access.Caller) error
	// HoldBack counts a refused request, and waits before its answer begins.
	HoldBack(ctx context.Context, c access.Caller)
	// Hold has cut called when the caller's rights go away.
	Hold(c access.Caller, cut func(why error)) (release func())
	Quota(ctx context.Context, owner string) (access.Quota, error)

	CreateKey(ctx context.Context, req access.KeyRequest) (access.Key, error)
	Keys(owner string) []access.Key
	RevokeKey(ctx context.Context, id string) (access.Key, error)
	Owners() []access.Owner
	Owner(name string) (access.Owner, error)
	SetOwner(ctx context.Context, name string, c access.OwnerChange) (access.Owner, error)
	RemoveOwner(ctx context.Context, name string) error
}

// Audit keeps who changed what.
type Audit interface {
	// Ready is an error while nothing can be noted.
	Ready() error
	Note(e access.AuditRow)
	NoteNow(ctx context.Context, e access.AuditRow) error
	Audit(ctx context.Context, q access.AuditQuery) ([]access.AuditRow, error)
	VerifyAudit(ctx context.Context, anchor int64, want access.Sum) (access.AuditCheck, error)
}

// admit finds out who sends a request. What it lets through has a caller in
// its context, the few public paths excepted.
func (s *server) admit(next http.Handler) http.Handler {
	if s.office == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !ownOrigin(r) {
			s.refuse(w, r, sandbox.Errorf(sandbox.ErrForbidden, "origin_forbidden", "a page of %.100q may not call this daemon: only its own pages may", r.Header.Get("Origin")))
			return
		}
		if _, known := access.Of(r.Context()); known || public(r) {
			next.ServeHTTP(w, r)
			return
		}
		c, err := s.callerOf(r)
		if err != nil {
			s.refuse(w, r, err)
			return
		}
		ctx := access.With(r.Context(), c)
		err = s.office.Pace(c)
		if err == nil {
			err = Admitted(ctx, c.Owner)
		}
		if err != nil {
			requestOf(ctx).r = r.WithContext(ctx) // whom it is held back for
			s.refuse(w, r, err)
			return
		}
		if c.Key != "" || c.Owner != "uid:0" { // root's rights never go
			held, end := s.hold(ctx, c)
			defer end()
			ctx = held
		}
		req := requestOf(ctx)
		req.r = r.WithContext(ctx)
		next.ServeHTTP(w, req.r)
	})
}

// hold ends the context, which has the reason as its cause, and soon after the connection, when the caller's
// rights go away. end must be called when the request is over.
func (s *server) hold(ctx context.Context, c access.Caller) (held context.Context, end func()) {
	held, cut, over := api.WithCut(ctx, func() { hangUp(ctx) })
	release := s.office.Hold(c, cut)
	return held, func() {
		release()
		over()
	}
}

// cutFor returns why the request of a context was cut; nil if it was not.
func cutFor(ctx context.Context) error {
	if why := context.Cause(ctx); sandbox.ClassOf(why) != nil {
		return why
	}
	return nil
}

// hangUp closes the connection of a request, at once: TLS would first say so
// to a client that may not listen.
func hangUp(ctx context.Context) {
	conn := peerOf(ctx).conn
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	if conn != nil {
		_ = conn.Close() // it may be closed
	}
}

// holdBack waits before the answer that refuses a request begins, where its
// owner has had many such: a client that repeats what is refused is slowed
// down, and others do not wait for it.
func (s *server) holdBack(req *request, status int) {
	if status < http.StatusBadRequest || s.office == nil || req.r == nil {
		return
	}
	if c, known := access.Of(req.r.Context()); known {
		s.office.HoldBack(req.r.Context(), c)
	}
}

// ownOrigin reports whether a request may come from where its browser says:
// from no page, or one of the daemon's own. Whose page it is no key or user
// tells: a browser sends them along for any (RFC 6455, section 10.2).
func ownOrigin(r *http.Request) bool {
	origin, given := r.Header["Origin"]
	if !given {
		return true
	}
	u, err := url.Parse(strings.Join(origin, " "))
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, r.Host)
}

// public reports whether a path is for everybody: it tells nothing but what
// the documentation says too.
func public(r *http.Request) bool {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return false
	}
	switch r.URL.Path {
	case "/healthz", docsPath, "/openapi.json", "/openapi.yaml", "/openapi-3.0.json", "/openapi-3.0.yaml":
		return true
	}
	return false
}

// callerOf returns who sent a request: whose key it carries, else, on a unix
// socket, whose process it is.
func (s *server) callerOf(r *http.Request) (access.Caller, error) {
	p := peerOf(r.Context())
	key := keyOf(r.Header)
	if key != "" || !p.unix {
		return s.office.ByKey(r.Context(), key, p.from(r))
	}
	if !p.known {
		return access.Caller{}, sandbox.Errorf(sandbox.ErrForbidden, "unknown_peer", "the kernel does not say which user this connection is from: use an API key")
	}
	return s.office.BySocket(p.uid)
}

// keyOf returns the API key of a request.
func keyOf(h http.Header) string {
	if key := h.Get("X-API-Key"); key != "" {
		return strings.TrimSpace(key)
	}
	scheme, key, _ := strings.Cut(h.Get("Authorization"), " ")
	if strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(key)
	}
	return ""
}

// refuse answers a request that gets no further than who sent it.
func (s *server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	p := s.problemOf(r.Context(), err)
	if p.Status == http.StatusUnauthorized {
		challenge := `Bearer realm="sandboxd"`
		if keyOf(r.Header) != "" {
			challenge += `, error="invalid_token"` // RFC 6750, section 3
		}
		w.Header().Set("WWW-Authenticate", challenge)
	}
	if after := retryAfter(err); after > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(after))
	}
	if r.ContentLength != 0 {
		w.Header().Set("Connection", "close") // nobody reads the body
	}
	writeProblem(w, p)
}

// permit judges whether a caller's role is enough for an operation, and
// prepares the audit. object is what the operation is about.
func (s *server) permit(ctx context.Context, operation, object string) error {
	rule, listed := rules[operation]
	c, known := access.Of(ctx)
	switch {
	case rule.public, !known && s.office == nil:
		return nil
	case !known: // no way leads here without admit
		return sandbox.Errorf(sandbox.ErrUnauthenticated, "key_missing", "nobody knows who sends this request")
	case !listed:
		rule = rulebook{least: access.RoleAdmin, changes: true}
	}
	if rule.changes {
		s.audited(ctx, operation, object, rule.lasting)
	}
	if !c.Role.AtLeast(rule.least) {
		return sandbox.Errorf(sandbox.ErrForbidden, "role_too_low", "operation %s needs the role %s, and %s is %s here: ask an administrator", operation, rule.least, c.Owner, c.Role)
	}
	if rule.changes && s.audit != nil {
		return s.audit.Ready()
	}
	return nil
}

// permitted is permit for what is no operation of the framework.
func (s *server) permitted(operation string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := s.permit(r.Context(), operation, "")
		if err == nil && s.world != "" && operation == servedMCP { // some of its tools run
			err = errForLooking()
		}
		if err != nil {
			s.refuse(w, r, err)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// peer is the other end of a connection.
type peer struct {
	conn  net.Conn
	unix  bool
	known bool // whose it is, of a unix socket
	uid   uint32
}

// from is the address of the other side.
func (p peer) from(r *http.Request) string {
	if p.conn != nil && !p.unix {
		return p.conn.RemoteAddr().String()
	}
	if p.unix {
		return "unix"
	}
	return r.RemoteAddr
}

// name is the actor of a request that nobody authenticated.
func (p peer) name() string {
	switch {
	case p.known:
		return "uid:" + strconv.FormatUint(uint64(p.uid), 10)
	case p.conn != nil && !p.unix:
		return "addr:" + p.conn.RemoteAddr().String()
	}
	return "unknown"
}
