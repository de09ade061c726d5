package main

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestLossFlag(t *testing.T) {
	for text, want := range map[string]float64{"5%": 5, "5": 5, "0.1%": 0.1, "100%": 100, "0": 0} {
		var l lossFlag
		if err := l.Set(text); err != nil || float64(l) != want {
			t.Errorf("%q: %v, %v; want %v", text, float64(l), err, want)
		}
	}
	for _, text := range []string{"", "%", "-1%", "101%", "x", "NaN", "5%%", "Inf"} {
		var l lossFlag
		if err := l.Set(text); err == nil {
			t.Errorf("%q is taken for %v", text, float64(l))
		}
	}
}

func TestFaultWords(t *testing.T) {
	until := time.Date(2030, 1, 2, 3, 4, 5, 0, time.Local)
	for want, f := range map[string]sandbox.NetworkFault{
		"no fault":  {},
		"partition": {Partition: true, LatencyMS: 5},
		"200 ms more round trip, 20 ms of jitter, 0.5% lost each way, 1mbit each way": {LatencyMS: 200, JitterMS: 20, LossPercent: 0.5, RateBPS: 1_000_000},
		"5% lost each way, until 2030-01-02 03:04:05":                                 {LossPercent: 5, Until: &until},
	} {
		if got := faultWords(f); got != want {
			t.Errorf("%+v: %q, want %q", f, got, want)
		}
	}
	if got := millis(500 * time.Microsecond); got != 1 {
		t.Errorf("500µs are %d ms", got)
	}
}
