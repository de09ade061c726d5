package netns

import (
	"fmt"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// This file plans what the rules tell to the packet log.

// What one link may tell in a second, and at once. It bounds the work of the
// daemon, not what is counted.
const (
	tellRate  = 20
	tellBurst = 100
)

// The sets with the allowance of each link: to tell what was let out, and
// what was refused. A flood of one kind does not hide the other.
const (
	setToldGranted = "told_granted"
	setToldRefused = "told_refused"
)

var (
	tellGranted = tell("iifname", expr.MetaKeyIIFNAME, setToldGranted, logGranted)
	tellRefused = tell("iifname", expr.MetaKeyIIFNAME, setToldRefused, logRefused)
	tellUnasked = tell("oifname", expr.MetaKeyOIFNAME, setToldRefused, logRefused)
)

// tell logs a packet, within the allowance of its link.
func tell(word string, key expr.MetaKey, set string, group uint16) part {
	within := allowance(word, key, set, expr.Limit{Rate: tellRate, Burst: tellBurst})
	return part{
		fmt.Sprintf("%s log group %d snaplen %d", within.text, group, logSnap),
		append(within.exprs, &expr.Log{Key: 1<<unix.NFTA_LOG_GROUP | 1<<unix.NFTA_LOG_SNAPLEN, Group: group, Snaplen: logSnap}),
	}
}
