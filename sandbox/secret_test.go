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
		if s.For(host) != want {
			t.Errorf("%s: %t", host, !want)
		}
	}
	if !(Secret{}).For("evil.org") {
		t.Error("a secret without hosts goes nowhere")
	}
}
