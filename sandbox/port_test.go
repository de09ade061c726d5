package sandbox

import (
	"errors"
	"net/netip"
	"testing"
)

func TestParsePort(t *testing.T) {
	any4, lo6 := netip.MustParseAddr("0.0.0.0"), netip.MustParseAddr("::1")
	for text, want := range map[string]PortRequest{
		"80":               {Protocol: "tcp", Port: 80},
		"8080:80":          {Protocol: "tcp", HostPort: 8080, Port: 80},
		"0:80":             {Protocol: "tcp", Port: 80},
		"5353:53/udp":      {Protocol: "udp", HostPort: 5353, Port: 53},
		"80/tcp":           {Protocol: "tcp", Port: 80},
		"0.0.0.0:8080:80":  {Protocol: "tcp", Address: any4, HostPort: 8080, Port: 80},
		"[::1]:8080:80":    {Protocol: "tcp", Address: lo6, HostPort: 8080, Port: 80},
		"::1:8080:80":      {Protocol: "tcp", Address: lo6, HostPort: 8080, Port: 80},
		"":                 {},
		":":                {},
		":80":              {},
		"8080:":            {},
		"8080:0":           {},
		"65536:80":         {},
		"+1:80":            {},
		"-1:80":            {},
		"a:80":             {},
		"80/sctp":          {},
		"80/":              {},
		"host:8080:80":     {},
		"224.0.0.1:1:1":    {},
		"fe80::1%eth0:1:1": {},
		":8080:80":         {},
	} {
		got, err := ParsePort(text)
		if want == (PortRequest{}) {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("%q: %+v, %v, want it refused", text, got, err)
			}
			continue
		}
		if got != want || err != nil {
			t.Errorf("%q: %+v, %v, want %+v", text, got, err, want)
		}
	}
	if err := (PortRequest{Port: 53, Protocol: "udp", Public: true}).Validate(); !errors.Is(err, ErrInvalid) {
		t.Errorf("udp by host name: %v", err)
	}
}

func FuzzParsePort(f *testing.F) {
	for _, s := range []string{"80", "1:2/udp", "[::1]:0:3", "a:b:c", "/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if r, err := ParsePort(s); err == nil && (r.Port == 0 || r.Validate() != nil) {
			t.Errorf("%q: %+v", s, r)
		}
	})
}
