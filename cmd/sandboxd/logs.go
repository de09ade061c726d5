package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/sandbox"
)

func newLogger(c config) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return nil, fmt.Errorf("log_level %q: use debug, info, warn or error", c.LogLevel)
	}
	return slog.New(requestHandler{newHandler(os.Stderr, level, c.LogFormat == "json", toJournal(os.Stderr))}), nil
}

// newHandler writes lines of text or JSON; to the journal each with its
// priority before it, and without the time, which the journal has.
func newHandler(w io.Writer, level slog.Level, asJSON, journal bool) slog.Handler {
	opts := &slog.HandlerOptions{Level: level}
	form := func(w io.Writer) slog.Handler {
		if asJSON {
			return slog.NewJSONHandler(plainJSON{w}, opts)
		}
		return slog.NewTextHandler(w, opts)
	}
	if !journal {
		return form(w)
	}
	opts.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey && !asJSON) {
			return slog.Attr{}
		}
		return a
	}
	out := &journalLines{w: w}
	return journalHandler{form(&out.line), out}
}

// plainJSON writes the characters that steer a terminal and JSON lets stand as
// their codes; the text form quotes them itself.
type plainJSON struct{ io.Writer }

func (w plainJSON) Write(b []byte) (int, error) {
	_, err := w.Writer.Write(sandbox.PlainJSON(b))
	return len(b), err
}

// toJournal reports whether a file is a stream to systemd's journal, which says
// so in the environment (systemd.exec(5), JOURNAL_STREAM).
func toJournal(f *os.File) bool {
	var dev, ino uint64
	var st unix.Stat_t
	if n, err := fmt.Sscanf(os.Getenv("JOURNAL_STREAM"), "%d:%d", &dev, &ino); n != 2 || err != nil {
		return false
	}
	return unix.Fstat(int(f.Fd()), &st) == nil && st.Dev == dev && st.Ino == ino
}

// requestHandler adds to a record the request its context belongs to.
type requestHandler struct{ slog.Handler }

// requestAttr is what a request is called in logs.
const requestAttr = "request"

// Handle adds the request, where the record does not name it itself.
func (h requestHandler) Handle(ctx context.Context, r slog.Record) error {
	if id := server.RequestID(ctx); id != "" {
		named := false
		r.Attrs(func(a slog.Attr) bool {
			named = a.Key == requestAttr
			return !named
		})
		if !named {
			r = r.Clone()
			r.AddAttrs(slog.String(requestAttr, id))
		}
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs keeps the request.
func (h requestHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return requestHandler{h.Handler.WithAttrs(attrs)}
}

// WithGroup keeps the request.
func (h requestHandler) WithGroup(name string) slog.Handler {
	return requestHandler{h.Handler.WithGroup(name)}
}

// journalLines takes a line at a time.
type journalLines struct {
	mu   sync.Mutex
	line bytes.Buffer // guarded by mu
	w    io.Writer
}

// journalHandler says how important a line is (sd-daemon(3)).
type journalHandler struct {
	slog.Handler // into out.line
	out          *journalLines
}

// Handle writes a line.
func (h journalHandler) Handle(ctx context.Context, r slog.Record) error {
	priority := "<6>"
	switch {
	case r.Level >= slog.LevelError:
		priority = "<3>"
	case r.Level >= slog.LevelWarn:
		priority = "<4>"
	case r.Level < slog.LevelInfo:
		priority = "<7>"
	}
	h.out.mu.Lock()
	defer h.out.mu.Unlock()
	h.out.line.Reset()
	h.out.line.WriteString(priority)
	if err := h.Handler.Handle(ctx, r); err != nil {
		return err
	}
	_, err := h.out.w.Write(h.out.line.Bytes())
	return err
}

// WithAttrs keeps the priority.
func (h journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return journalHandler{h.Handler.WithAttrs(attrs), h.out}
}

// WithGroup keeps the priority.
func (h journalHandler) WithGroup(name string) slog.Handler {
	return journalHandler{h.Handler.WithGroup(name), h.out}
}
