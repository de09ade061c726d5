package report

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
)

// Series holds the samples of one contestant in one scenario, in the order
// of the rounds they were taken in.
type Series struct {
	Scenario   string
	Contestant string
	Unit       string
	More       bool // more is better, as for rates
	Samples    []float64
}

// Stats sums up a series.
type Stats struct {
	N      int     `json:"n"`
	Min    float64 `json:"min"`
	Median float64 `json:"median"`
	P95    float64 `json:"p95"`
	P99    float64 `json:"p99"`
	Max    float64 `json:"max"`
}

// Stats sums up the samples. The 95th percentile is the value that 95 of
// 100 samples do not exceed, also of rates.
func (s Series) Stats() Stats {
	if len(s.Samples) == 0 {
		return Stats{}
	}
	sorted := slices.Sorted(slices.Values(s.Samples))
	return Stats{
		N: len(sorted), Min: sorted[0], Median: median(sorted),
		P95: percentile(sorted, 0.95), P99: percentile(sorted, 0.99), Max: sorted[len(sorted)-1],
	}
}

// percentile returns the nearest rank of sorted values.
func percentile(sorted []float64, p float64) float64 {
	rank := int(math.Ceil(p*float64(len(sorted)))) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

func median(sorted []float64) float64 {
	n := len(sorted)
	if n%2 == 1 {
		return sorted[n/2]
	}
	return (sorted[n/2-1] + sorted[n/2]) / 2
}

// pairwise returns the median over the rounds of a's sample divided by b's of
// the same round; 0 when they have no rounds in common. What the machine does
// meanwhile hits both sides of each ratio.
func pairwise(a, b Series) float64 {
	n := min(len(a.Samples), len(b.Samples))
	var ratios []float64
	for i := range n {
		if b.Samples[i] > 0 {
			ratios = append(ratios, a.Samples[i]/b.Samples[i])
		}
	}
	if len(ratios) == 0 {
		return 0
	}
	slices.SortFunc(ratios, cmp.Compare[float64])
	return median(ratios)
}

// MarshalJSON writes the samples and what they come to.
func (s Series) MarshalJSON() ([]byte, error) {
	rounded := make([]float64, len(s.Samples))
	for i, v := range s.Samples {
		rounded[i] = round(v)
	}
	st := s.Stats()
	for _, v := range []*float64{&st.Min, &st.Median, &st.P95, &st.P99, &st.Max} {
		*v = round(*v)
	}
	return json.Marshal(struct {
		Scenario   string `json:"scenario"`
		Contestant string `json:"contestant"`
		Unit       string `json:"unit"`
		More       bool   `json:"more_is_better"`
		Stats
		Samples []float64 `json:"samples"`
	}{s.Scenario, s.Contestant, s.Unit, s.More, st, rounded})
}

// round keeps four decimals: a tenth of a microsecond in milliseconds.
func round(v float64) float64 { return math.Round(v*1e4) / 1e4 }
