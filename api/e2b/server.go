package e2b

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"regexp"
	"strconv"

	"github.com/sandboxd/sandboxd/sandbox"
)

// dataPort is the port of a sandbox that stands for its data plane.
const dataPort = 49983

// envdVersion is which data plane we say we are; the SDK decides by it what it
// may ask for.
const envdVersion = "0.6.4"

// The headers by which clients that know one address only name a sandbox.
const (
	sandboxHeader = "E2b-Sandbox-Id"
	portHeader    = "E2b-Sandbox-Port"
	tokenHeader   = "X-Access-Token"
	trafficHeader = "E2b-Traffic-Access-Token"
)

// Config is what a server is made of.
type Config struct {
	Manager Manager
	Callers Callers
	// Find returns a sandbox by its whole id, whoever asks: the token of the
	// request is what gives the right.
	Find func(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	// Admits judges what a request brings for a port of a sandbox by the rules
	// of host names: whether it may pass, whether the sandbox has a token of its
	// own, and the headers without that. Nil: it never may.
	Admits func(h http.Header, id sandbox.ID, port int) (clean http.Header, ok, asks bool)
	// Rotated remembers tokens that were changed; nil: none can be.
	Rotated *Rotations
	// Living lists the living sandboxes of everybody, for URLs that name none but
	// are signed with the token of one. It asks no database.
	Living func() []sandbox.ID
	// Secret is what tokens are derived with; see Secret.
	Secret []byte
	// Domain ends the host names of sandboxes, with a port if clients need
	// one; empty where clients know this server by its address alone.
	Domain string
	// DefaultImage is what the template base means where nobody has made one.
	DefaultImage string
	// Note, if not nil, is told of every call that changes something, when its
	// answer begins. The context carries who sent it.
	Note func(ctx context.Context, d Deed)
	Log  *slog.Logger // nil means slog.Default
}

// Server answers requests of the E2B SDK.
type Server struct {
	m       Manager
	callers Callers
	find    func(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	living  func() []sandbox.ID
	secret  []byte
	domain  string
	image   string
	log     *slog.Logger
	note    func(ctx context.Context, d Deed)
	control http.Handler
	proxy   *httputil.ReverseProxy
	plane   *dataPlane
	samples samples
	pace    pace
	admits  func(h http.Header, id sandbox.ID, port int) (clean http.Header, ok, asks bool)
	rotated *Rotations
	holds   holds
}

// New returns the handler of the whole dialect.
func New(cfg Config) http.Handler {
	s := &Server{
		m: cfg.Manager, callers: cfg.Callers, find: cfg.Find, living: cfg.Living,
		secret: cfg.Secret, domain: cfg.Domain, image: cfg.DefaultImage, log: cfg.Log,
		admits: cfg.Admits, rotated: cfg.Rotated,
	}
	if s.admits == nil {
		s.admits = func(h http.Header, _ sandbox.ID, _ int) (http.Header, bool, bool) { return h, false, false }
	}
	if s.note = cfg.Note; s.note == nil {
		s.note = func(context.Context, Deed) {}
	}
	if s.log == nil {
		s.log = slog.Default()
	}
	s.control = s.controlRoutes()
	s.proxy = s.newProxy()
	s.plane = newDataPlane(awake{s.m, s}, s.log)
	return s
}

var sandboxHost = regexp.MustCompile(`^(\d{1,5})-([a-z0-9]+)\.`)

// ServeHTTP finds out what a request is for. In this order: a sandbox named by
// headers, by the host name, by the signature of its URL, by its token; else
// the control plane.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if id, port := r.Header.Get(sandboxHeader), r.Header.Get(portHeader); id != "" {
		s.sandbox(w, r, id, port)
		return
	}
	if m := sandboxHost.FindStringSubmatch(r.Host); m != nil {
		s.sandbox(w, r, m[2], m[1])
		return
	}
	if isSigned(r) {
		id, err := s.signedFor(r)
		if err != nil {
			s.fail(w, r, err)
			return
		}
		s.sandbox(w, r, string(id), strconv.Itoa(dataPort))
		return
	}
	if id, _, ok := s.readToken(r.Header.Get(tokenHeader)); ok {
		s.sandbox(w, r, string(id), strconv.Itoa(dataPort))
		return
	}
	s.control.ServeHTTP(w, r)
}

// filesPath is where the data plane serves whole files.
const filesPath = "/files"

// sandbox answers a request that is for a port of one sandbox.
func (s *Server) sandbox(w http.ResponseWriter, r *http.Request, id, port string) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		s.fail(w, r, sandbox.Errorf(sandbox.ErrInvalid, "invalid_port", "port %.20q of a sandbox: use 1 to 65535", port))
		return
	}
	if n == dataPort {
		s.toData(w, r, id)
		return
	}
	s.toPort(w, r, id, int(n))
}

// lookUp finds a sandbox that runs, or that traffic may wake.
func (s *Server) lookUp(ctx context.Context, id string) (sandbox.Sandbox, error) {
	whole, err := sandbox.ParseID(id)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	box, err := s.find(ctx, whole)
	if err == nil && box.Status != sandbox.StatusRunning && !wakes(box) {
		err = sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "sandbox %s does not run", id)
	}
	return box, err
}

// wakes reports whether traffic wakes a sandbox that rests.
func wakes(box sandbox.Sandbox) bool {
	return box.Status == sandbox.StatusPaused && noteOf(box.Spec.Labels).AutoResume
}

// roused is the sandbox, awake; false where it does not wake, which is answered.
// The context is that of who may act there.
func (s *Server) roused(ctx context.Context, w http.ResponseWriter, box sandbox.Sandbox) (sandbox.Sandbox, bool) {
	up, err := s.rouse(ctx, box)
	if err != nil {
		noSandbox(w, string(box.ID))
		return box, false
	}
	return up, true
}

// rouse is roused without an answer.
func (s *Server) rouse(ctx context.Context, box sandbox.Sandbox) (sandbox.Sandbox, error) {
	if box.Status == sandbox.StatusRunning {
		return box, nil
	}
	up, err := s.wake(ctx, box, box.Owner, true)
	if err != nil {
		s.log.Info("traffic did not wake a sandbox", "sandbox", box.ID, "err", err)
	}
	return up, err
}

// noSandbox is the answer of a sandbox that is gone, paused or never was: the
// SDK takes the status for the end of the sandbox.
func noSandbox(w http.ResponseWriter, id string) {
	answer(w, http.StatusBadGateway, map[string]any{
		"sandboxId": id, "message": "The sandbox was not found", "code": http.StatusBadGateway,
	})
}

// toData checks the token, or the signature that was made with one, and hands
// over to the data plane. What brings neither is answered alike whether there is
// such a sandbox or not, and leaves no row in the audit.
func (s *Server) toData(w http.ResponseWriter, r *http.Request, name string) {
	id, key, err := s.keyOf(r, name)
	if err != nil {
		s.refused(w, r, func() { writeFault(w, http.StatusUnauthorized, err.Error()) })
		return
	}
	box, err := s.lookUp(r.Context(), string(id))
	if err != nil {
		noSandbox(w, name)
		return
	}
	wrong := func() {
		s.refused(w, r, func() { writeFault(w, http.StatusUnauthorized, errNoToken.Error()) })
	}
	ctx, err := s.callers.Acting(r, box, key)
	switch {
	case errors.Is(err, sandbox.ErrUnauthenticated), errors.Is(err, sandbox.ErrForbidden): // as any wrong token
		wrong()
		return
	case err != nil:
		s.fail(w, r, err)
		return
	}
	ctx, end := s.hold(ctx, w, id)
	defer end()
	// A token changed before the hold was there was not cut.
	if token := s.tokenOf(id, key); !same(r.Header.Get(tokenHeader), token) && !reproduces(r, token) {
		wrong()
		return
	}
	if r.URL.Path == "/health" && box.Status != sandbox.StatusRunning { // to ask is not to use
		noSandbox(w, name)
		return
	}
	box, ok := s.roused(ctx, w, box)
	if !ok {
		return
	}
	if changesData(r) {
		w = &notedAnswer{ResponseWriter: w, note: func(status int) {
			s.note(ctx, Deed{Operation: "e2b " + r.Method + " " + r.URL.Path, Object: string(box.ID), Status: status})
		}}
	}
	s.plane.handler(box).ServeHTTP(w, r.WithContext(ctx))
}

// Errors of who brings nothing good.
var (
	errNoToken = errors.New("this sandbox asks for its access token: send it as " + tokenHeader)
	errNotOurs = errors.New("invalid signature")
	errExpired = errors.New("signature is already expired")
)

// keyOf returns the sandbox that a request names and the API key whose token of
// it the request brings, or was signed with.
func (s *Server) keyOf(r *http.Request, name string) (sandbox.ID, string, error) {
	id, key, ok := s.readToken(r.Header.Get(tokenHeader))
	if ok && string(id) == name {
		return id, key, nil
	}
	if !isSigned(r) {
		return "", "", errNoToken
	}
	id, err := sandbox.ParseID(name)
	if err != nil {
		return "", "", errNotOurs
	}
	owner, err := s.ownerOf(r.Context(), id)
	if err != nil {
		return "", "", errNotOurs
	}
	if key, ok = s.signedWith(r, id, owner); !ok {
		return "", "", errNotOurs
	}
	if expired(r) {
		return "", "", errExpired
	}
	return id, key, nil
}

// refused counts a request that brought nothing good, and answers it.
func (s *Server) refused(w http.ResponseWriter, r *http.Request, answer func()) {
	if err := s.callers.Refused(r); err != nil {
		s.fail(w, r, err)
		return
	}
	answer()
}
