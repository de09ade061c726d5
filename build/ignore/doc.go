// Package ignore says which files of a directory a .dockerignore file leaves
// out of a build. The CLI asks it before it sends a directory to the daemon;
// package build asks it for COPY --exclude. It reads no file itself.
package ignore
