// Package cgroup keeps the cgroup v2 tree of the sandboxes: limits, usage,
// freezing, killing, and the events the kernel reports about them.
//
// The tree of one sandbox, beneath the daemon's parent cgroup:
//
//	PARENT
//	└── sb…            ID: cpu.weight against other sandboxes; empty of processes
//	    ├── init       PID 1, with small bounds of its own
//	    └── work       the workload; every limit a caller asks for stands here
//	        ├── p1     one per command, made by PID 1 through a descriptor
//	        └── …
//
// PID 1 and the workload are siblings so that no limit of the workload can
// hold up or kill PID 1: an OOM kill takes work and leaves PID 1 to tell of it,
// a frozen workload leaves PID 1 to answer. The limit files belong to the
// host's root; the sandbox's root owns ID/cgroup.procs, the directory work and
// work/cgroup.procs, which is the least clone3(CLONE_INTO_CGROUP) and mkdir
// need (cgroups(7), "Delegation"), and no cgroupfs is mounted inside.
//
// containerd's cgroup2 package reads cpu.stat, io.stat and memory.events and
// renders cpu.max and checks paths. Files are written raw where it does not fit:
//   - its ToggleControllers writes into every ancestor each time; here a
//     controller is enabled once, and only where it is missing;
//   - its Resources cannot take a limit back (memory.max=max, empty
//     cpuset.cpus) and cannot express two rates of one device in one line;
//   - its writes open with O_CREATE|O_TRUNC, which turns a missing file, the
//     sign of a missing controller, into a permission error;
//   - its Freeze reads back the wish (cgroup.freeze), not the state
//     (cgroup.events), and cannot be cancelled; its Delete sleeps;
//   - its memory statistics read memory.stat, which makes the kernel flush all
//     per-cpu counters of the subtree, for fields nobody here asks for.
//
// cgroup2's favordynmods option, which makes migrations cheaper, is a property
// of the whole host's hierarchy and is left to the administrator.
//
// What it deliberately does not do: start or signal single processes, decide
// what an event means, or keep anything across restarts: the kernel's tree is
// its only memory. Its caller is the runtime.
package cgroup
