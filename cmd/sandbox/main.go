// Command sandbox is the command line of the daemon. It speaks only the
// public API, by api/client; each group of commands has its own file.
package main

import (
	"context"
	"os"
	"path/filepath"
)

// version is set by the linker.
var version = "dev"

func main() {
	c := &cli{
		name: filepath.Base(os.Args[0]), // sandbox, or sbx
		in:   os.Stdin, out: os.Stdout, err: os.Stderr, getenv: os.Getenv,
	}
	os.Exit(c.main(context.Background(), os.Args[1:]))
}
