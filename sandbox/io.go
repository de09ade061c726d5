package sandbox

import (
	"context"
	"io"
)

// The interfaces of this file are the seam between the packages that speak
// with PID 1 and those that speak with people. Neither side may import the
// other, and both must name the types, so they stand here.

// ProcessIO is one reader's connection to one process. Next is called by one
// goroutine; the other methods may be called from others meanwhile.
type ProcessIO interface {
	// Process returns the record as it was when the connection was made.
	Process() Process
	// Next returns the next piece of output, waiting for it. After the
	// last byte of an ended process it returns io.EOF.
	Next() (Output, error)
	// Exit tells how the process ended; false until Next returned io.EOF.
	Exit() (ExitStatus, bool)
	// WriteStdin writes to standard input or to the terminal.
	WriteStdin(p []byte) (int, error)
	// CloseStdin ends standard input; repeating it does nothing.
	CloseStdin() error
	// Resize sets the terminal's size.
	Resize(WindowSize) error
	// Signal sends a signal (as "SIGTERM") to the process's whole tree.
	Signal(name string) error
	// Close lets go of the connection; the process goes on.
	Close() error
}

// Files is the file work PID 1 does inside a sandbox: under its quota, with
// its ids, beneath its root. Every path is absolute inside. An empty user
// means the sandbox's default user.
type Files interface {
	Stat(ctx context.Context, user, path string) (FileInfo, error)
	// List returns the entries of a directory, depth levels deep (at least 1).
	List(ctx context.Context, user, path string, depth int) ([]FileInfo, error)
	// Each hands the same entries to a function one at a time, as they come. Its
	// error ends the listing and is returned. Where the listing as a whole fails
	// before its first entry, the function is not called.
	Each(ctx context.Context, user, path string, depth int, f func(FileInfo) error) error
	// Read streams a regular file from offset; limit < 0 means to its end.
	Read(ctx context.Context, user, path string, offset, limit int64) (FileInfo, io.ReadCloser, error)
	// Write makes or replaces a regular file, atomically at the end of r:
	// a broken stream leaves the old content. Missing parents are made.
	Write(ctx context.Context, user, path string, mode uint32, r io.Reader) (FileInfo, error)
	// Mkdir makes a directory and its missing parents; an existing one is fine.
	Mkdir(ctx context.Context, user, path string, mode uint32) (FileInfo, error)
	Move(ctx context.Context, user, from, to string) error
	// Remove deletes a file or, with recursive, a tree.
	Remove(ctx context.Context, user, path string, recursive bool) error
	Chmod(ctx context.Context, user, path string, mode uint32) error
	Watch(ctx context.Context, user, path string, recursive bool) (FileWatch, error)
	// TarOut streams a file or tree as a tar archive with names relative
	// to the parent of path.
	TarOut(ctx context.Context, user, path string) (io.ReadCloser, error)
	// TarIn unpacks a tar archive beneath the directory path.
	TarIn(ctx context.Context, user, path string, r io.Reader) error
}

// FileWatch is a running watch.
type FileWatch interface {
	// Next waits for the next change; io.EOF when the watch has ended.
	Next() (FileEvent, error)
	Close() error
}

// StdinSession is what a connection to a process can do besides: it gives the
// process input that comes exactly once, also where the sender's connection
// breaks and it goes on with another one.
type StdinSession interface {
	// OpenStdin says whose input WriteStdin and CloseStdin pass on from now on;
	// id is the sender's own, and above 0. taken is called by Next, once soon and
	// then whenever the process has taken more of that sender's input, with the
	// bytes it took in all; closed says that it takes no more. What is written
	// goes on after the first number told.
	OpenStdin(id int64, taken func(total int64, closed bool)) error
}

// Feeder is what a connection to a process can do besides within the daemon.
type Feeder interface {
	// Feed gives the process input, and with end closes its standard input
	// after it. It returns once the process's pipe has taken all, so what is
	// fed one after the other arrives in that order. ErrConflict, code
	// stdin_closed: nobody can read it any more.
	Feed(ctx context.Context, data []byte, end bool) error
}

// Agents is Files that can also be worked in as an agent in the sandbox would.
type Agents interface {
	Files
	// Agent returns the file work of an agent that has the rights of the
	// sandbox's root, as far as that has any, and works for a user: what it
	// makes, missing parents included, belongs to that user. The user its
	// methods are given is disregarded. What it tells of files says what links
	// lead to, and their attributes. Write gives the file that is there new
	// content, and takes its attributes; a broken stream leaves a part.
	Agent(owner string) AgentFiles
}

// AgentFiles is the file work of an agent.
type AgentFiles interface {
	Files
	// SetAttrs adds extended attributes to a regular file; their names begin
	// with user. (xattr(7)).
	SetAttrs(ctx context.Context, path string, attrs map[string]string) error
}
