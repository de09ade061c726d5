// Command sandbox-shell is what libcontainer runs as a sandbox's first stages,
// until sandbox-init takes their place: static, small, and of no use to people.
package main

import (
	"fmt"
	"os"

	_ "github.com/sandboxd/sandboxd/runtime/launch/stage" // does all the work before main
)

func main() {
	fmt.Fprintln(os.Stderr, "sandbox-shell: a part of sandboxd, which starts it itself")
	os.Exit(2)
}
