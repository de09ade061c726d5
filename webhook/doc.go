// Package webhook tells others of events by HTTP: signed, at least once, and
// in the order they happened for each sandbox.
//
// A webhook has a cursor, the number of the event up to which it is done. What
// comes after is read from the log of events, so nothing is queued that a crash
// could lose: a killed daemon's successor reads on from the cursor, and may
// deliver again what its predecessor delivered in the last second. A few
// hundred events of each webhook are under way at most; those of one sandbox,
// and those of none, one after another, so that an event a receiver refuses
// holds up its own sandbox alone. A receiver that does not answer holds up
// nobody else: each webhook has its own workers.
//
// The package knows neither who may have webhooks nor what events mean. The
// daemon gives it the log of events and the API its methods.
package webhook
