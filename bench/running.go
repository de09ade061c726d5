package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/bench/peer"
	"github.com/sandboxd/sandboxd/bench/report"
	"github.com/sandboxd/sandboxd/sandbox"
)

// cli names our command line where it takes part beside the API.
const cli = report.Us + " cli"

// containers starts an idle container of runc and crun, and returns them with
// what removes them.
func (b *bench) containers(ctx context.Context, id string) ([]*peer.OCI, func() error, error) {
	both := []*peer.OCI{b.runc, b.crun}
	remove := func() error {
		var errs []error
		for _, p := range both {
			errs = append(errs, p.Delete(context.WithoutCancel(ctx), id).Run())
		}
		return errors.Join(errs...)
	}
	for _, p := range both {
		if err := p.Prepare(id, forever...); err != nil {
			return nil, nil, err
		}
		if err := p.Start(ctx, id); err != nil {
			return nil, nil, errors.Join(err, remove())
		}
	}
	return both, remove, nil
}

// ran times a command from its start until it was waited for.
func (b *bench) ran(cmd *exec.Cmd) (float64, error) {
	start := time.Now()
	err := cmd.Run()
	took := millis(start)
	if err != nil {
		return 0, fmt.Errorf("%q: %w; it says: %s", cmd.Args, err, b.peerSaid())
	}
	return took, nil
}

// execTrue runs /bin/true in sandboxes that are there.
func execTrue(ctx context.Context, b *bench) (err error) {
	d, err := b.ours(ctx, warmPool)
	if err != nil {
		return err
	}
	id, remove, err := d.inUse(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	oci, removePeers, err := b.containers(ctx, "exec")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, removePeers()) }()
	nop := []string{"/bin/true"}
	cs := []contestant{
		{report.Floor, func(ctx context.Context) (float64, error) { return b.ran(b.onHost(ctx, nop...)) }},
		{report.Us, func(ctx context.Context) (float64, error) {
			start := time.Now()
			p, err := d.Exec(ctx, id, sandbox.ProcessSpec{Argv: nop})
			if err != nil {
				return 0, err
			}
			_, err = drain(p)
			return millis(start), err
		}},
		{cli, func(ctx context.Context) (float64, error) {
			return b.ran(exec.CommandContext(ctx, filepath.Join(b.bin, "sandbox"), "--host", d.socket, "exec", id, "--", nop[0]))
		}},
	}
	for _, p := range oci {
		cs = append(cs, contestant{p.Name(), func(ctx context.Context) (float64, error) {
			return b.ran(p.Exec(ctx, "exec", nop...))
		}})
	}
	return b.rounds(ctx, setting{
		name: "exec", title: "exec of /bin/true to its end", unit: "ms",
		note: "host: fork, exec and wait of the same program",
	}, b.plan.exec, b.plan.warmUp, b.settled, cs...)
}

// destroy removes a running, idle sandbox: the time of the request.
func destroy(ctx context.Context, b *bench) error {
	d, err := b.ours(ctx, warmPool)
	if err != nil {
		return err
	}
	cs := []contestant{{report.Us, func(ctx context.Context) (float64, error) {
		id, _, err := d.inUse(ctx)
		if err != nil {
			return 0, err
		}
		if err := b.settled(ctx); err != nil {
			return 0, err
		}
		start := time.Now()
		_, err = d.Remove(ctx, id)
		return millis(start), err
	}}}
	for _, p := range []*peer.OCI{b.runc, b.crun} {
		if err := p.Prepare("gone", forever...); err != nil {
			return err
		}
		cs = append(cs, contestant{p.Name(), func(ctx context.Context) (float64, error) {
			if err := errors.Join(p.Start(ctx, "gone"), b.settled(ctx)); err != nil {
				return 0, err
			}
			return b.ran(p.Delete(ctx, "gone"))
		}})
	}
	return b.rounds(ctx, setting{
		name: "destroy", title: "removal of a running sandbox", unit: "ms",
		note: "sandboxd: the DELETE request; peers: delete --force",
	}, b.plan.destroy, b.plan.warmUp, b.settled, cs...)
}

// reset gives a sandbox its first files again, and checks that it did.
func reset(ctx context.Context, b *bench) (err error) {
	d, err := b.ours(ctx, warmPool)
	if err != nil {
		return err
	}
	web := d.raw()
	has, err := hasReset(ctx, web)
	if err != nil {
		return err
	}
	if !has {
		fmt.Fprint(b.out, "not available yet: this daemon's API has no reset ")
		b.rep.Skipped = append(b.rep.Skipped, report.Skip{Scenario: "reset", Why: "not available yet: this daemon's API has no reset"})
		return nil
	}
	id, remove, err := d.inUse(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	return b.rounds(ctx, setting{name: "reset", title: "reset of a sandbox with a changed file", unit: "ms"},
		b.plan.reset, b.plan.warmUp, b.settled, contestant{report.Us, func(ctx context.Context) (float64, error) {
			if _, err := d.Files(id).Write(ctx, "", "/root/changed", 0o600, strings.NewReader("changed")); err != nil {
				return 0, err
			}
			start := time.Now()
			err := post(ctx, web, "/v1/sandboxes/"+id+"/reset")
			took := millis(start)
			if err != nil {
				return 0, err
			}
			_, err = d.Files(id).Stat(ctx, "", "/root/changed")
			switch {
			case err == nil:
				return 0, errors.New("the changed file outlived the reset")
			case !errors.Is(err, sandbox.ErrNotFound):
				return 0, err
			}
			return took, nil
		}})
}

// raw returns an HTTP client of the daemon, for what the SDK does not know.
func (d *daemon) raw() *http.Client {
	path := strings.TrimPrefix(d.socket, "unix://")
	return &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}}
}

// hasReset reads the API's own description.
func hasReset(ctx context.Context, c *http.Client) (bool, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandboxd/openapi.json", http.NoBody)
	if err != nil {
		return false, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return false, fmt.Errorf("ask for the API's description: %w", err)
	}
	defer resp.Body.Close()
	var doc struct {
		Paths map[string]json.RawMessage `json:"paths"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&doc); err != nil {
		return false, fmt.Errorf("read the API's description: %w", err)
	}
	if len(doc.Paths) == 0 {
		return false, errors.New("the API's description names no path")
	}
	for path := range doc.Paths {
		if strings.HasPrefix(path, "/v1/sandboxes/") && strings.HasSuffix(path, "/reset") {
			return true, nil
		}
	}
	return false, nil
}

func post(ctx context.Context, c *http.Client, path string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandboxd"+path, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("POST %s: %s: %s", path, resp.Status, bytes.TrimSpace(body))
	}
	return err
}
