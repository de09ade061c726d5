//go:build root

package faults

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// mostDaemon is what a daemon may take, whatever is asked of it, in bytes.
const mostDaemon = 256 << 20

// manyFiles are nearly as many as one listing may have; cut down, so many that
// twelve listings held whole would be more than mostDaemon.
func manyFiles() int { return harness.Soak(40_000, 99_900) }

// TestAnswersAddUp: answers of a sandbox that many ask for at once, and some
// never read, do not add up in the daemon, and a neighbour's commands run.
func TestAnswersAddUp(t *testing.T) {
	d := harness.Install(t, "")
	hog, beside := d.New(t, sandbox.Spec{}), d.New(t, sandbox.Spec{})
	d.Sh(t, string(hog.ID), fmt.Sprintf(`mkdir /tmp/many && cd /tmp/many && python3 -c 'import os
for i in range(%d): os.mknod("a-name-of-some-length-%%06d" %% i)'`, manyFiles()))
	// Positive control: a listing by itself is whole and in order.
	list, err := d.Files(string(hog.ID)).List(t.Context(), "", "/tmp/many", 1)
	if err != nil || len(list) != manyFiles() {
		t.Fatalf("%d entries, %v; want %d", len(list), err, manyFiles())
	}
	if !slices.IsSortedFunc(list, func(a, b sandbox.FileInfo) int { return strings.Compare(a.Path, b.Path) }) {
		t.Error("the entries are not in order")
	}
	start := func(argv ...string) string {
		p, err := d.StartProcess(t.Context(), string(hog.ID), sandbox.ProcessSpec{Argv: argv})
		if err != nil {
			t.Fatal(err)
		}
		return string(p.ID)
	}
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var nd net.Dialer
		return nd.DialContext(ctx, "unix", filepath.Join(d.Dir, "run/sandboxd.sock"))
	}}}
	calm := execTimes(t, d, beside.ID, 20)

	base := "http://d/v1/sandboxes/" + string(hog.ID)
	listing := get(base+"/files/list?path=/tmp/many", "")
	// Listings alone, cut down to their beginnings, which come when all names
	// are in order: on a busy machine whole ones take longer than what follows.
	most := int64(harness.Soak(1<<20, 1<<30))
	var whole sync.WaitGroup
	for range 12 {
		whole.Go(func() {
			req, err := listing()
			if err != nil {
				t.Error(err)
				return
			}
			for {
				resp, err := hc.Do(req.Clone(t.Context()))
				if err != nil {
					t.Error(err)
					return
				}
				n, _ := io.Copy(io.Discard, io.LimitReader(resp.Body, most))
				_ = resp.Body.Close()
				if resp.StatusCode != http.StatusTooManyRequests {
					if resp.StatusCode != http.StatusOK || n < 1<<20 {
						t.Errorf("a listing: status %d, %d bytes", resp.StatusCode, n)
					}
					return
				}
			}
		})
	}
	whole.Wait()
	t.Logf("daemon at most %d MiB after 12 listings", peakMemory(t, d.PID())>>20)
	loud := start("sh", "-c", "while :; do head -c 4194304 /dev/zero; done")
	for i := range 40 { // records that are large
		start("sleep", "1000", strconv.Itoa(i), strings.Repeat("x", 40<<10))
	}
	asks := []func() (*http.Request, error){
		listing,
		get(base+"/files/archive?path=/usr", ""),
		get(base+"/processes/"+loud+"/output?follow=true", ""),
		get("http://d/v1/events?after=0", "text/event-stream"),
		get(base+"/files/list?path=/tmp&depth=3", ""),
		get(base+"/processes?limit=1000", ""),
		post(base+"/exec", `{"argv":["cat","/dev/zero"]}`),
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Duration(harness.Soak(5, 60))*time.Second)
	defer stop()
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		status = map[int]int{}
	)
	for i := range harness.Soak(84, 300) {
		wg.Go(func() {
			req, err := asks[i%len(asks)]()
			if err != nil {
				t.Error(err)
				return
			}
			for first := true; first || ctx.Err() == nil; first = false {
				resp, err := hc.Do(req.Clone(ctx))
				if err != nil {
					return // the time is over
				}
				mu.Lock()
				status[resp.StatusCode]++
				mu.Unlock()
				told := io.LimitReader(resp.Body, 1<<20)
				if i%2 == 0 || resp.StatusCode != http.StatusOK {
					told = resp.Body
				}
				b := bytes.Buffer{}
				_, _ = io.Copy(&b, io.LimitReader(told, 64<<10)) // over when the time is
				if resp.StatusCode != http.StatusOK && !strings.Contains(b.String(), "answers_full") {
					t.Errorf("%s: status %d: %.300s", req.URL, resp.StatusCode, &b)
				}
				_, _ = io.Copy(io.Discard, told)
				if i%2 == 1 && resp.StatusCode == http.StatusOK {
					<-ctx.Done() // a reader that sleeps
				}
				_ = resp.Body.Close()
				if req.Method == http.MethodPost {
					return
				}
			}
		})
	}
	times := execTimes(t, d, beside.ID, harness.Soak(30, 300))
	<-ctx.Done()
	peak := peakMemory(t, d.PID())
	wg.Wait()
	t.Logf("daemon at most %d MiB; answers by status %v; a neighbour's exec: calm median %v p99 %v, besides median %v p99 %v",
		peak>>20, status, at(calm, 50), at(calm, 99), at(times, 50), at(times, 99))
	if peak > mostDaemon {
		t.Errorf("the daemon took %d MiB, more than %d", peak>>20, mostDaemon>>20)
	}
}

func get(url, accept string) func() (*http.Request, error) {
	return func() (*http.Request, error) {
		req, err := http.NewRequest(http.MethodGet, url, nil)
		if err == nil && accept != "" {
			req.Header.Set("Accept", accept)
		}
		return req, err
	}
}

func post(url, body string) func() (*http.Request, error) {
	return func() (*http.Request, error) {
		req, err := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
		if err == nil {
			req.Header.Set("Content-Type", "application/json")
		}
		return req, err
	}
}

// peakMemory is the most a process ever had resident, in bytes.
func peakMemory(t *testing.T, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if text, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(text)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

// execTimes runs a command n times and returns how long each took, sorted.
func execTimes(t *testing.T, d *harness.Daemon, id sandbox.ID, n int) []time.Duration {
	t.Helper()
	var out []time.Duration
	for range n {
		begin := time.Now()
		if r := d.Command(t, string(id), "true"); r.Exit.Code != 0 {
			t.Fatalf("true: exit %d", r.Exit.Code)
		}
		out = append(out, time.Since(begin))
	}
	slices.Sort(out)
	return out
}

func at(sorted []time.Duration, percent int) time.Duration {
	return sorted[(len(sorted)-1)*percent/100].Round(time.Millisecond / 10)
}
