package trace

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/sandboxd/sandboxd/sandbox"
)

// sink is a collector.
type sink struct {
	*httptest.Server
	mu    sync.Mutex
	spans map[string]*otlp.Span // by name; guarded by mu
	paths []string
}

func collect(t *testing.T) *sink {
	t.Helper()
	s := &sink{spans: map[string]*otlp.Span{}}
	s.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		var req collector.ExportTraceServiceRequest
		if err == nil {
			err = proto.Unmarshal(b, &req)
		}
		if err != nil {
			t.Errorf("export: %v", err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.paths = append(s.paths, r.URL.Path)
		for _, rs := range req.GetResourceSpans() {
			for _, ss := range rs.GetScopeSpans() {
				for _, span := range ss.GetSpans() {
					s.spans[span.GetName()] = span
				}
			}
		}
	}))
	t.Cleanup(s.Close)
	return s
}

func attributes(s *otlp.Span) map[string]string {
	out := map[string]string{}
	for _, a := range s.GetAttributes() {
		out[a.GetKey()] = strings.Trim(a.GetValue().String(), `"`)
		if v := a.GetValue().GetStringValue(); v != "" {
			out[a.GetKey()] = v
		}
	}
	return out
}

const (
	callersTrace = "0af7651916cd43dd8448eb211c80319c"
	callersSpan  = "b7ad6b7169203331"
)

func TestSpans(t *testing.T) {
	s := collect(t)
	tracer, err := Open(t.Context(), Config{Endpoint: s.URL, Sample: 1, Version: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	r := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/sandboxes", nil)
	r.Header.Set("Traceparent", "00-"+callersTrace+"-"+callersSpan+"-01")
	ctx := tracer.Request(t.Context(), r, "rq123")
	work, done := tracer.Work(ctx, "create")
	_, part := tracer.Work(context.WithoutCancel(work), "create.shell") // as the manager's own contexts are
	part(nil)
	done(sandbox.Errorf(sandbox.ErrExhausted, "slots_exhausted", "full"))
	tracer.Answer(ctx, "create-sandbox", 503)
	if err := tracer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	request, create, shell := s.spans["create-sandbox"], s.spans["create"], s.spans["create.shell"]
	if request == nil || create == nil || shell == nil || len(s.spans) != 3 || s.paths[0] != "/v1/traces" {
		t.Fatalf("spans %v at %v", s.spans, s.paths)
	}
	for _, c := range []struct {
		what string
		a, b []byte
	}{
		{"create is below the request", create.GetParentSpanId(), request.GetSpanId()},
		{"the shell is below create", shell.GetParentSpanId(), create.GetSpanId()},
		{"all are of one trace", shell.GetTraceId(), request.GetTraceId()},
	} {
		if !bytes.Equal(c.a, c.b) {
			t.Errorf("not so: %s (%x, %x)", c.what, c.a, c.b)
		}
	}
	if id, parent := hex.EncodeToString(request.GetTraceId()), hex.EncodeToString(request.GetParentSpanId()); id != callersTrace || parent != callersSpan {
		t.Errorf("the request is of trace %s below %s, want the caller's %s and %s", id, parent, callersTrace, callersSpan)
	}
	if got := attributes(request)["sandboxd.request_id"]; got != "rq123" {
		t.Errorf("request id %q", got)
	}
	if got := attributes(create)["sandboxd.error.code"]; got != "slots_exhausted" || create.GetStatus().GetCode() != otlp.Status_STATUS_CODE_ERROR {
		t.Errorf("error of create: %q, %v", got, create.GetStatus())
	}
	if request.GetStatus().GetCode() != otlp.Status_STATUS_CODE_ERROR || shell.GetStatus().GetCode() == otlp.Status_STATUS_CODE_ERROR {
		t.Errorf("status of the request %v, of the shell %v", request.GetStatus(), shell.GetStatus())
	}
}

// TestSampling draws nothing of what nobody wants drawn. The control is the
// caller who does.
func TestSampling(t *testing.T) {
	s := collect(t)
	tracer, err := Open(t.Context(), Config{Endpoint: s.URL, Sample: 0})
	if err != nil {
		t.Fatal(err)
	}
	for name, flags := range map[string]string{"plain": "", "unwanted": "-00", "wanted": "-01"} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
		if flags != "" {
			r.Header.Set("Traceparent", "00-"+callersTrace+"-"+callersSpan+flags)
		}
		tracer.Answer(tracer.Request(t.Context(), r, "x"), name, 200)
	}
	if err := tracer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.spans) != 1 || s.spans["wanted"] == nil {
		t.Errorf("drawn: %v, want that of the caller alone", s.spans)
	}
}

// TestDeadCollector: nobody waits for it, and the log says so once.
func TestDeadCollector(t *testing.T) {
	dead := httptest.NewServer(http.NotFoundHandler())
	dead.Close()
	var said bytes.Buffer
	complain := complaints(slog.New(slog.NewTextHandler(&said, nil)), dead.URL)
	for range 3 {
		complain(errors.New("connection refused"))
	}
	if strings.Count(said.String(), "\n") != 1 {
		t.Errorf("of three complaints the log has:\n%s", &said)
	}
	tracer, err := Open(t.Context(), Config{Endpoint: dead.URL, Sample: 1})
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	all := make(chan struct{})
	go func() {
		defer close(all)
		for range 10000 {
			_, done := tracer.Work(t.Context(), "create")
			done(nil)
		}
	}()
	select {
	case <-all:
	case <-time.After(time.Minute):
		t.Fatal("ten thousand spans wait for a collector that is not there")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_ = tracer.Close(ctx) // some error; what counts is that it ends
	if ctx, done := (*Tracer)(nil).Work(t.Context(), "x"); ctx != t.Context() {
		t.Error("no tracer made a span")
	} else {
		done(nil)
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{
		{Endpoint: "127.0.0.1:4318"},
		{Endpoint: "ftp://x"},
		{Endpoint: "http://"},
		{Endpoint: "http://u:p@h"},
		{Endpoint: "http://h", Sample: 1.5},
		{Endpoint: "http://h", Sample: -1},
	} {
		if tracer, err := Open(t.Context(), c); err == nil || tracer != nil {
			t.Errorf("%+v: %v, %v; want an error", c, tracer, err)
		}
	}
	if tracer, err := Open(t.Context(), Config{}); err != nil || tracer != nil {
		t.Errorf("without an endpoint: %v, %v", tracer, err)
	}
}

// BenchmarkOff is what requests and works pay where traces are off.
func BenchmarkOff(b *testing.B) {
	var t *Tracer
	r := httptest.NewRequestWithContext(b.Context(), "GET", "/v1/version", nil)
	b.ReportAllocs()
	for b.Loop() {
		ctx := t.Request(b.Context(), r, "rq")
		ctx, done := t.Work(ctx, "create")
		done(nil)
		t.Answer(ctx, "version", 200)
	}
}

// BenchmarkOn is the control.
func BenchmarkOn(b *testing.B) {
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer s.Close()
	t, err := Open(b.Context(), Config{Endpoint: s.URL, Sample: 1})
	if err != nil {
		b.Fatal(err)
	}
	r := httptest.NewRequestWithContext(b.Context(), "GET", "/v1/version", nil)
	b.ReportAllocs()
	for b.Loop() {
		ctx := t.Request(b.Context(), r, "rq")
		_, done := t.Work(ctx, "create")
		done(nil)
		t.Answer(ctx, "version", 200)
	}
}
