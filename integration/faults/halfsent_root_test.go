//go:build root

package faults

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"
)

// placesOfAddress is how many connections one address may have.
const placesOfAddress = 256

// halfSent: somebody who fills all places of an address with requests that are
// sent in half keeps nobody else there waiting, with a good key neither.
func (w *tenants) halfSent(t *testing.T) {
	w.t = t
	w.root("PUT", "/v1/owners/erin", roomy)
	w.key("erin", "erin", "developer")
	once := func() time.Duration {
		began := time.Now()
		if a := w.e2b("GET", "/sandboxes", "", "X-API-Key", w.keys["erin"]); a.status != http.StatusOK {
			t.Fatalf("an honest client: %d %s", a.status, a.body)
		}
		return time.Since(began)
	}
	median := func() time.Duration {
		var all []time.Duration
		for range 41 {
			all = append(all, once())
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	median()
	for what, request := range map[string]string{
		"header":              "GET /sandboxes HTTP/1.1\r\nHost: x\r\nX-A: ",
		"body, no key":        "POST /sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"body, chunked":       "POST /sandboxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
		"body, another's key": "POST /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: " + w.keys["bob"] + "\r\nContent-Length: 100\r\n\r\n{",
	} {
		// hold fills the places, and refills what is evicted or refused.
		hold := func(t *testing.T) (release func()) {
			var wg sync.WaitGroup
			stop, opened := make(chan struct{}), make(chan struct{}, 1<<16)
			for range placesOfAddress {
				wg.Go(func() {
					for {
						c, err := net.Dial("tcp", tenantsE2B)
						if err != nil {
							t.Error(err)
							return
						}
						_, _ = fmt.Fprint(c, request)
						opened <- struct{}{}
						closed := make(chan struct{})
						go func() { _, _ = io.Copy(io.Discard, c); close(closed) }()
						select {
						case <-stop:
							_ = c.Close()
							return
						case <-closed:
							_ = c.Close()
						}
						select {
						case <-stop:
							return
						case <-time.After(300 * time.Millisecond):
						}
					}
				})
			}
			for range placesOfAddress {
				<-opened
			}
			return func() { close(stop); wg.Wait() }
		}
		t.Run(what, func(t *testing.T) {
			var quiet, under time.Duration
			for range 3 { // the machine may be busy for a while
				quiet = median()
				release := hold(t)
				under = median()
				release()
				if quiet = max(quiet, median()); under <= 3*quiet {
					break
				}
			}
			t.Logf("quiet %s, with %d half sent %s", quiet, placesOfAddress, under)
			if under > 3*quiet {
				t.Errorf("an honest client waits %s with %d requests half sent, and %s without", under, placesOfAddress, quiet)
			}
		})
	}
}
