// Command sandbox-init is PID 1 of every sandbox. It is static, takes no
// arguments, and expects a listening unix socket as descriptor 3; package
// internal/initd says what it does.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"github.com/sandboxd/sandboxd/internal/initd"
	"github.com/sandboxd/sandboxd/internal/sbx"
)

// version is set by the linker.
var version = "devel"

func init() {
	// The main goroutine keeps the main thread, so that no goroutine that
	// changes its thread for good can get that one.
	runtime.LockOSThread()
}

func main() {
	if call, ok := calls[filepath.Base(os.Args[0])]; ok {
		os.Exit(call(os.Args[1:]))
	}
	if len(os.Args) > 1 && os.Args[1] == "--version" {
		fmt.Println("sandbox-init", version)
		return
	}
	runtime.GOMAXPROCS(1) // until a process is started
	// The collector first runs at 3 MiB: an idle sandbox never gets there.
	debug.SetGCPercent(75)
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "sandbox-init:", err)
		os.Exit(1)
	}
}

// calls are the names this program answers to inside a sandbox.
var calls = map[string]func(args []string) int{"sbx": sbx.Main}

func run() error {
	if err := initd.Prepare(); err != nil {
		return err
	}
	return initd.New(version).Serve(initd.ListenFD)
}
