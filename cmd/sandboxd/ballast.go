package main

// ballast makes Go's collector run a few times less often: it starts a cycle
// when the heap has doubled, and the daemon's own live heap is a few MiB, which
// a busy second doubles many times over. The ballast counts as live and is
// never touched, so it costs no memory itself, but lets that much more garbage
// stand. A higher GOGC would do so in proportion to a thousand sandboxes too.
var ballast []byte

const ballastBytes = 16 << 20

func loadBallast() { ballast = make([]byte, ballastBytes) }
