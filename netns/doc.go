// Package netns is the networking of sandboxes: routed veth links, addresses,
// and the nf_tables policy that keeps a sandbox from everything it may not
// reach. The runtime package calls it, with the network namespaces the shells
// live in; it works in the network namespace of the daemon.
//
// It does not make network namespaces, keeps nothing on disk, resolves no
// names, and looks into no connection.
//
// # The wire
//
// An open sandbox has one veth pair: "v" and its ID on the host, eth0 inside,
// made inside from the start. There is no bridge and no ARP: each end knows the
// other's link address beforehand (both follow from the slot), the host's end
// answers none, the sandbox's address is a /32 and its only route leads through
// the gateway, the pool's first address. That address lives on the host's
// loopback in host scope; it is the source of what the host itself says to a
// sandbox (rejections, forwarded ports). Of it port 53 is open to sandboxes,
// which leads to the daemon's resolver; it is closed otherwise, like every
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
// sandbox opens, and follows the default route and those to admitted ranges. An
// uplink that we switched on stands in the set uplinks, and the rules drop what
// comes in there for networks other than the sandboxes', so that the host is no
// more a router than before. Once the operator turns the global switch on, that
// set is emptied.
//
// # Policies
//
// A new flow is judged by what it was begun with (ct original), in this order:
// what the operator denies or has not admitted of the private ranges, and ports
// 53 and 853, where names are asked for past the daemon, are prohibited; so is
// web traffic of a gated link that did not go to the gate; then what the
// sandbox's deny list means; what its allow list means, or is pinned, may pass;
// the public internet may in mode open; nothing else may. Between sandboxes
// only the group decides, and the deny list of who begins.
//
// Domain rules are addresses by the time the kernel sees them: the resolver
// pins what it answers, for as long as it says, before it answers.
//
// Flows that were granted carry the mark of the policy that did it, and pass by
// one look into the set granted; the mark's first bit says that the policy does
// not limit packets, and spares a look at the link's limits. A change of policy
// swaps the mark there: each later packet of an old flow, from either end, is
// judged anew by the same rules. So what is still permitted goes on, and what is
// not ends with its next packet: TCP with a reset. The mark follows from the
// policy alone: a daemon's restart changes nothing for flows, pins and counters.
//
// # Rates and faults
//
// A limit on bits per second is a token bucket (tbf) on one end of the link:
// the host's for what goes in, eth0's for what comes out, where nobody inside
// may change it (that takes CAP_NET_ADMIN). It counts whole frames, holds some
// 50 ms of them, and in it each flow has a queue of its own where the kernel has
// fq_codel. A link without a limit has no queue at all. A changed limit changes
// the bucket in place.
//
// Faults are for tests: netem on both ends for latency and loss, a smaller
// bucket for a rate, blackhole queues for a partition. They are in the kernel
// alone: Detach ends them with the link, and Recover ends what an earlier
// daemon left, known by the numbers of its queues.
//
// # Rules
//
// One table, changed in-process, each time in one transaction. What can be a set
// element is one, so that neither a packet's way nor a new sandbox's grows with
// the number of sandboxes. A chain of its own has only a link with limits,
// limit-LINK-GENERATION, which is reached by a map with the link's name. Rules
// match links by the beginning of their name: a link without any element is
// denied everything, so there is no unguarded moment. Counters are IP packets
// and bytes and belong to elements, which outlive the link and the daemon.
//
// Lists of addresses and ports are on 128 shelves, which the links share: sets
// and chains of each link's own would make a new sandbox wait for the kernel to
// walk through all others', and one set for all would be copied at each change.
// Keys there begin with the link and the mark of its policy, so that lists come
// into force with the mark. On a shelf are two sets of intervals, as the ends of
// an interval can differ in the last field only: in places-… an address of a
// list has its place, which stands for all with the same ports, and ports-… has
// the ports of each place. To nft the keys of intervals are numbers. What names
// have is looked up in pins and, of connections that exist, in past, where a
// change of policy puts the addresses that names had before.
//
// The first packet of a flow let out, and what is refused, go to the kernel's
// packet log as far as the link's allowance reaches; the daemon reads it and
// tells. No packet waits for that, and no counter depends on it.
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
// This is the table, without elements, and with one shelf of all:
//
//	table inet sandboxd {
//	  set sources { type ifname . ipv4_addr }
//	    # each link with the one address it may send from
//	  set connected { type ifname }
//	    # links whose policy is not off
//	  set open { type ifname }
//	    # links whose policy is open
//	  set gated { type ifname }
//	    # links whose web traffic goes through the daemon's gate
//	  map generations { type ifname : mark }
//	    # the mark of each link's policy
//	  set granted { type ifname . mark }
//	    # links with the mark of flows that their present policy granted
//	  map limited { type ifname : verdict }
//	    # links with limits of their own
//	  map groups { type ifname : mark }
//	    # links that share a network
//	  set members { type mark . ipv4_addr }
//	    # the addresses in each shared network
//	  set sent { type ifname; counter }
//	    # packets and bytes a sandbox sent and we let through
//	  set received { type ifname; counter }
//	    # packets and bytes a sandbox received
//	  set dropped { type ifname; counter }
//	    # packets refused by policy
//	  set flows { type ifname; flags dynamic }
//	    # links with their tracked connections
//	  set asks { type ifname; flags timeout; flags dynamic }
//	    # what links may still ask the daemon's resolver
//	  set closed { type ipv4_addr; flags interval }
//	    # ranges that no sandbox reaches
//	  set private { type ipv4_addr; flags interval }
//	    # ranges that are not the public internet
//	  set names { type inet_proto . inet_service }
//	    # where names are asked for: not past the daemon
//	  set web { type inet_proto . inet_service }
//	    # where the web is
//	  set doors { type ipv4_addr . inet_proto . inet_service }
//	    # what of the host is open to sandboxes
//	  map services { type inet_proto . inet_service : inet_service }
//	    # the ports of the gateway, and where their services listen
//	  set resolver { type ipv4_addr . inet_proto . inet_service }
//	    # where the daemon's resolver listens
//	  map gates { type inet_proto . inet_service : inet_service }
//	    # the ports of the web, and where the gate listens
//	  set gate { type ipv4_addr . inet_proto . inet_service }
//	    # where the gate listens
//	  set told_granted { type ifname; flags timeout; flags dynamic }
//	    # what links may still tell of flows let out
//	  set told_refused { type ifname; flags timeout; flags dynamic }
//	    # what links may still tell of packets refused
//	  set uplinks { type ifname }
//	    # interfaces the daemon made forward
//	  set installation { type mark }
//	    # whose sandboxes these are, as a comment
//	  map shelves { type ifname : mark }
//	    # links with lists, and where those are
//	  map classes { type integer : inet_service; flags interval }
//	    # ranges of ports that names are allowed on: link, policy, protocol, port
//	  set pins { type ifname . mark . inet_proto . inet_service . ipv4_addr; flags timeout }
//	    # what allowed names have now
//	  set past { type ifname . mark . inet_proto . inet_service . ipv4_addr; flags timeout }
//	    # what they had before a change of policy, for connections that exist
//	  map places-00 { type integer : mark; flags interval }
//	    # places of addresses: link, policy, list, address
//	  set ports-00 { type integer; flags interval }
//	    # what lists mean there: link, policy, place, protocol, port
//	  map shelves_out { type mark : verdict }
//	    # the lists on each shelf, for what a sandbox sends
//	  map shelves_in { type mark : verdict }
//	    # the same for what it receives
//	  chain unasked { # to a sandbox that did not ask
//	    oifname != @dropped drop
//	    add @told_refused { oifname timeout 1m limit rate 20/second burst 100 packets } log group 23474 snaplen 128
//	    oifname @dropped drop
//	    drop
//	  }
//	  chain refused { # from a sandbox, without an answer
//	    iifname != @dropped drop
//	    add @told_refused { iifname timeout 1m limit rate 20/second burst 100 packets } log group 23474 snaplen 128
//	    iifname @dropped drop
//	    drop
//	  }
//	  chain prohibited { # from a sandbox, told so at once: a connect fails instead of hanging, a connection ends
//	    iifname != "vsb*" goto unasked
//	    iifname != @dropped drop
//	    add @told_refused { iifname timeout 1m limit rate 20/second burst 100 packets } log group 23474 snaplen 128
//	    tcp flags & syn == 0 iifname @dropped reject with tcp reset
//	    iifname @dropped reject with icmpx type admin-prohibited
//	    drop
//	  }
//	  chain sends-00 { # what a list means, or whatever follows
//	    (iifname . iifname map @generations . 1 . ct original ip daddr) map @places-00 . ct protocol . ct original proto-dst @ports-00 goto prohibited
//	    (iifname . iifname map @generations . 2 . ct original ip daddr) map @places-00 . ct protocol . ct original proto-dst @ports-00 goto passed
//	  }
//	  chain receives-00 { # what a list means, or whatever follows
//	    (oifname . oifname map @generations . 1 . ct original ip daddr) map @places-00 . ct protocol . ct original proto-dst @ports-00 goto prohibited
//	    (oifname . oifname map @generations . 2 . ct original ip daddr) map @places-00 . ct protocol . ct original proto-dst @ports-00 goto passed
//	  }
//	  chain outbound { # sandbox to anywhere but the host
//	    oifname "vsb*" goto between
//	    ct state established iifname . ct mark @granted iifname @sent accept
//	    ct state established,new iifname . ct mark @granted goto passed
//	    ip daddr @closed goto prohibited
//	    ct original ip daddr @closed goto prohibited
//	    ct protocol . ct original proto-dst @names goto prohibited
//	    iifname @gated ct protocol . ct original proto-dst @web goto prohibited
//	    iifname map @shelves vmap @shelves_out
//	    iifname . iifname map @generations . ct protocol . ct original proto-dst . ct original ip daddr @pins goto passed
//	    iifname . iifname map @generations . ct protocol . 0 . ct original ip daddr @pins goto passed
//	    iifname . iifname map @generations . 0 . 0 . ct original ip daddr @pins goto passed
//	    iifname . iifname map @generations . 255 . ct protocol . ct original proto-dst map @classes . ct original ip daddr @pins goto passed
//	    ct state established iifname . iifname map @generations . ct protocol . ct original proto-dst . ct original ip daddr @past goto passed
//	    ct state established iifname . iifname map @generations . ct protocol . 0 . ct original ip daddr @past goto passed
//	    ct state established iifname . iifname map @generations . 0 . 0 . ct original ip daddr @past goto passed
//	    ct state established iifname . iifname map @generations . 255 . ct protocol . ct original proto-dst map @classes . ct original ip daddr @past goto passed
//	    iifname != @open goto prohibited
//	    ct original ip daddr @private goto prohibited
//	    goto passed
//	  }
//	  chain between { # sandbox to sandbox: of one group only
//	    iifname map @groups . ip daddr @members goto fellows
//	    goto prohibited
//	  }
//	  chain fellows { # within a group, what who began it does not deny itself
//	    ct direction original iifname map @shelves vmap @shelves_out
//	    ct direction reply oifname map @shelves vmap @shelves_in
//	    goto passed
//	  }
//	  chain inbound { # anywhere but the host to a sandbox: answers only
//	    ct direction reply ct state established oifname . ct mark @granted oifname @received accept
//	    ct direction original goto unasked
//	    ct state established goto answer
//	    ct state related meta l4proto icmp goto answer
//	    goto unasked
//	  }
//	  chain answer { # to what a sandbox began
//	    oifname . ct mark @granted goto passed
//	    ct original ip daddr @closed goto prohibited
//	    ct protocol . ct original proto-dst @names goto prohibited
//	    oifname @gated ct protocol . ct original proto-dst @web goto prohibited
//	    oifname map @shelves vmap @shelves_in
//	    oifname . oifname map @generations . ct protocol . ct original proto-dst . ct original ip daddr @pins goto passed
//	    oifname . oifname map @generations . ct protocol . 0 . ct original ip daddr @pins goto passed
//	    oifname . oifname map @generations . 0 . 0 . ct original ip daddr @pins goto passed
//	    oifname . oifname map @generations . 255 . ct protocol . ct original proto-dst map @classes . ct original ip daddr @pins goto passed
//	    ct state established oifname . oifname map @generations . ct protocol . ct original proto-dst . ct original ip daddr @past goto passed
//	    ct state established oifname . oifname map @generations . ct protocol . 0 . ct original ip daddr @past goto passed
//	    ct state established oifname . oifname map @generations . 0 . 0 . ct original ip daddr @past goto passed
//	    ct state established oifname . oifname map @generations . 255 . ct protocol . ct original proto-dst map @classes . ct original ip daddr @past goto passed
//	    oifname != @open goto prohibited
//	    ct original ip daddr @private goto prohibited
//	    goto passed
//	  }
//	  chain forward { # through the host
//	    type filter hook forward priority -10; policy accept;
//	    iifname "vsb*" goto outbound
//	    oifname "vsb*" goto inbound
//	    iifname @uplinks drop
//	  }
//	  chain passed { # what may pass: counted, and its flow marked as granted
//	    oifname "vsb*" oifname @received
//	    iifname != "vsb*" accept
//	    iifname @sent
//	    ct state new add @told_granted { iifname timeout 1m limit rate 20/second burst 100 packets } log group 23473 snaplen 128
//	    oifname "vsb*" accept
//	    ct mark set iifname map @generations
//	    accept
//	  }
//	  chain masquerade { # leave with the host's address
//	    type nat hook postrouting priority 100; policy accept;
//	    iifname "vsb*" oifname != "vsb*" masquerade
//	  }
//	  chain source { # IPv6 and forged sources end here
//	    type filter hook prerouting priority -300; policy accept;
//	    iifname != "vsb*" return
//	    meta nfproto != ipv4 goto refused
//	    iifname . ip saddr @sources return
//	    iifname != @dropped meta l4proto tcp reject with tcp reset
//	    goto refused
//	  }
//	  chain local { # limits, and the host's addresses before any NAT can hide them
//	    type filter hook prerouting priority -150; policy accept;
//	    iifname != "vsb*" return
//	    ct state established ct mark & 0x80000000 != 0 return
//	    ct state invalid,untracked goto refused
//	    iifname vmap @limited
//	    ct state != new return
//	    add @flows { iifname ct count over 8192 } goto refused
//	    ip daddr . meta l4proto . th dport @doors return
//	    fib daddr type != unicast goto refused
//	  }
//	  chain redirect { # to the daemon's own services
//	    type nat hook prerouting priority -105; policy accept;
//	    iifname != "vsb*" return
//	    ip daddr 10.213.0.1 dnat ip to 10.213.0.1 : meta l4proto . th dport map @services
//	    iifname map @groups . ip daddr @members return
//	    iifname @gated dnat ip to 10.213.0.1 : meta l4proto . th dport map @gates
//	  }
//	  chain input { # sandbox to host: the daemon's services, and answers to what the host began
//	    type filter hook input priority -10; policy accept;
//	    iifname != "vsb*" return
//	    ct direction reply ct state established,related iifname @sent accept
//	    ip daddr . meta l4proto . th dport @resolver add @asks { iifname timeout 1m limit rate over 1000/second burst 2000 packets } goto refused
//	    iifname @connected ip daddr . meta l4proto . th dport @resolver goto served
//	    iifname @gated ip daddr . meta l4proto . th dport @gate goto served
//	    goto prohibited
//	  }
//	  chain served { # by the door, not past it
//	    ct status dnat iifname @sent accept
//	    goto refused
//	  }
//	  chain output { # host to sandbox: counted
//	    type filter hook output priority -10; policy accept;
//	    oifname != "vsb*" return
//	    oifname @received accept
//	  }
//	}
package netns
