package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// ask puts as many questions to the name server as fit into a time, each for
// another name below a zone, and reads no answer. It writes how many.
func ask(zone, seconds string) error {
	forSeconds, err := strconv.Atoi(seconds)
	if err != nil {
		return err
	}
	server, err := nameServer()
	if err != nil {
		return err
	}
	conn, err := net.Dial("udp", net.JoinHostPort(server, "53"))
	if err != nil {
		return err
	}
	defer conn.Close()
	sent := 0
	for end := time.Now().Add(time.Duration(forSeconds) * time.Second); time.Now().Before(end); sent++ {
		_, _ = conn.Write(packQuestion(uint16(sent), strconv.Itoa(sent)+"."+zone))
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]string{"sent": strconv.Itoa(sent)})
}

// nameServer reads the first one of /etc/resolv.conf.
func nameServer() (string, error) {
	f, err := os.Open("/etc/resolv.conf")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) == 2 && fields[0] == "nameserver" {
			return fields[1], nil
		}
	}
	return "", errors.New("/etc/resolv.conf names no server")
}

// packQuestion is a question for an IPv4 address (RFC 1035, 4.1).
func packQuestion(id uint16, name string) []byte {
	b := binary.BigEndian.AppendUint16(nil, id)
	b = append(b, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)
	for label := range strings.SplitSeq(name, ".") {
		b = append(append(b, byte(len(label))), label...)
	}
	return append(b, 0, 0, 1, 0, 1)
}
