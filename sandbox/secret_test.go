package sandbox

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestSecretRequest(t *testing.T) {
	for _, r := range []SecretRequest{
		{Name: "key", Value: "Bearer x"},
		{Name: "k", Value: strings.Repeat("a", MaxSecretBytes)},
		{Name: "key", Value: "a\tb", Hosts: []string{"example.com", "*.example.com"}},
	} {
		if err := r.Validate(); err != nil {
			t.Errorf("%s: %v", r.Name, err)
		}
	}
	for _, r := range []SecretRequest{
		{Name: "Key", Value: "topsecret"},
		{Value: "topsecret"},
		{Name: "key"},
		{Name: "key", Value: strings.Repeat("a", MaxSecretBytes+1)},
		{Name: "key", Value: "topsecret\n"},
		{Name: "key", Value: "topsecret\r\nX: y"},
		{Name: "key", Value: "topsecret\x00"},
		{Name: "key", Value: " topsecret"},
		{Name: "key", Value: "topsecret", Hosts: []string{"*"}},
		{Name: "key", Value: "topsecret", Hosts: []string{"Example.com"}},
		{Name: "key", Value: "topsecret", Hosts: []string{"example.com/x"}},
		{Name: "key", Value: "topsecret", Hosts: make([]string, 33)},
	} {
		err := r.Validate()
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%s, %d bytes, %q: %v", r.Name, len(r.Value), r.Hosts, err)
		}
		if err != nil && strings.Contains(err.Error(), "topsecret") {
			t.Errorf("the complaint tells the value: %v", err)
		}
	}
	if s := fmt.Sprintf("%v %+v %#v %s", SecretRequest{Name: "key", Value: "topsecret"}, SecretRequest{Value: "topsecret"}, SecretRequest{Value: "topsecret"}, SecretRequest{Value: "topsecret"}); strings.Contains(s, "topsecret") {
		t.Errorf("printed: %s", s)
	}
}

func TestSecretFor(t *testing.T) {
	s := Secret{Hosts: []string{"example.com", "*.example.net"}}
	for host, want := range map[string]bool{"example.com": true, "www.example.com": false, "a.example.net": true, "example.net": false, "evil.org": false} {
		if s.For(host, 443) != want || s.For(host, 80) != want || s.For(host, 8443) {
			t.Errorf("%s: %t", host, !want)
		}
	}
	if s := (Secret{}); !s.For("evil.org", 443) || s.For("evil.org", 8443) {
		t.Error("a secret without hosts goes nowhere, or to ports nobody named")
	}
	s = Secret{Hosts: []string{"example.com:8443"}}
	if !s.For("example.com", 8443) || s.For("example.com", 443) || s.For("www.example.com", 8443) {
		t.Error("a secret for a port goes elsewhere, or not there")
	}
	for _, to := range []string{"example.com:", "example.com:0", "example.com:65536", "example.com:080", "example.com:x", "*:443", "example.com:443:1"} {
		if err := (SecretRequest{Name: "key", Value: "x", Hosts: []string{to}}).Validate(); err == nil {
			t.Errorf("host %q is taken", to)
		}
	}
	if err := (SecretRequest{Name: "key", Value: "x", Hosts: []string{"*.example.com:8443"}}).Validate(); err != nil {
		t.Error(err)
	}
}
