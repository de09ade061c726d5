// Package build executes a Dockerfile in sandboxes and makes an image of what
// comes out.
//
// A build goes through four hands. parse reads the text with BuildKit's own
// parser. choose finds the stages the target needs. evaluate follows the
// instructions that only change words (ENV, ARG, WORKDIR, …) and turns the
// others into operations with everything in them expanded. The Builder then
// executes the operations: each runs in a sandbox of its own, made of the
// layers so far, which is ended before its files are frozen into the next
// layer. An operation whose key the cache knows is not run: no sandbox is
// started for it.
//
// The package does no file work itself: the context is an indexed archive
// (Tree), and what is copied goes as an archive to PID 1 of a sandbox. It
// knows neither overlay nor database nor HTTP; package runtime and cmd/sandboxd
// give it the interfaces it needs. docs/BUILD.md says what of a Dockerfile is
// supported, and what is refused.
package build
