package cgroup

import "testing"

func TestMemoryShort(t *testing.T) {
	const calm = "some avg10=0.10 avg60=0.00 avg300=0.00 total=1\nfull avg10=90.00 avg60=0.00 avg300=0.00 total=1\n"
	for name, c := range map[string]struct {
		meminfo, pressure string
		short             bool
	}{
		"plenty":                 {"MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:    50000 kB\n", calm, false},
		"hardly any left":        {"MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:    49999 kB\n", calm, true},
		"waiting for it":         {"MemTotal:       1000000 kB\nMemAvailable:    900000 kB\n", "some avg10=20.01 avg60=0.00 avg300=0.00 total=1\n", true},
		"a kernel without files": {"", "", false},
	} {
		if why, short := memoryShort(c.meminfo, c.pressure); short != c.short || short == (why == "") {
			t.Errorf("%s: short = %v because %q, want %v", name, short, why, c.short)
		}
	}
}
