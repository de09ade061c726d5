// Package trace draws the way of requests through the daemon as spans, and
// sends them to an OpenTelemetry collector by OTLP over HTTP. A nil Tracer
// does nothing, and costs nothing.
//
// It does not decide what a span is: the API tells it of requests, the
// manager's Observer of works and their parts. Nobody waits for the collector:
// spans it does not take in time are lost.
package trace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Config is what a Tracer is made of.
type Config struct {
	// Endpoint is the collector's URL, as http://127.0.0.1:4318; without a path
	// it is /v1/traces there. Empty: no Tracer.
	Endpoint string
	// Sample is the part of requests drawn, from 0 to 1, of those whose caller
	// has not decided.
	Sample  float64
	Version string       // of the daemon
	Log     *slog.Logger // nil: nowhere
}

// Check finds what Open would refuse.
func (c Config) Check() error {
	if c.Endpoint == "" {
		return nil
	}
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil {
		return fmt.Errorf("endpoint %.100q: use a URL, as http://127.0.0.1:4318", c.Endpoint)
	}
	if c.Sample < 0 || c.Sample > 1 {
		return fmt.Errorf("sample %g: use 0 to 1", c.Sample)
	}
	return nil
}

// Bounds of what waits for the collector.
const (
	exportTimeout = 10 * time.Second
	complainEvery = time.Minute
)

// Tracer draws spans. It is safe for concurrent use.
type Tracer struct {
	spans    trace.Tracer
	provider *sdk.TracerProvider
	context  propagation.TraceContext
}

// Open makes a tracer; nil where there is no endpoint. It does not wait for
// the collector to answer.
func Open(ctx context.Context, c Config) (*Tracer, error) {
	if err := c.Check(); err != nil || c.Endpoint == "" {
		return nil, err
	}
	if u, err := url.Parse(c.Endpoint); err == nil && strings.Trim(u.Path, "/") == "" {
		c.Endpoint = u.JoinPath("v1", "traces").String()
	}
	exporter, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(c.Endpoint), otlptracehttp.WithTimeout(exportTimeout))
	if err != nil {
		return nil, fmt.Errorf("open the collector %s: %w", c.Endpoint, err)
	}
	otel.SetErrorHandler(complaints(c.Log, c.Endpoint))
	p := sdk.NewTracerProvider(
		sdk.WithBatcher(exporter),
		sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(c.Sample))),
		sdk.WithResource(resource.NewSchemaless(attribute.String("service.name", "sandboxd"), attribute.String("service.version", c.Version))),
	)
	return &Tracer{spans: p.Tracer("github.com/sandboxd/sandboxd"), provider: p}, nil
}

// complaints logs that spans are lost, now and then.
func complaints(log *slog.Logger, endpoint string) otel.ErrorHandlerFunc {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	var last atomic.Int64
	return func(err error) {
		now := time.Now().UnixNano()
		if was := last.Load(); now-was < int64(complainEvery) || !last.CompareAndSwap(was, now) {
			return
		}
		log.Warn("send traces: they are lost", "endpoint", endpoint, "err", err)
	}
}

// Request begins the span of a request, below the caller's where the request
// names one (W3C traceparent). Its context is for Answer.
func (t *Tracer) Request(ctx context.Context, r *http.Request, id string) context.Context {
	if t == nil {
		return ctx
	}
	ctx = t.context.Extract(ctx, propagation.HeaderCarrier(r.Header))
	ctx, _ = t.spans.Start(ctx, r.Method, trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(
		attribute.String("http.request.method", r.Method), attribute.String("url.path", r.URL.Path), attribute.String("sandboxd.request_id", id),
	))
	return ctx
}

// Answer ends the span of a request; the operation is its name, if there is
// one.
func (t *Tracer) Answer(ctx context.Context, operation string, status int) {
	if t == nil {
		return
	}
	s := trace.SpanFromContext(ctx)
	if operation != "" {
		s.SetName(operation)
	}
	s.SetAttributes(attribute.Int("http.response.status_code", status))
	if status >= http.StatusInternalServerError {
		s.SetStatus(codes.Error, http.StatusText(status))
	}
	s.End()
}

func ignore(error) {}

// Work begins the span of a part of what ctx belongs to. The returned function
// ends it.
func (t *Tracer) Work(ctx context.Context, name string) (context.Context, func(error)) {
	if t == nil {
		return ctx, ignore
	}
	ctx, s := t.spans.Start(ctx, name)
	return ctx, func(err error) {
		if err != nil {
			s.SetStatus(codes.Error, err.Error())
			if e, ok := errors.AsType[*sandbox.Error](err); ok {
				s.SetAttributes(attribute.String("sandboxd.error.code", e.Code))
			}
		}
		s.End()
	}
}

// Close sends what waits, within ctx.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	if err := t.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("send the last traces: %w", err)
	}
	return nil
}
