//go:build root

package netns

import (
	"os/exec"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// sh runs a command of the host's.
func sh(t testing.TB, script string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// TestBesideAnotherFirewall: one that drops what it does not know is seen, and
// the commands named for it let sandboxes through, and no more than that.
func TestBesideAnotherFirewall(t *testing.T) {
	for name, c := range map[string]struct {
		program, set, remove string
		chain                string
		blocks               bool
	}{
		"nft that drops": {
			"nft", `nft 'table inet host { chain forward { type filter hook forward priority filter; policy drop; ct state established,related accept; iifname "eth7" accept; }; }'`,
			"nft delete table inet host", "forward", true,
		},
		"nft that rejects at the end": {
			"nft", `nft 'table ip host { chain ahead { type filter hook forward priority filter; policy accept; iifname { "lo", "eth7" } accept; counter reject; }; }'`,
			"nft delete table ip host", "ahead", true,
		},
		"Docker": {
			"iptables-nft", `iptables-nft -P FORWARD DROP; iptables-nft -N DOCKER-USER; iptables-nft -A DOCKER-USER -j RETURN; iptables-nft -A FORWARD -j DOCKER-USER
				iptables-nft -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; iptables-nft -A FORWARD -i docker0 ! -o docker0 -j ACCEPT`,
			"iptables-nft -P FORWARD ACCEPT; iptables-nft -F; iptables-nft -X; nft delete table ip filter", "FORWARD", true,
		},
		"a firewall that drops something else": {
			"nft", `nft 'table inet host { chain forward { type filter hook forward priority filter; policy accept; iifname "eth7" drop; tcp dport 25 drop; }; chain in { type filter hook input priority filter; policy drop; iifname "lo" accept; }; }'`,
			"nft delete table inet host", "", false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := exec.LookPath(c.program); err != nil {
				t.Fatalf("%s is needed: apt-get install nftables iptables", c.program)
			}
			newWorld(t)
			h := openHost(t, Config{})
			b := newBox(t, 1, sandbox.NetworkOpen)
			attach(t, h, b)
			reaches(t, b, "tcp4", publicAddr+":80")
			sh(t, c.set)
			defer func() { sh(t, c.remove) }()
			found, err := Obstacles()
			must(t, err)
			if !c.blocks {
				if len(found) > 0 {
					t.Errorf("found %+v", found)
				}
				reaches(t, b, "tcp4", publicAddr+":80")
				return
			}
			denied(t, b, "tcp4", publicAddr+":80")
			if len(found) != 1 || found[0].Chain != c.chain {
				t.Fatalf("found %+v, want chain %s", found, c.chain)
			}
			for _, command := range found[0].Accept() {
				sh(t, command)
			}
			reaches(t, b, "tcp4", publicAddr+":80")
			reaches(t, b, "udp4", publicAddr+":99")
			denied(t, b, "tcp4", privateAddr+":80") // it can open nothing that is closed here
			if left, err := Obstacles(); err != nil || len(left) > 0 {
				t.Errorf("with the rules in place: %+v, %v", left, err)
			}
		})
	}
}
