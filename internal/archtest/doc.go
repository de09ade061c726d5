// Package archtest holds the tests of the source tree's shape: which package
// may import which (the table in docs/DESIGN.md, section 3), who may touch
// libcontainer or SQLite, that every package says what it is for, that raw
// mount calls stay in few hands. It looks at the real import graph, files with
// the root build tag included. Nothing imports it.
package archtest
