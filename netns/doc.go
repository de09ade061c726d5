// Package netns is the networking of sandboxes: routed veth links, addresses,
// and the nf_tables policy that keeps a sandbox from everything it may not
// reach. The runtime package calls it, with the network namespaces the shells
// live in; it works in the network namespace of the daemon.
//
// It does not make network namespaces, keeps nothing on disk, resolves no
// names, and shapes no rates.
//
// # The wire
//
// An open sandbox has one veth pair: "v" and its ID on the host, eth0 inside,
// made inside from the start. There is no bridge and no ARP: each end knows the
// other's link address beforehand (both follow from the slot), the host's end
// answers none, the sandbox's address is a /32 and its only route leads through
// the gateway, the pool's first address. That address lives on the host's
// loopback in host scope; it is the source of what the host itself says to a
// sandbox (rejections, forwarded ports), and closed to sandboxes like every
// other address of the host's. IPv6 is off on both ends and dropped besides;
// inside, only loopback has it.
//
// A sandbox whose policy is off has no link at all, only loopback. That is the
// least a hostile sandbox can touch, the cheapest to make and to remove (half
// of a namespace's teardown is its link), and it makes a connect fail at once
// instead of timing out. Opening it later costs what it would have cost at
// first: SetPolicy makes the link then. Closing it again leaves the link, and
// the rules refuse everything.
//
// # Forwarding
//
// The global switch net.ipv4.ip_forward stays as it is. The kernel asks the
// interface a packet comes in by whether it forwards: each sandbox's link does,
// and so must the uplink, for the answers; it is switched on when the first
// sandbox opens, and follows the default route. An uplink that we switched on
// stands in the set uplinks, and the rules drop what comes in there for
// networks other than the sandboxes', so that the host is no more a router than
// before. Once the operator turns the global switch on, that set is emptied.
//
// # Rules
//
// One table, changed in-process, each change one transaction. Everything of a
// single sandbox is a set element, so a packet's way does not grow with the
// number of sandboxes. Rules match links by the beginning of their name: a link
// without any element is denied everything, so there is no unguarded moment.
// No verdict relies on a connection having been permitted before: a policy
// change cuts what is open. Counters are IP bytes and belong to elements, which
// outlive the link and the daemon.
//
// A TCP socket that outlives its killed process, waiting for its last bytes to
// be acknowledged, keeps a network namespace alive for more than a minute. So
// a detached link, known by having no counters, has its TCP answered by resets:
// such sockets end at their next retransmission, and the namespace with them.
//
// Coexistence with a host firewall: each base chain accepts what is not ours.
// In netfilter a packet must be accepted by every table, so a host firewall
// whose forward chain drops by default must let our links through (nft:
// iifname "vsb*" accept, oifname "vsb*" accept). It can never open what this
// table drops. If someone empties the whole ruleset, sandboxes are unguarded
// until the table is made again, at the next change or within two seconds.
//
// This is the table, without elements:
//
//	table inet sandboxd {
//	  set sources { type ifname . ipv4_addr }
//	    # each link with the one address it may send from
//	  set open { type ifname }
//	    # links whose policy is open
//	  set sent { type ifname; counter }
//	    # packets and bytes a sandbox sent and we let through
//	  set received { type ifname; counter }
//	    # packets and bytes a sandbox received
//	  set dropped { type ifname; counter }
//	    # packets refused by policy
//	  set flows { type ifname; flags dynamic }
//	    # links with their tracked connections
//	  set private { type ipv4_addr; flags interval }
//	    # ranges that are not the public internet
//	  set uplinks { type ifname }
//	    # interfaces the daemon made forward
//	  chain refused { # from a sandbox, without an answer
//	    iifname @dropped drop
//	    drop
//	  }
//	  chain prohibited { # from a sandbox, told so at once: a connect fails instead of hanging
//	    iifname @dropped reject with icmpx type admin-prohibited
//	    drop
//	  }
//	  chain unasked { # to a sandbox that did not ask
//	    oifname @dropped drop
//	    drop
//	  }
//	  chain sent { # let out and counted
//	    iifname @sent accept
//	    goto refused
//	  }
//	  chain received { # let in and counted
//	    oifname @received accept
//	    drop
//	  }
//	  chain outbound { # sandbox to anywhere but the host
//	    oifname "vsb*" goto prohibited
//	    iifname != @open goto prohibited
//	    ip daddr @private goto prohibited
//	    goto sent
//	  }
//	  chain inbound { # anywhere but the host to a sandbox: answers only
//	    oifname != @open goto unasked
//	    ct direction reply ct state established goto received
//	    ct direction reply ct state related meta l4proto icmp goto received
//	    goto unasked
//	  }
//	  chain source { # IPv6 and forged sources end here
//	    type filter hook prerouting priority -300; policy accept;
//	    iifname != "vsb*" return
//	    meta nfproto != ipv4 goto refused
//	    iifname . ip saddr @sources return
//	    iifname != @dropped meta l4proto tcp reject with tcp reset
//	    goto refused
//	  }
//	  chain local { # the host's addresses, before any NAT can hide them
//	    type filter hook prerouting priority -150; policy accept;
//	    iifname != "vsb*" return
//	    ct state invalid,untracked goto refused
//	    ct state new fib daddr type != unicast goto refused
//	    ct state new add @flows { iifname ct count over 8192 } goto refused
//	  }
//	  chain input { # sandbox to host: only answers to what the host began
//	    type filter hook input priority -10; policy accept;
//	    iifname != "vsb*" return
//	    ct direction reply ct state established,related iifname @sent accept
//	    goto refused
//	  }
//	  chain forward { # through the host
//	    type filter hook forward priority -10; policy accept;
//	    iifname "vsb*" goto outbound
//	    oifname "vsb*" goto inbound
//	    iifname @uplinks drop
//	  }
//	  chain output { # host to sandbox: counted
//	    type filter hook output priority -10; policy accept;
//	    oifname != "vsb*" return
//	    oifname @received accept
//	  }
//	  chain masquerade { # leave with the host's address
//	    type nat hook postrouting priority 100; policy accept;
//	    iifname "vsb*" oifname != "vsb*" masquerade
//	  }
//	}
package netns
