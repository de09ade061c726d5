package sandbox

import (
	"errors"
	"math"
	"testing"
)

func TestFaultValidate(t *testing.T) {
	good := []NetworkFault{
		{LatencyMS: 200},
		{LatencyMS: 200, JitterMS: 20},
		{LatencyMS: 20, JitterMS: 20},
		{LossPercent: 0.1},
		{LossPercent: 100},
		{RateBPS: 1_000_000},
		{Partition: true},
		{Partition: true, Seconds: 300},
		{LatencyMS: 1, LossPercent: 5, RateBPS: minRateBPS},
	}
	for _, f := range good {
		if err := f.Validate(); err != nil {
			t.Errorf("%+v: %v", f, err)
		}
	}
	bad := []NetworkFault{
		{},
		{Seconds: 5},
		{LatencyMS: -1},
		{LatencyMS: 60_001},
		{JitterMS: 1},
		{LatencyMS: 5, JitterMS: 6},
		{LatencyMS: 5, JitterMS: -1},
		{LossPercent: -1},
		{LossPercent: 100.1},
		{LossPercent: math.NaN()},
		{LossPercent: math.Inf(1)},
		{RateBPS: minRateBPS - 1},
		{Partition: true, Seconds: -1},
		{Partition: true, Seconds: 31536001},
	}
	for _, f := range bad {
		if err := f.Validate(); !errors.Is(err, ErrInvalid) || CodeOf(err) != "invalid_fault" {
			t.Errorf("%+v: %v, want invalid_fault", f, err)
		}
	}
}
