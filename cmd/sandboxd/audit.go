package main

import (
	"sync/atomic"

	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/sandbox"
)

// newsDesk takes what the packages of the network tell of sandboxes to the
// manager, which is made after them. What comes before is not told.
type newsDesk struct {
	to atomic.Pointer[runtime.Manager]
}

// tell never waits.
func (d *newsDesk) tell(n sandbox.NetworkNews) {
	if m := d.to.Load(); m != nil {
		m.NetworkNews(n)
	}
}
