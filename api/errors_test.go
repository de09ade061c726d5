package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestEveryClassGoesBothWays(t *testing.T) {
	seen := map[int]error{}
	for _, class := range sandbox.Classes() {
		err := fmt.Errorf("creating sandbox x: %w", sandbox.Errorf(class, "some_code", "limit %d", 7))
		p := ProblemOf(err, "rq1")
		if other := seen[p.Status]; other != nil {
			t.Errorf("%v and %v share status %d", class, other, p.Status)
		}
		seen[p.Status] = class
		if p.Status < 400 || p.Status == http.StatusInternalServerError || p.Title == "" {
			t.Errorf("%v: status %d %q", class, p.Status, p.Title)
		}
		wire, jerr := json.Marshal(p)
		if jerr != nil {
			t.Fatal(jerr)
		}
		var got Problem
		if err := json.Unmarshal(wire, &got); err != nil {
			t.Fatal(err)
		}
		back := got.Err()
		if !errors.Is(back, class) || sandbox.ClassOf(back) != class { //nolint:errorlint // the class itself must come back
			t.Errorf("%v came back as %v", class, sandbox.ClassOf(back))
		}
		if sandbox.CodeOf(back) != "some_code" || back.Error() != "creating sandbox x: limit 7" {
			t.Errorf("%v came back as %q (%s)", class, back, sandbox.CodeOf(back))
		}
		for _, other := range sandbox.Classes() {
			if other != class && errors.Is(back, other) { //nolint:errorlint // see above
				t.Errorf("%v came back as %v too", class, other)
			}
		}
	}
	if len(seen)+1 != len(table) {
		t.Errorf("the table has %d rows for %d classes and internal", len(table), len(seen))
	}
}

func TestBareClassesHaveCodes(t *testing.T) {
	for _, class := range sandbox.Classes() {
		p := ProblemOf(fmt.Errorf("something: %w", class), "")
		if p.Code == CodeInternal || p.Status != StatusOf(class) {
			t.Errorf("%v: %d %s", class, p.Status, p.Code)
		}
	}
}

func TestUnclassedShowsOnlyTheRequest(t *testing.T) {
	p := ProblemOf(errors.New("open /secret/path: disk full"), "rq42")
	if p.Status != 500 || p.Code != CodeInternal || !strings.Contains(p.Detail, "rq42") || strings.Contains(p.Detail, "secret") {
		t.Errorf("%+v", p)
	}
	back := p.Err()
	if !errors.Is(back, ErrInternal) || sandbox.CodeOf(back) != CodeInternal {
		t.Errorf("came back as %v", back)
	}
	// Passed on once more, by a proxy of ours, it stays internal.
	if again := ProblemOf(back, "rq43"); again.Status != 500 {
		t.Errorf("again: %+v", again)
	}
}

func TestForeignErrors(t *testing.T) {
	for _, tc := range []struct {
		err    error
		status int
		code   string
	}{
		{context.DeadlineExceeded, 504, "deadline_exceeded"},
		{context.Canceled, 503, "cancelled"},
		{&http.MaxBytesError{Limit: 5}, 413, "body_too_large"},
	} {
		if p := ProblemOf(fmt.Errorf("x: %w", tc.err), ""); p.Status != tc.status || p.Code != tc.code {
			t.Errorf("%v: %d %s", tc.err, p.Status, p.Code)
		}
	}
	for status, class := range map[int]error{405: sandbox.ErrInvalid, 418: sandbox.ErrInvalid, 502: sandbox.ErrUnavailable, 599: sandbox.ErrUnavailable} {
		if got := ClassOf(status); got != class { //nolint:errorlint // the class itself
			t.Errorf("status %d: %v, want %v", status, got, class)
		}
	}
}

func TestFrames(t *testing.T) {
	frame := AppendOutput(nil, sandbox.Stderr, 1<<40, []byte("data"))
	stream, offset, data, ok := ParseOutput(frame)
	if !ok || stream != sandbox.Stderr || offset != 1<<40 || string(data) != "data" {
		t.Errorf("%v %v %q %v", stream, offset, data, ok)
	}
	in, ok := ParseStdin(AppendStdin(nil, []byte("keys")))
	if !ok || string(in) != "keys" {
		t.Errorf("%q %v", in, ok)
	}
	if _, ok := ParseStdin(AppendStdin(nil, make([]byte, MaxStdinFrame+1))); ok {
		t.Error("a frame too long was taken")
	}
}

func TestFrameHeaders(t *testing.T) {
	var b [FrameHeader]byte
	for _, tc := range []struct {
		kind byte
		n    int
		ok   bool
	}{{FrameText, 0, true}, {FrameText, MaxText, true}, {FrameText, MaxText + 1, false}, {FrameBinary, MaxFrame, true}, {FrameBinary, MaxFrame + 1, false}, {0, 1, false}, {3, 1, false}} {
		PutFrameHeader(b[:], tc.kind, tc.n)
		if kind, n, ok := ParseFrameHeader(b[:]); ok != tc.ok || ok && (kind != tc.kind || n != tc.n) {
			t.Errorf("%+v: %d %d %v", tc, kind, n, ok)
		}
	}
	if _, _, ok := ParseFrameHeader(b[:FrameHeader-1]); ok {
		t.Error("a part of a header was taken")
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 5, 'x'})
	f.Add([]byte{0, 'k'})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if stream, offset, data, ok := ParseOutput(b); ok {
			if offset < 0 || string(AppendOutput(nil, stream, offset, data)) != string(b) {
				t.Errorf("%x does not survive", b)
			}
		}
		if kind, n, ok := ParseFrameHeader(b); ok {
			var again [FrameHeader]byte
			PutFrameHeader(again[:], kind, n)
			if string(again[:]) != string(b[:FrameHeader]) {
				t.Errorf("%x does not survive", b)
			}
		}
		if data, ok := ParseStdin(b); ok && string(AppendStdin(nil, data)) != string(b) {
			t.Errorf("%x does not survive", b)
		}
	})
}
