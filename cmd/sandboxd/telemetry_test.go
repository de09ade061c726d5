package main

import (
	"strings"
	"testing"
)

// TestTelemetryConfig: what cannot work is refused, with what would.
func TestTelemetryConfig(t *testing.T) {
	for text, want := range map[string]string{
		"":                                                    "",
		"metrics_listen: 127.0.0.1:9464":                      "",
		`metrics_listen: "[::1]:9464"`:                        "",
		"metrics_listen: 0.0.0.0:9464":                        "use a loopback address",
		"metrics_listen: 192.0.2.1:9464":                      "use a loopback address",
		"metrics_listen: localhost:9464":                      "use a loopback address", // a name may become another address
		"metrics_listen: 127.0.0.1":                           "use a loopback address",
		"telemetry: {otlp_endpoint: nowhere}":                 "use a URL",
		`telemetry: {otlp_endpoint: "http://127.0.0.1:4318"}`: "",
		`telemetry: {otlp_endpoint: "http://127.0.0.1:4318", sample: 2}`: "use 0 to 1",
	} {
		c, err := parseConfig("test", []byte(text))
		if err == nil {
			err = c.check()
		}
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want an error with %q", text, err, want)
		}
	}
}
