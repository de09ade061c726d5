// Package deps pins modules that are chosen (docs/adr) but not imported yet.
package deps

import (
	_ "github.com/google/go-containerregistry/pkg/v1/remote"
	_ "github.com/robfig/cron/v3"
)
