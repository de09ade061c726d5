package netns

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// logged is the body of a message as the kernel would send it.
func logged(group uint16, in, out uint32, payload []byte) []byte {
	b := binary.BigEndian.AppendUint16([]byte{unix.AF_INET, 0}, group)
	b = netlinkAttr(b, nfulHeader, []byte{8, 0, 2, 0})
	if in != 0 {
		b = netlinkAttr(b, nfulInDev, binary.BigEndian.AppendUint32(nil, in))
	}
	if out != 0 {
		b = netlinkAttr(b, nfulOutDev, binary.BigEndian.AppendUint32(nil, out))
	}
	if payload != nil {
		b = netlinkAttr(b, nfulPayload, payload)
	}
	return b
}

// ip4 is an IPv4 header and what follows it.
func ip4(protocol byte, words int, fragment uint16, rest ...byte) []byte {
	b := make([]byte, max(20, words*4))
	b[0], b[9] = byte(0x40|words), protocol
	binary.BigEndian.PutUint16(b[6:], fragment)
	copy(b[12:], []byte{10, 213, 0, 7})
	copy(b[16:], []byte{8, 8, 4, 4})
	return append(b, rest...)
}

func TestParseLogged(t *testing.T) {
	src, dst := netip.MustParseAddr("10.213.0.7"), netip.MustParseAddr("8.8.4.4")
	ports := []byte{0x30, 0x39, 0x01, 0xbb}
	six := append([]byte{0x60, 0, 0, 0, 0, 4, unix.IPPROTO_UDP, 64}, make([]byte, 32)...)
	for name, c := range map[string]struct {
		body []byte
		want loggedPacket
		bad  bool
	}{
		"tcp":               {body: logged(9, 3, 4, ip4(6, 5, 0, ports...)), want: loggedPacket{group: 9, in: 3, out: 4, src: src, dst: dst, protocol: 6, version: 4, srcPort: 12345, dstPort: 443}},
		"options":           {body: logged(9, 3, 0, ip4(17, 15, 0, ports...)), want: loggedPacket{group: 9, in: 3, src: src, dst: dst, protocol: 17, version: 4, srcPort: 12345, dstPort: 443}},
		"icmp has no ports": {body: logged(9, 3, 0, ip4(1, 5, 0, ports...)), want: loggedPacket{group: 9, in: 3, src: src, dst: dst, protocol: 1, version: 4}},
		"later fragment":    {body: logged(9, 3, 0, ip4(17, 5, 7, ports...)), want: loggedPacket{group: 9, in: 3, src: src, dst: dst, protocol: 17, version: 4}},
		"short header":      {body: logged(9, 3, 0, ip4(17, 2, 0, ports...)), want: loggedPacket{group: 9, in: 3, src: src, dst: dst, protocol: 17, version: 4}},
		"cut ports":         {body: logged(9, 3, 0, ip4(17, 5, 0, 1, 2, 3)), want: loggedPacket{group: 9, in: 3, src: src, dst: dst, protocol: 17, version: 4}},
		"six":               {body: logged(9, 3, 0, append(six, ports...)), want: loggedPacket{group: 9, in: 3, src: netip.IPv6Unspecified(), dst: netip.IPv6Unspecified(), protocol: 17, version: 6, srcPort: 12345, dstPort: 443}},
		"no payload":        {body: logged(9, 3, 4, nil), bad: true},
		"empty payload":     {body: logged(9, 3, 4, []byte{}), bad: true},
		"cut header":        {body: logged(9, 3, 4, ip4(6, 5, 0)[:19]), bad: true},
		"version 5":         {body: logged(9, 3, 4, bytes.Repeat([]byte{0x50}, 60)), bad: true},
		"nothing":           {body: nil, bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := parseLogged(c.body)
			if ok == c.bad || ok && got != c.want {
				t.Errorf("%v %+v, want %v %+v", ok, got, !c.bad, c.want)
			}
		})
	}
}

func FuzzParseLogged(f *testing.F) {
	f.Add(logged(9, 3, 4, ip4(6, 5, 0, 1, 2, 3, 4)))
	f.Add(logged(9, 3, 4, ip4(6, 15, 0, 1, 2, 3, 4)))
	f.Add(logged(1, 0, 0, bytes.Repeat([]byte{0x60}, 44)))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, ok := parseLogged(b)
		if ok && (!l.src.IsValid() || !l.dst.IsValid() || l.version != 4 && l.version != 6) {
			t.Errorf("%x: %+v", b, l)
		}
		eachMessage(b, func(_ uint16, _ uint32, body []byte) {
			if len(body) > len(b) {
				t.Error("a message longer than what holds it")
			}
			parseLogged(body)
		})
	})
}

// TestEachMessage: what does not add up ends the reading, and hurts nothing
// before it.
func TestEachMessage(t *testing.T) {
	one := logRequest(7, 41, netlinkAttr(nil, 1, []byte{1}))
	two := logRequest(8, 42, nil)
	var seqs []uint32
	read := func(b []byte) []uint32 {
		seqs = nil
		eachMessage(b, func(_ uint16, seq uint32, _ []byte) { seqs = append(seqs, seq) })
		return seqs
	}
	both := append(bytes.Clone(one), two...)
	if got := read(both); len(got) != 2 || got[0] != 41 || got[1] != 42 {
		t.Errorf("read %v", got)
	}
	if got := read(both[:len(both)-1]); len(got) != 1 {
		t.Errorf("of a cut one read %v", got)
	}
	binary.NativeEndian.PutUint32(both[len(one):], 3)
	if got := read(both); len(got) != 1 {
		t.Errorf("of one shorter than its header read %v", got)
	}
}
