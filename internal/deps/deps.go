// Package deps pins modules that are chosen (docs/adr) but not imported yet.
package deps

import (
	_ "github.com/robfig/cron/v3"
)
