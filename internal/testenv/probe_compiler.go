package testenv

import (
	"errors"
	"os"
	"path/filepath"
)

// probeCompiler looks for a compiler that the host image shows: in /usr.
func probeCompiler() error {
	found, err := filepath.Glob("/usr/lib/go-*/bin/go")
	if err != nil {
		return err
	}
	for _, p := range append([]string{"/usr/local/go/bin/go", "/usr/bin/go", "/usr/bin/gcc"}, found...) {
		if _, err := os.Stat(p); err == nil {
			return nil
		}
	}
	return errors.New("neither Go nor gcc beneath /usr: apt-get install golang-go, or gcc and libc6-dev")
}
