// Package integration holds black-box tests of the built programs: they start
// sandboxd as a user would and talk to it through the API and the command
// line. They need root and run in a network namespace of their own; the same
// binary runs natively and in the virtual machine.
package integration
