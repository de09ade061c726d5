package server

import "time"

// LongGrace makes a shutdown that has to break something outlast a test.
func LongGrace() (grace time.Duration, undo func()) {
	was := shutdownGrace
	shutdownGrace = 2 * time.Minute
	return shutdownGrace, func() { shutdownGrace = was }
}
