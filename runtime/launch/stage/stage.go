// Package stage is what libcontainer starts as a shell's first stages: C code
// that makes the namespaces before Go begins, and Go code that mounts, gives
// up rights and executes PID 1. Importing it is all it takes. It deliberately
// imports nothing else: a program that holds only this starts several times
// faster than the daemon, and one starts for each shell.
//
// cmd/sandbox-shell is that program; package launch imports it too, so that
// any program which builds shells can be its own stage.
package stage

import (
	"os"
	"runtime"

	"github.com/opencontainers/runc/libcontainer"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // its C constructor turns a child called "init" into the first stage
)

// Go initializes a package as soon as those it imports are, so the stage does
// not wait for what else the program links.
func init() {
	if len(os.Args) > 1 && os.Args[1] == "init" && os.Getenv("_LIBCONTAINER_INITPIPE") != "" {
		runtime.GOMAXPROCS(1)
		runtime.LockOSThread()
		libcontainer.Init() // does not return
	}
}
