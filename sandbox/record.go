package sandbox

import (
	"math"
	"net/netip"
	"time"
)

// Sandbox is the record of one sandbox, living or gone.
type Sandbox struct {
	ID        ID         `json:"id"`
	Owner     string     `json:"owner,omitempty"`
	Spec      Spec       `json:"spec"`
	Status    Status     `json:"status"`
	Reason    Reason     `json:"reason,omitempty" doc:"Why it ended or stopped."`
	Detail    string     `json:"detail,omitempty" doc:"The reason in words."`
	CreatedAt time.Time  `json:"created_at"`
	StartedAt *time.Time `json:"started_at,omitempty"`
	EndedAt   *time.Time `json:"ended_at,omitempty"`
	Deadline  *time.Time `json:"deadline,omitempty" doc:"When its lifetime is over."`
	ExitCode  *int       `json:"exit_code,omitempty" doc:"Of its main command, where it had one and that exited."`

	Slot    int        `json:"slot" doc:"Names its id range, address and quota id while it lives."`
	UIDBase uint32     `json:"uid_base,omitempty" doc:"First of its 65,536 host ids."`
	Address netip.Addr `json:"address,omitzero" doc:"Its own address."`
	InitPID int        `json:"init_pid,omitempty" doc:"PID 1 as the host sees it; 0 when none runs."`

	Fault *NetworkFault `json:"fault,omitempty" doc:"What disturbs its network now, where somebody asked for that."`

	Enforcement []Enforcement `json:"enforcement,omitempty" doc:"Each limit, and whether this host enforces it."`
	Usage       Usage         `json:"usage" doc:"Last counters read; after the end, the final ones."`
	LastOutput  []byte        `json:"last_output,omitempty" doc:"The end of the last output, kept after removal."`
}

// Enforcement says what became of one limit on this host.
type Enforcement struct {
	Limit    string `json:"limit" doc:"memory, cpu, pids, io, disk, inodes, open_files or network."`
	Asked    string `json:"asked" doc:"As asked for, for people; 'none' when no limit was asked for."`
	Enforced bool   `json:"enforced"`
	Why      string `json:"why,omitempty" doc:"Where it is not enforced: why, and how to mend that."`
}

// Usage holds absolute counters since the sandbox was created. Counters
// this host cannot read are zero and named in Unknown.
type Usage struct {
	CPUSeconds       float64  `json:"cpu_seconds"`
	CPUMicros        uint64   `json:"cpu_usec" doc:"The same to the last digit, in microseconds."`
	CPUUserSeconds   float64  `json:"cpu_user_seconds"`
	CPUSystemSeconds float64  `json:"cpu_system_seconds"`
	CPUThrottled     uint64   `json:"cpu_throttled_periods"`
	MemoryBytes      uint64   `json:"memory_bytes" doc:"Now."`
	MemoryPeakBytes  uint64   `json:"memory_peak_bytes"`
	OOMKills         uint64   `json:"oom_kills"`
	PIDs             uint64   `json:"pids" doc:"Tasks now."`
	PIDsPeak         uint64   `json:"pids_peak"`
	PIDsDenied       uint64   `json:"pids_denied" doc:"Forks refused by the limit."`
	IOReadBytes      uint64   `json:"io_read_bytes"`
	IOWriteBytes     uint64   `json:"io_write_bytes"`
	NetRxBytes       uint64   `json:"net_rx_bytes" doc:"Into the sandbox."`
	NetTxBytes       uint64   `json:"net_tx_bytes" doc:"Out of the sandbox."`
	NetRxPackets     uint64   `json:"net_rx_packets"`
	NetTxPackets     uint64   `json:"net_tx_packets"`
	NetDropped       uint64   `json:"net_dropped_packets" doc:"Refused by policy or limit."`
	DiskBytes        uint64   `json:"disk_bytes" doc:"Its own layer, now."`
	DiskInodes       uint64   `json:"disk_inodes"`
	Unknown          []string `json:"unknown,omitempty" doc:"Groups this host cannot count: cpu, memory, pids, io, disk, net."`
}

// Add returns the counters of two runs of one sandbox together: what counts
// up is added, what tells the present is u's, peaks are the higher.
func (u Usage) Add(earlier Usage) Usage {
	u.CPUSeconds += earlier.CPUSeconds
	u.CPUUserSeconds += earlier.CPUUserSeconds
	u.CPUSystemSeconds += earlier.CPUSystemSeconds
	u.MemoryPeakBytes = max(u.MemoryPeakBytes, earlier.MemoryPeakBytes)
	u.PIDsPeak = max(u.PIDsPeak, earlier.PIDsPeak)
	before := earlier.counters()
	for i, c := range u.counters() {
		if *c += *before[i]; *c < *before[i] { // stays at the bound
			*c = math.MaxUint64
		}
	}
	return u
}

// counters are the numbers that count up, the exact ones.
func (u *Usage) counters() []*uint64 {
	return []*uint64{
		&u.CPUMicros, &u.CPUThrottled, &u.OOMKills, &u.PIDsDenied, &u.IOReadBytes, &u.IOWriteBytes,
		&u.NetRxBytes, &u.NetTxBytes, &u.NetRxPackets, &u.NetTxPackets, &u.NetDropped,
	}
}

// NetCounters are what passed the link of a sandbox since it was created.
// Bytes are those of IP packets.
type NetCounters struct {
	RxBytes, RxPackets uint64 // into the sandbox
	TxBytes, TxPackets uint64 // out of it
	Dropped            uint64 // packets refused, either way
}

// Event is one append-only row: something that happened.
type Event struct {
	Seq     int64             `json:"seq" doc:"Counts up; resume after it."`
	Time    time.Time         `json:"time"`
	Sandbox ID                `json:"sandbox,omitempty"`
	Type    string            `json:"type" doc:"Dotted: sandbox.created, process.exited, …"`
	Actor   string            `json:"actor,omitempty" doc:"Who caused it: uid:0, daemon, …"`
	Data    map[string]string `json:"data,omitempty"`
}
