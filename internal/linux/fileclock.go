package linux

import (
	"time"

	"golang.org/x/sys/unix"
)

// FileClock returns the time that a file changed now would be given, or an
// earlier one: that of the kernel's last tick (clock_gettime(2),
// CLOCK_REALTIME_COARSE). Ticks are up to 10 ms apart (CONFIG_HZ=100), and more
// where the machine is a guest that waits for its processor, while the clock
// that time.Now reads goes on.
func FileClock() (time.Time, error) {
	var now unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now)
	return time.Unix(now.Unix()), err
}
