package state

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Change says which columns of a sandbox to set: those that are not nil.
type Change struct {
	Reason      *sandbox.Reason
	Detail      *string
	StartedAt   *time.Time
	EndedAt     *time.Time
	Deadline    *time.Time // the zero time takes the deadline away
	ExitCode    *int
	UIDBase     *uint32
	Address     *netip.Addr
	InitPID     *int
	InitStart   *uint64 // start time of PID 1, which makes its pid unique in a boot
	BootID      *string
	Spec        *sandbox.Spec // its name and image cannot change
	Enforcement []sandbox.Enforcement
	Usage       *sandbox.Usage
	LastOutput  []byte            // its last 64 KiB are kept
	Processes   []ProcessRecord   // written as PutProcess does
	Readings    []sandbox.Reading // for the ledger; with a Move to a terminal status the last one is the last of all

	// KeepSlot makes a move to a terminal status leave the slot leased until
	// FreeEnded: what the slot names is still being removed.
	KeepSlot bool

	// Completing, if set, is the change with which a Move to a terminal status
	// first goes to completing, in the same transaction: for an end that nothing
	// can keep any more from coming.
	Completing *Change

	// Of the event. Move's type is by default "sandbox." and the new status.
	EventType string
	Actor     string
	Data      map[string]string // added to what Reason and Detail tell
}

// columnSet is a Change as arguments of sqlUpdate: nil leaves a column alone.
type columnSet struct {
	reason, detail, startedAt, endedAt any
	setDeadline                        bool
	deadline                           any
	exitCode, uidBase, address         any
	initPID, initStart, bootID         any
	spec, enforcement, usage           any
	lastOutput                         any
}

// setColumns has a place for every column that may change, so that one
// prepared statement serves all changes. The order is that of args.
const setColumns = `
	reason = coalesce(?4, reason),
	detail = coalesce(?5, detail),
	started_at = coalesce(?6, started_at),
	ended_at = coalesce(?7, ended_at),
	deadline = CASE WHEN ?8 THEN ?9 ELSE deadline END,
	exit_code = coalesce(?10, exit_code),
	uid_base = coalesce(?11, uid_base),
	address = coalesce(?12, address),
	init_pid = coalesce(?13, init_pid),
	init_start = coalesce(?14, init_start),
	boot_id = coalesce(?15, boot_id),
	spec = coalesce(?16, spec),
	enforcement = coalesce(?17, enforcement),
	usage = coalesce(?18, usage),
	last_output = coalesce(?19, last_output)`

const (
	// sqlMove takes the permitted statuses as words between spaces.
	sqlMove = `UPDATE sandboxes SET status = ?3,` + setColumns + `
		WHERE id = ?1 AND instr(?2, ' ' || status || ' ') RETURNING ` + columns
	// sqlSet leaves the status as it is, and with it the indexes that hold
	// it. ?2 and ?3 are unused, for the others to have the same numbers.
	sqlSet = `UPDATE sandboxes SET` + setColumns + ` WHERE id = ?1 AND ?2 IS ?3`
)

func (s columnSet) args() []any {
	return []any{
		s.reason, s.detail, s.startedAt, s.endedAt, s.setDeadline, s.deadline, s.exitCode, s.uidBase, s.address,
		s.initPID, s.initStart, s.bootID, s.spec, s.enforcement, s.usage, s.lastOutput,
	}
}

// end sets what every terminal status means.
func (s *columnSet) end(now time.Time) {
	if s.endedAt == nil {
		s.endedAt = now.UnixNano()
	}
	s.initPID, s.initStart, s.bootID = int64(0), int64(0), ""
}

// columns is the pure half of an update.
func (c Change) columns() (columnSet, error) {
	var s columnSet
	var err error
	if c.Reason != nil {
		s.reason = string(*c.Reason)
	}
	if c.Detail != nil {
		s.detail = *c.Detail
	}
	if c.StartedAt != nil {
		s.startedAt = c.StartedAt.UnixNano()
	}
	if c.EndedAt != nil {
		s.endedAt = c.EndedAt.UnixNano()
	}
	if c.Deadline != nil {
		s.setDeadline = true
		if !c.Deadline.IsZero() {
			s.deadline = c.Deadline.UnixNano()
		}
	}
	if c.ExitCode != nil {
		s.exitCode = int64(*c.ExitCode)
	}
	if c.UIDBase != nil {
		s.uidBase = int64(*c.UIDBase)
	}
	if c.Address != nil {
		s.address = formatAddr(*c.Address)
	}
	if c.InitPID != nil {
		s.initPID = int64(*c.InitPID)
	}
	if c.InitStart != nil {
		s.initStart = int64(*c.InitStart)
	}
	if c.BootID != nil {
		s.bootID = *c.BootID
	}
	for _, j := range []struct {
		set   bool
		value any
		into  *any
	}{
		{c.Spec != nil, c.Spec, &s.spec},
		{c.Enforcement != nil, c.Enforcement, &s.enforcement},
		{c.Usage != nil, c.Usage, &s.usage},
	} {
		if j.set {
			if *j.into, err = toJSON(j.value); err != nil {
				return s, err
			}
		}
	}
	if c.LastOutput != nil {
		s.lastOutput = tail(c.LastOutput)
	}
	return s, nil
}

// event is what the change leaves in the log.
func (c Change) event(id sandbox.ID, to sandbox.Status, now time.Time) sandbox.Event {
	e := sandbox.Event{Time: now, Sandbox: id, Type: c.EventType, Actor: c.Actor, Data: maps.Clone(c.Data)}
	if e.Type == "" {
		e.Type = eventType(to)
	}
	add := func(key, value string) {
		if e.Data == nil {
			e.Data = map[string]string{}
		}
		e.Data[key] = value
	}
	if c.Reason != nil && *c.Reason != sandbox.ReasonNone {
		add("reason", string(*c.Reason))
	}
	if c.Detail != nil && *c.Detail != "" {
		add("detail", *c.Detail)
	}
	return e
}

// tail returns the part of output that is kept.
func tail(output []byte) []byte { return output[max(0, len(output)-maxTail):] }

func formatAddr(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func toJSON(v any) (string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("writing %T as JSON: %w", v, err)
	}
	return string(b), nil
}
