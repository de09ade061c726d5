package main

import (
	"os"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/sandbox"
)

// checkQueues tells whether rates and faults can be had.
func checkQueues() sandbox.Check {
	const name = "network rates"
	missing, err := netns.QueueKinds()
	switch {
	case err != nil:
		return warn(name, err.Error(), "")
	case slices.Contains(missing, "tbf"):
		return warn(name, "this kernel has no tbf: sandboxes with --net-rate cannot be made", "modprobe sch_tbf, or boot a kernel with CONFIG_NET_SCH_TBF")
	case slices.Contains(missing, "netem"):
		return warn(name, "rates hold; this kernel has no netem: 'sandbox net fault' can cut a network and slow it, but not delay or lose packets",
			"modprobe sch_netem, or boot a kernel with CONFIG_NET_SCH_NETEM")
	case len(missing) > 0:
		return ok(name, "rates and faults; without "+strings.Join(missing, ", ")+" all flows of a limited sandbox share one queue")
	}
	return ok(name, "rates and faults; one queue for each flow")
}

// checkFirewall finds rules of the host's own that stop sandboxes.
func checkFirewall() sandbox.Check {
	const name = "host firewall"
	found, err := netns.Obstacles()
	if err != nil {
		return warn(name, err.Error(), "")
	}
	var where, mend []string
	for _, o := range found {
		where = append(where, "chain "+o.Chain+" of table "+o.Family+" "+o.Table)
		mend = append(mend, o.Accept()...)
	}
	if len(found) > 0 {
		return warn(name, "drops what is forwarded for sandboxes, so that none reaches anything: "+strings.Join(where, "; "),
			strings.Join(mend, "; ")+" (and keep them where your firewall is configured)")
	}
	if b, err := os.ReadFile("/proc/net/ip_tables_names"); err == nil && strings.Contains(string(b), "filter") {
		return ok(name, "no nf_tables rule stops sandboxes; there are old iptables rules as well: see 'iptables-legacy -S FORWARD'")
	}
	return ok(name, "lets sandboxes through")
}
