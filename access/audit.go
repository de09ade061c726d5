package access

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// AuditRow is one row of the audit: somebody asked for a change.
type AuditRow struct {
	Seq       int64     `json:"seq"`
	Time      time.Time `json:"time"`
	Owner     string    `json:"owner"`
	Key       string    `json:"key,omitempty" doc:"Id of the API key; none on the unix socket."`
	Role      Role      `json:"role"`
	From      string    `json:"from" doc:"unix, or the address and port of the other side."`
	Operation string    `json:"operation" doc:"Id of the operation in /openapi.json."`
	Object    string    `json:"object,omitempty" doc:"What it was about, as the caller named it; of what was made, its id."`
	Status    int       `json:"status" doc:"The HTTP status of the answer; 0 where none was given."`
	Code      string    `json:"code,omitempty" doc:"The code of the problem, if it was one."`
	Request   string    `json:"request_id"`
	Hash      Sum       `json:"hash" doc:"SHA-256 of the hash before it and the row."`
}

// Sum is a hash, in hexadecimal digits for people.
type Sum [sha256.Size]byte

// String returns the hexadecimal digits.
func (s Sum) String() string { return hex.EncodeToString(s[:]) }

// MarshalText returns the hexadecimal digits.
func (s Sum) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads the hexadecimal digits. Class ErrInvalid.
func (s *Sum) UnmarshalText(b []byte) error {
	raw, err := hex.DecodeString(string(b))
	if err != nil || len(raw) != len(s) {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_hash", "hash %.80q: use its 64 hexadecimal digits", b)
	}
	copy(s[:], raw)
	return nil
}

// Chain returns the hash of a row that follows one with the hash before: the
// SHA-256 of these 32 bytes and of the row as a JSON array
//
//	[seq, time in ns since 1970, owner, key, role, from, operation, object, status, code, request id]
//
// without spaces, with no character escaped but those JSON demands. Others
// can compute it too (docs/ACCESS.md).
func (e AuditRow) Chain(before Sum) Sum {
	var b bytes.Buffer
	b.Write(before[:])
	w := json.NewEncoder(&b)
	w.SetEscapeHTML(false)
	_ = w.Encode([]any{e.Seq, e.Time.UnixNano(), e.Owner, e.Key, e.Role, e.From, e.Operation, e.Object, e.Status, e.Code, e.Request}) // it cannot fail with these
	return sha256.Sum256(bytes.TrimSuffix(b.Bytes(), []byte("\n")))
}

// AuditQuery chooses rows of the audit, the newest first.
type AuditQuery struct {
	Owner  string // empty: of all
	Object string
	Before int64 // rows with a lower seq; 0: from the newest
	Limit  int   // at most 1000; 0 means 100
}

// AuditCheck is what was found when the chain was computed anew.
type AuditCheck struct {
	OK             bool   `json:"ok"`
	Rows           int64  `json:"rows" doc:"Rows that were looked at."`
	Displaced      int64  `json:"displaced,omitempty" doc:"Rows that made room for newer ones of their owner; what they said is gone, and not checked."`
	FirstDisplaced int64  `json:"-"`
	First          int64  `json:"first,omitempty" doc:"The oldest row that is kept."`
	Last           int64  `json:"last,omitempty" doc:"The newest."`
	Head           Sum    `json:"head" doc:"Hash of the newest row. Kept elsewhere and given back, it shows whether rows were cut off or all of them made anew."`
	BrokenAt       int64  `json:"broken_at,omitempty" doc:"The first row that is not as it was written, or is missing."`
	Detail         string `json:"detail,omitempty"`
}

// Verifier checks a chain row by row.
type Verifier struct {
	check AuditCheck
	hash  Sum
	next  int64
	at    int64 // a row that is known to have had the hash want
	want  Sum
	met   bool
}

// NewVerifier begins after the rows up to seq, the last of which had the hash
// base. If anchor is not 0, the row of that number must have the hash want.
func NewVerifier(seq int64, base Sum, anchor int64, want Sum) *Verifier {
	v := &Verifier{hash: base, next: seq + 1, at: anchor, want: want}
	v.check.Head, v.check.Last = base, seq
	v.anchor(seq, base)
	return v
}

// Add checks the next row and reports whether to go on.
func (v *Verifier) Add(e AuditRow) bool {
	switch {
	case e.Operation == "" && e.Owner == "" && e.Seq >= v.next: // displaced, with those before it
		if v.check.Displaced == 0 {
			v.check.FirstDisplaced = v.next
		}
		v.check.Displaced += e.Seq - v.next + 1
		v.check.Last, v.check.Head, v.hash, v.next = e.Seq, e.Hash, e.Hash, e.Seq+1
		return v.anchor(e.Seq, e.Hash)
	case e.Seq != v.next:
		return v.broken(v.next, fmt.Sprintf("row %d is missing", v.next))
	case e.Chain(v.hash) != e.Hash:
		return v.broken(e.Seq, fmt.Sprintf("row %d is not as it was written, or the row before it is not", e.Seq))
	}
	if v.check.First == 0 {
		v.check.First = e.Seq
	}
	v.check.Rows++
	v.check.Last, v.check.Head, v.hash = e.Seq, e.Hash, e.Hash
	v.next++
	return v.anchor(e.Seq, e.Hash)
}

func (v *Verifier) anchor(seq int64, hash Sum) bool {
	if v.at == 0 || seq != v.at {
		return true
	}
	v.met = true
	if hash != v.want {
		return v.broken(seq, fmt.Sprintf("row %d has another hash than the one given: the rows up to it were made anew", seq))
	}
	return true
}

func (v *Verifier) broken(at int64, detail string) bool {
	v.check.BrokenAt, v.check.Detail = at, detail
	return false
}

// Result says what was found.
func (v *Verifier) Result() AuditCheck {
	if v.check.BrokenAt == 0 && v.at != 0 && !v.met {
		if v.at > v.check.Last {
			v.broken(v.next, fmt.Sprintf("row %d, whose hash was given, is not there: the newest rows were cut off", v.at))
		} else {
			v.check.Detail = fmt.Sprintf("row %d, whose hash was given, is no longer kept: it says nothing", v.at)
		}
	}
	v.check.OK = v.check.BrokenAt == 0
	return v.check
}

// AuditStore keeps the audit.
type AuditStore interface {
	// AppendAudit numbers, chains and writes rows. With lasting set they are
	// on disk when it returns.
	AppendAudit(ctx context.Context, rows []AuditRow, lasting bool) error
	Audit(ctx context.Context, q AuditQuery) ([]AuditRow, error)
	VerifyAudit(ctx context.Context, anchor int64, want Sum) (AuditCheck, error)
}
