package server

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of what a client sends as it comes. What stands in a queue, or keeps
// layers from being collected, while it is sent must not stand still there.
const (
	uploadIdle   = 30 * time.Second // between two pieces
	uploadGrace  = time.Minute      // before the mean counts
	uploadSlowly = 64 << 10         // bytes a second, the least on the mean
)

// upload is the body of a request that is read as it comes.
type upload struct {
	io.ReadCloser
	rc   *http.ResponseController
	idle time.Duration

	waited time.Duration // for the client
	bytes  int64
}

// uploadOf replaces the body of a request by one that ends, with code
// upload_too_slow, where the client sends nothing for a while or too little.
func uploadOf(ctx context.Context) *http.Request {
	req := requestOf(ctx)
	if _, done := req.r.Body.(*upload); !done {
		req.r.Body = &upload{ReadCloser: req.r.Body, rc: http.NewResponseController(req.w), idle: uploadIdle}
	}
	return req.r
}

// Read reads what the client sent.
func (u *upload) Read(p []byte) (int, error) {
	_ = u.rc.SetReadDeadline(time.Now().Add(u.idle)) // a recorder of tests has none
	began := time.Now()
	n, err := u.ReadCloser.Read(p)
	u.waited += time.Since(began)
	u.bytes += int64(n)
	if err != nil {
		if err != io.EOF && time.Since(began) >= u.idle { //nolint:errorlint // as net/http gives it
			err = tooSlow()
		}
		_ = u.rc.SetReadDeadline(time.Time{})
		return n, err
	}
	if u.waited > uploadGrace && u.bytes < int64(u.waited/time.Second)*uploadSlowly {
		return n, tooSlow()
	}
	return n, nil
}

func tooSlow() error {
	return sandbox.Errorf(sandbox.ErrDeadline, "upload_too_slow", "the body did not come in time: send it without a pause of %s, and %d KiB a second or more", uploadIdle, uploadSlowly>>10)
}
