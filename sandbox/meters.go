package sandbox

import "math"

import "time"

// Meters are what a sandbox used since it was created. They are whole numbers
// that only rise, so that the use between two readings is a difference, and
// the differences of any parts add up to that of the whole.
type Meters struct {
	CPU     int64 `json:"cpu_usec" doc:"Processor time, in microseconds."`
	Memory  int64 `json:"memory_kib_s" doc:"Memory over time, in KiB times seconds."`
	Storage int64 `json:"storage_kib_s" doc:"Its own layer over time, in KiB times seconds."`
	NetRx   int64 `json:"net_rx_bytes" doc:"Into the sandbox."`
	NetTx   int64 `json:"net_tx_bytes" doc:"Out of the sandbox."`
	IORead  int64 `json:"io_read_bytes"`
	IOWrite int64 `json:"io_write_bytes"`
	Running int64 `json:"running_ms" doc:"Time it ran, in milliseconds."`
	Paused  int64 `json:"paused_ms"`
	Stopped int64 `json:"stopped_ms"`
	Other   int64 `json:"other_ms" doc:"Time being made or taken down, or while the host was off."`
	Starts  int64 `json:"starts" doc:"Times a shell was started for it."`
}

// MeterCount is the number of meters.
const MeterCount = 12

// Values returns the meters in the order of the struct.
func (m Meters) Values() [MeterCount]int64 {
	return [MeterCount]int64{
		m.CPU, m.Memory, m.Storage, m.NetRx, m.NetTx, m.IORead, m.IOWrite,
		m.Running, m.Paused, m.Stopped, m.Other, m.Starts,
	}
}

// MetersOf is the reverse of Values.
func MetersOf(v [MeterCount]int64) Meters {
	return Meters{
		CPU: v[0], Memory: v[1], Storage: v[2], NetRx: v[3], NetTx: v[4], IORead: v[5], IOWrite: v[6],
		Running: v[7], Paused: v[8], Stopped: v[9], Other: v[10], Starts: v[11],
	}
}

// Add returns the sums of two.
func (m Meters) Add(o Meters) Meters {
	v, w := m.Values(), o.Values()
	for i := range v {
		v[i] = AddHeld(v[i], w[i])
	}
	return MetersOf(v)
}

// AddHeld returns a + b, or the bound of 64 bits where that does not fit: what
// is counted against a limit must not wrap round to nothing.
func AddHeld(a, b int64) int64 {
	sum := a + b
	switch {
	case a > 0 && b > 0 && sum < 0:
		return math.MaxInt64
	case a < 0 && b < 0 && sum >= 0:
		return math.MinInt64
	}
	return sum
}

// Less returns what m has more than o.
func (m Meters) Less(o Meters) Meters {
	v, w := m.Values(), o.Values()
	for i := range v {
		v[i] -= w[i]
	}
	return MetersOf(v)
}

// AtLeast returns the higher of each: totals never go down, whatever a counter
// says that could not be read this time.
func (m Meters) AtLeast(o Meters) Meters {
	v, w := m.Values(), o.Values()
	for i := range v {
		v[i] = max(v[i], w[i])
	}
	return MetersOf(v)
}

// Reading is one row of the ledger: the meters of a sandbox at one time, and
// what is needed to go on from there.
type Reading struct {
	Sandbox ID
	At      time.Time // whole milliseconds; later than the one before
	Meters  Meters

	Status     Status // from then on
	Clock      int64  // milliseconds since the host's boot, its sleep counted
	Boot       string // the boot those are of
	MemoryKiB  int64  // at that time
	StorageKiB int64  // at that time
}

// UsageQuery asks for a report over the ledger.
type UsageQuery struct {
	From, To time.Time // From is in, To is not; zero: the beginning, and now
	By       string    // sandbox, owner, project, image or label:KEY; empty: one line for all
	Sandbox  ID        // of this one only, if set
	Owner    string    // of this one's only, if set
}

// UsageReport is what was used in a span of time.
type UsageReport struct {
	From  time.Time   `json:"from"`
	To    time.Time   `json:"to"`
	By    string      `json:"by,omitempty"`
	Lines []UsageLine `json:"lines"`
	Total UsageLine   `json:"total"`
}

// UsageLine is what those with one key used together.
type UsageLine struct {
	Key       string `json:"key,omitempty" doc:"Empty for those without, as without the label."`
	Sandboxes int64  `json:"sandboxes" doc:"Those that existed in the span."`
	Meters    Meters `json:"meters"`
}
