package build

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"strconv"

	"github.com/sandboxd/sandboxd/sandbox"
)

// A key names what an operation makes: the same key, the same files. It is
// the digest of what the operation begins with and of all that goes into it.
// Times of files are not in it, nor are limits.

// keyVersion changes when what a key covers or an operation does changes:
// old keys are then never found again.
const keyVersion = "sandboxd build 2"

type hasher struct {
	h   hash.Hash
	buf []byte // not hashed yet
}

func newHasher() *hasher {
	k := &hasher{h: sha256.New()}
	k.str(keyVersion)
	return k
}

func (k *hasher) str(s ...string) {
	for _, s := range s {
		k.num(int64(len(s)))
		k.buf = append(k.buf, s...)
	}
	k.flush(4 << 10)
}

func (k *hasher) num(n ...int64) {
	for _, n := range n {
		k.buf = binary.BigEndian.AppendUint64(k.buf, uint64(n))
	}
}

// flush hashes what is there, if that is worth it.
func (k *hasher) flush(least int) {
	if len(k.buf) >= least {
		k.h.Write(k.buf)
		k.buf = k.buf[:0]
	}
}

func (k *hasher) list(s []string) {
	k.num(int64(len(s)))
	k.str(s...)
}

func (k *hasher) env(e environ) { k.list(e.pairs()) }

func (k *hasher) sum() string {
	k.flush(0)
	return "sha256:" + hex.EncodeToString(k.h.Sum(nil))
}

// on begins a key with the files an operation begins with.
func on(base sandbox.Image) *hasher {
	k := newHasher()
	k.str(string(baseKind(base)))
	k.list(base.Layers)
	return k
}

// baseKind tells the host's image, whose files are not all in its layers,
// from all others.
func baseKind(img sandbox.Image) sandbox.ImageKind {
	if img.Kind == sandbox.ImageHost {
		return sandbox.ImageHost
	}
	return sandbox.ImageBuild
}

// network hashes what a RUN may reach, the whole policy: what a step could not
// fetch under one it may fetch under another.
func (k *hasher) network(p sandbox.NetworkPolicy, offline bool) {
	if offline || p.Mode == sandbox.NetworkOff {
		p = sandbox.NetworkPolicy{Mode: sandbox.NetworkOff}
	}
	k.str(string(p.Mode))
	k.list(p.Allow)
	k.list(p.Deny)
	for _, a := range p.DNS {
		k.str(a.String())
	}
	k.str(p.Group)
	k.num(int64(len(p.DNS)))
	if g := p.HTTP; g != nil {
		k.list(g.Rules)
		for _, c := range g.Inject {
			k.str(c.Host, c.Header, c.Secret, strconv.FormatBool(c.Plain))
		}
		k.num(int64(len(g.Inject)), 1)
	}
}

// key is the key of a RUN on base.
func (r *runOp) key(base sandbox.Image, network sandbox.NetworkPolicy) string {
	k := on(base)
	k.str("RUN")
	k.list(r.argv)
	k.env(r.env)
	k.str(r.user, r.workdir)
	k.network(network, r.offline)
	if r.script != nil {
		k.str(r.script.name, r.script.data)
	}
	return k.sum()
}

func (d *dirOp) key(base sandbox.Image) string {
	k := on(base)
	k.str("WORKDIR", d.path, d.user)
	return k.sum()
}

// begin hashes how an operation copies, not yet what.
func (o *copyOp) begin(base sandbox.Image) *hasher {
	k := on(base)
	k.str("COPY", o.dest, o.chown)
	if o.chmod != nil {
		k.num(int64(*o.chmod))
	} else {
		k.num(-1)
	}
	k.list(o.exclude)
	if o.unpack {
		k.str("unpack")
	}
	return k
}

// key is the key of a copy on base of what was chosen: names, modes, owners
// and contents.
func (o *copyOp) key(base sandbox.Image, chosen []selection) string {
	k := o.begin(base)
	k.str("content")
	k.num(int64(len(chosen)))
	for _, s := range chosen {
		k.str(s.base, string(s.top.kind))
		k.num(int64(len(s.all)))
		for _, p := range s.all {
			e := p.entry
			k.str(p.rel, e.link)
			k.buf = append(k.buf, e.sum[:]...)
			k.num(int64(e.kind), int64(e.mode), int64(e.uid), int64(e.gid), e.size)
		}
	}
	k.num(int64(len(o.inlines)))
	for _, in := range o.inlines {
		k.str(in.name, in.data)
	}
	return k.sum()
}

// linkKey is the key of a copy on base out of the files of another image, as
// long as that is the same one: so that they need not be looked at.
func (o *copyOp) linkKey(base, from sandbox.Image) string {
	k := o.begin(base)
	k.str("from", string(baseKind(from)))
	k.list(from.Layers)
	k.list(o.sources)
	return k.sum()
}
