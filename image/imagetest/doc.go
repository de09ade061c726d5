// Package imagetest has a registry for tests: a small honest one that keeps
// its content in memory, and a table of the ways in which one can lie, break or
// dawdle. Tests of package image use it, and those of the whole daemon.
package imagetest
