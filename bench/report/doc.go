// Package report holds what a benchmark run measured, and shows it: tables
// for terminals and for Markdown, JSON for machines, an SVG chart.
//
// It measures nothing and judges nothing: the samples and the goals are
// command bench's, its only caller.
package report
