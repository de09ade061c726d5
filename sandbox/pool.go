package sandbox

// PoolStats tells how the pool of ready shells does since the daemon began.
type PoolStats struct {
	Size          int     `json:"size" doc:"Shells kept ready in quiet times, from the configuration; 0: no pool"`
	Target        int     `json:"target" doc:"Shells wanted now: misses raise it, calm lowers it"`
	Ready         int     `json:"ready" doc:"Shells ready now"`
	OldestSeconds float64 `json:"oldest_seconds" doc:"Age of the oldest ready shell"`
	Hits          int64   `json:"hits" doc:"Sandboxes that got a ready shell"`
	Misses        int64   `json:"misses" doc:"Sandboxes for which one had to be built"`
	Built         int64   `json:"built" doc:"Shells built for the pool"`
	BuildSeconds  float64 `json:"build_seconds" doc:"Time spent building them, all together"`
	Failed        int64   `json:"failed" doc:"Attempts to build one that failed"`
	Lost          int64   `json:"lost" doc:"Ready shells whose PID 1 had died when they were asked for"`
	Shed          int64   `json:"shed" doc:"Ready shells given back because memory was short"`
}
