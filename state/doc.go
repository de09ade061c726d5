// Package state keeps the daemon's records in SQLite: sandboxes with their
// slots and names, events, images, ended processes and idempotency keys.
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
// The database runs in WAL mode with synchronous=FULL: what a method returned
// has survived a power cut. All writes go through one connection in turn
// (DB.write, the one place where several could later share a commit); reads
// have their own connections and never wait for writes. Transactions hold SQL
// only, and followers of events are woken after the commit.
//
// What it deliberately does not do: touch the kernel, decide on moves, or
// keep two daemons from one file (the daemon's lock does). Its caller is the
// runtime.
package state
