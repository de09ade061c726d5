// Package deps pins modules that are chosen (docs/adr) but not imported yet.
package deps

import (
	_ "github.com/google/go-containerregistry/pkg/v1/remote"
	_ "github.com/moby/buildkit/frontend/dockerfile/instructions"
	_ "github.com/moby/buildkit/frontend/dockerfile/parser"
	_ "github.com/moby/buildkit/frontend/dockerfile/shell"
	_ "github.com/moby/patternmatcher/ignorefile"
	_ "github.com/robfig/cron/v3"
)
