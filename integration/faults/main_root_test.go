//go:build root

package faults

import (
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
