package main

import (
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"os"
	"strings"
	"time"
)

// webAsk is bytes to send somewhere, over TLS where Secure says so.
type webAsk struct {
	To     string `json:"to"`
	Via    string `json:"via,omitempty"` // sent first, and its answer read
	Secure bool   `json:"secure,omitempty"`
	Name   string `json:"name,omitempty"` // of the server; empty: none is told
	Send   string `json:"send"`
}

// webReply is what came back until the other side ended.
type webReply struct {
	Got   string `json:"got"`
	Error string `json:"error,omitempty"`
}

// webAsks does what a file says, one after another.
func webAsks(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var list []webAsk
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	out := make([]webReply, len(list))
	for i, a := range list {
		got, err := a.ask()
		out[i].Got = got
		if err != nil {
			out[i].Error = err.Error()
		}
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

func (a webAsk) ask() (string, error) {
	c, err := net.DialTimeout("tcp4", a.To, 5*time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return "", err
	}
	if a.Via != "" {
		if _, err := io.WriteString(c, a.Via); err != nil {
			return "", err
		}
		var said strings.Builder
		for one := make([]byte, 1); !strings.HasSuffix(said.String(), "\r\n\r\n"); {
			if _, err := c.Read(one); err != nil {
				return said.String(), err
			}
			said.Write(one)
		}
		if !strings.HasPrefix(said.String(), "HTTP/1.1 200") {
			return said.String(), nil
		}
	}
	if a.Secure {
		// What is asked here is who lets it through, not who answers.
		t := tls.Client(c, &tls.Config{ServerName: a.Name, InsecureSkipVerify: true}) //nolint:gosec // as said
		if err := t.Handshake(); err != nil {
			return "", err
		}
		c = t
	}
	if _, err := io.WriteString(c, a.Send); err != nil {
		return "", err
	}
	b, err := io.ReadAll(io.LimitReader(c, 64<<10))
	return string(b), err
}
