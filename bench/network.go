package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/bench/report"
	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The contestants of the network scenarios besides us.
const (
	ruled  = report.Us + " 20 rules"
	veth   = "veth"
	router = "router"
	masq   = "router that masquerades"
)

// twentyRules are what a careful person might write down for an agent.
func twentyRules() sandbox.NetworkPolicy {
	p := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow}
	for i := range 15 {
		p.Allow = append(p.Allow, fmt.Sprintf("151.%d.0.0/16:80,443,%d-%d/tcp", 101+i, 8000+i, 8100+i))
	}
	p.Allow = append(p.Allow, "8.8.4.4", "93.184.216.0/24:5201", "*.example.com:443")
	p.Deny = []string{"151.101.65.69", "151.102.0.0/24:443"}
	return p
}

// network creates sandboxes with rules beside many that have as many, and in
// turns others that have none.
func network(ctx context.Context, b *bench) error {
	d, err := b.restart(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	crowd := b.plan.netCrowd
	with := sandbox.Spec{Image: imageName, Network: twentyRules()}
	without := sandbox.Spec{Image: imageName, Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}}
	for _, n := range []int{0, crowd} {
		if err := each(4, make([]struct{}, n), func(struct{}) error {
			_, err := d.Create(ctx, with, "")
			return err
		}); err != nil {
			return fmt.Errorf("make %d sandboxes with rules: %w", n, err)
		}
		b.owes = true
		err := b.rounds(ctx, setting{
			name: "network-" + strconv.Itoa(n), title: fmt.Sprintf("new sandbox with a network → first byte of echo, beside %d with 20 rules each", n), unit: "ms",
			note: report.Us + ": mode open without rules; " + ruled + ": mode allow, 15 ranges of ports, 2 hosts, a name, 2 denials",
		}, b.plan.network, b.plan.warmUp, b.settled,
			contestant{report.Us, func(ctx context.Context) (float64, error) { return d.createOf(ctx, without) }},
			contestant{ruled, func(ctx context.Context) (float64, error) { return d.createOf(ctx, with) }})
		if err != nil {
			return err
		}
	}
	return b.allRun(ctx, d, crowd)
}

// ruledOver is how many times the time without rules a sandbox with rules
// takes, in the largest crowd of the run.
func ruledOver(r *report.Report) (float64, bool) {
	for _, crowd := range []int{full.netCrowd, quick.netCrowd, emulation.netCrowd} {
		if v, ok := r.Times("network-"+strconv.Itoa(crowd), report.Us, ruled); ok {
			return v, true
		}
	}
	return 0, false
}

// wire is a way from one network namespace to an address in another.
type wire struct {
	from, to *os.File
	addr     string
	between  *os.File // the router's namespace
}

// forward sends TCP through a sandbox's link, the host's rules and the uplink,
// and beside it through a pair of links, and through two with a router between.
func forward(ctx context.Context, b *bench) (err error) {
	// The uplink must be there before the daemon looks for it.
	far, err := namespace(ctx)
	if err != nil {
		return err
	}
	defer far.Close()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer home.Close()
	if err := joinNamespaces(ctx, home, "bnup0", "93.184.216.1/24", far, "93.184.216.254/24"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, command(context.WithoutCancel(ctx), "ip", "link", "del", "bnup0")) }()
	if err := command(ctx, "ip", "route", "replace", "default", "via", "93.184.216.254"); err != nil {
		return err
	}
	d, err := b.restart(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	wires := map[string]wire{}
	const free, limited = "free", "limited" // they flood
	for name, policy := range map[string]sandbox.NetworkPolicy{
		report.Us: {Mode: sandbox.NetworkOpen}, ruled: twentyRules(), free: {Mode: sandbox.NetworkOpen},
		limited: {Mode: sandbox.NetworkOpen, Limits: sandbox.NetworkLimits{EgressBPS: 50e6, IngressBPS: 50e6}},
	} {
		sb, err := d.Create(ctx, sandbox.Spec{Image: imageName, Network: policy}, "")
		if err != nil {
			return fmt.Errorf("create: %w", err)
		}
		ns, err := os.Open(filepath.Join("/proc", strconv.Itoa(sb.InitPID), "ns/net"))
		if err != nil {
			return err
		}
		defer ns.Close()
		wires[name] = wire{from: ns, to: far, addr: "93.184.216.254:5201"}
	}
	peers, err := plainWires(ctx)
	for _, w := range peers {
		defer w.from.Close()
		defer w.to.Close()
		defer w.between.Close()
	}
	if err != nil {
		return err
	}
	cs := []contestant{}
	for _, name := range []string{report.Us, ruled, veth, router, masq} {
		w, ok := wires[name]
		if !ok {
			w = peers[name]
		}
		cs = append(cs, contestant{name, func(ctx context.Context) (float64, error) { return w.stream(ctx, b.plan.netSlice) }})
	}
	err = b.rounds(ctx, setting{
		name: "forward", title: "TCP out of a sandbox, one stream", unit: "MB/s", more: true,
		note: veth + ": one pair of links between two namespaces; " + router + ": two pairs, and a namespace without any rule that forwards; " + masq + ": one rule there, which gives the sender the router's address",
	}, b.plan.netRounds, 1, b.settled, cs...)
	if err == nil {
		err = b.neighbour(ctx, wires[report.Us], wires[free], wires[limited])
	}
	return errors.Join(err, d.removeAll(ctx))
}

// plainWires makes what a sandbox's way is compared with.
func plainWires(ctx context.Context) (map[string]wire, error) {
	var ns [8]*os.File
	for i := range ns {
		var err error
		if ns[i], err = namespace(ctx); err != nil {
			return nil, err
		}
	}
	wires := map[string]wire{
		veth: {ns[0], ns[1], "10.91.0.2:5201", nil}, router: {ns[2], ns[4], "10.93.0.2:5201", ns[3]}, masq: {ns[5], ns[7], "10.95.0.2:5201", ns[6]},
	}
	err := errors.Join(
		joinNamespaces(ctx, ns[0], "net0", "10.91.0.1/24", ns[1], "10.91.0.2/24"),
		joinNamespaces(ctx, ns[2], "net0", "10.92.0.1/24", ns[3], "10.92.0.2/24"),
		joinNamespaces(ctx, ns[3], "net1", "10.93.0.1/24", ns[4], "10.93.0.2/24"),
		linux.InNetNS(ns[2], func() error { return command(ctx, "ip", "route", "add", "default", "via", "10.92.0.2") }),
		linux.InNetNS(ns[4], func() error { return command(ctx, "ip", "route", "add", "default", "via", "10.93.0.1") }),
		linux.InNetNS(ns[3], func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }),
		joinNamespaces(ctx, ns[5], "net0", "10.94.0.1/24", ns[6], "10.94.0.2/24"),
		joinNamespaces(ctx, ns[6], "net1", "10.95.0.1/24", ns[7], "10.95.0.2/24"),
		linux.InNetNS(ns[5], func() error { return command(ctx, "ip", "route", "add", "default", "via", "10.94.0.2") }),
		linux.InNetNS(ns[6], func() error {
			return errors.Join(
				os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
				command(ctx, "nft", "add table ip bench; add chain ip bench post { type nat hook postrouting priority 100; }; add rule ip bench post oifname net1 masquerade"),
			)
		}),
	)
	return wires, err
}

// namespace makes an empty network namespace. Another process does, as a thread
// of this one would have to be thrown away, and the daemon ends with the thread
// that started it.
func namespace(ctx context.Context) (*os.File, error) {
	maker := exec.CommandContext(ctx, "unshare", "--net", "--", "sh", "-c", "echo made; read end")
	in, err := maker.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := maker.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := maker.Start(); err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	_, err = out.Read(make([]byte, 1))
	ns, oerr := os.Open(filepath.Join("/proc", strconv.Itoa(maker.Process.Pid), "ns/net"))
	_ = in.Close()
	_ = maker.Wait() // read found no line
	return ns, errors.Join(err, oerr)
}

// joinNamespaces makes a pair of links between two namespaces; in the second it
// is called net0.
func joinNamespaces(ctx context.Context, a *os.File, linkA, cidrA string, z *os.File, cidrZ string) error {
	const linkZ = "net0"
	add := exec.CommandContext(ctx, "ip", "link", "add", linkA, "type", "veth", "peer", "name", linkZ, "netns", "/proc/self/fd/3")
	add.ExtraFiles = []*os.File{z}
	raise := func(link, cidr string) func() error {
		return func() error {
			return errors.Join(command(ctx, "ip", "addr", "add", cidr, "dev", link), command(ctx, "ip", "link", "set", link, "up"))
		}
	}
	return errors.Join(
		linux.InNetNS(a, func() error {
			if out, err := add.CombinedOutput(); err != nil {
				return fmt.Errorf("%q: %w: %s", add.Args, err, out)
			}
			return nil
		}),
		linux.InNetNS(a, raise(linkA, cidrA)), linux.InNetNS(z, raise(linkZ, cidrZ)),
	)
}

// connect opens a connection over the wire: its two ends.
func (w wire) connect(ctx context.Context) (near, far net.Conn, err error) {
	var l net.Listener
	if err := linux.InNetNS(w.to, func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", w.addr)
		return err
	}); err != nil {
		return nil, nil, err
	}
	defer l.Close()
	if err := linux.InNetNS(w.from, func() (err error) {
		near, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp4", w.addr)
		return err
	}); err != nil {
		return nil, nil, err
	}
	far, err = l.Accept()
	if err != nil {
		near.Close()
	}
	return near, far, err
}

// stream sends for a while and returns how much arrived a second, in MB.
func (w wire) stream(ctx context.Context, length time.Duration) (float64, error) {
	c, far, err := w.connect(ctx)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	defer far.Close()
	sent := make(chan error, 1)
	start := time.Now()
	go func() {
		block := make([]byte, 256<<10)
		for time.Since(start) < length && ctx.Err() == nil {
			if _, err := c.Write(block); err != nil {
				sent <- err
				return
			}
		}
		sent <- c.Close()
	}()
	buf := make([]byte, 256<<10)
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{far}, buf)
	took := time.Since(start).Seconds()
	return float64(n) / 1e6 / took, errors.Join(err, <-sent, ctx.Err())
}
