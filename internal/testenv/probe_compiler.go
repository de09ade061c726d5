package testenv

import (
	"fmt"
	"os"
)

// probeCompiler looks for a compiler that the host image shows: in /usr.
func probeCompiler() error {
	if _, err := os.Stat("/usr/bin/gcc"); err != nil {
		return fmt.Errorf("%w: apt-get install gcc libc6-dev", err)
	}
	return nil
}
