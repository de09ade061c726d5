// Package state keeps the daemon's records in SQLite: sandboxes with their
// slots and names, events, images, ended processes, idempotency keys, the
// ledger of what was used, owners with their API keys, and the audit.
//
// SQLite holds what is meant, the kernel what is; the runtime compares them.
// Two rules follow, and this package enforces both:
//
//   - A status changes only by compare-and-set (Move), along the moves package
//     sandbox permits, with its event in the same transaction.
//   - A living sandbox has exactly one slot, leased in the transaction that
//     writes its intent and freed in the one that writes its terminal status.
//     So a caller moves a sandbox to a terminal status only after everything
//     named by the slot is gone.
//
// A slot may be reserved before there is a sandbox, for a shell made in
// advance, and kept after a sandbox's end (KeepSlot) until what it names is
// removed.
//
// All writes go through one connection in turn (DB.write); reads have their
// own connections and never wait for writes. Transactions hold SQL only, and
// followers of events are woken after the commit. What nobody waits for goes
// along with the next transaction, or some milliseconds later (writeSoon): ends
// of processes, the audit, what an ended sandbox still held.
//
// The database runs in WAL mode with synchronous=NORMAL: what a method
// returned survives any end of the daemon, kill -9 included. What must also
// survive a power cut waits, outside the turn, for an fsync of the log that
// it shares with others (see disk). The log is one file written in order, so
// each such write makes all commits before it durable too.
//
//	write                                  on disk when it returns
//	create, → creating, running, paused    no: it dies with the host anyway
//	→ stopped                              yes: says that the files are whole
//	stopped → creating                     yes: says so no longer, before they are touched
//	→ completing                           no: after a power cut it ends again
//	→ completed, failed                    yes: how it ended, what may be deleted
//	any with usage                         yes: money
//	images, put and deleted                yes: layers are kept and deleted by them
//	idempotency keys                       as the sandbox they made
//	readings of the ledger                 as the move they come with, else no
//	processes, events, slots, pruning      no
//	owners, keys                           yes; when a key was last used: no
//	the audit                              when asked to (package access), for all rows until then
//	migrations                             yes
//
// After a power cut the newest of what does not wait may be missing, never
// something older than what is there; the numbers of lost events are skipped.
//
// What it deliberately does not do: touch the kernel, decide on moves, or
// keep two daemons from one file (the daemon's lock does). Its caller is the
// runtime.
package state
