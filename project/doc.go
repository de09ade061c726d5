// Package project is the vocabulary of the lab and its rules: projects, the
// agents that run in them, experiments, evaluations and promotions, with their
// statuses and permitted moves; how return is computed, what a recommendation
// follows from, and which agents a promotion moves.
//
// It is pure: it starts nothing, keeps nothing and reads no clock. Package lab
// acts on it, package state keeps it, the API and its clients show it.
package project
