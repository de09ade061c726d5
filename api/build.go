package api

import "github.com/sandboxd/sandboxd/sandbox"

// The parts of the multipart/form-data body that asks for a build, in this
// order. The files may be missing where the Dockerfile copies none.
const (
	BuildRequestPart = "request" // a sandbox.BuildRequest as JSON
	BuildContextPart = "context" // the files, a tar archive
)

// MaxBuildRequest is the largest request part, in bytes: a Dockerfile, its
// arguments, and JSON's escapes.
const MaxBuildRequest = 4 << 20

// BuildFailed is the type of a BuildMessage that ends a build without an
// image: the problem says why.
const BuildFailed sandbox.BuildEventType = "error"

// BuildMessage is one line of a build's answer as application/x-ndjson. The
// last one is of type image or error; an answer without either broke off.
type BuildMessage struct {
	sandbox.BuildEvent
	Problem *Problem `json:"problem,omitempty"`
}
