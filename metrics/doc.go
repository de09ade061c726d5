// Package metrics counts what the daemon does and shows it to Prometheus, in
// its text format and OpenMetrics.
//
// What happens is counted where it happens: requests by the API, works of the
// manager by its Observer. What there is, is asked for when somebody scrapes,
// by one function; so a daemon that nobody scrapes pays for the counting alone.
//
// No label holds what a caller chose: operations, works, statuses, reasons and
// the like are lists of this program, and what is on none of them is "other".
// However many sandboxes, owners and names there are, the series stay as many.
package metrics
