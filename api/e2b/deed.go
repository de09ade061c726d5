package e2b

import (
	"net/http"
	"slices"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Deed is a call that changes something, and how it was answered.
type Deed struct {
	Operation string // e2b, the method and the path's pattern
	Object    string // id of the sandbox it is about, or was made; else the name in the path
	Status    int    // of the answer, as HTTP has it
	Code      string // of the error, if it was one that has a code
}

// identified is the body of an answer about one sandbox.
type identified interface{ sandboxID() string }

func (a entry) sandboxID() string { return a.SandboxID }

// deedOf is what a call of the control plane did.
func deedOf(r *http.Request, status int, body any, err error) Deed {
	d := Deed{Operation: "e2b " + r.Pattern, Object: r.PathValue("id"), Status: status}
	if d.Object == "" {
		d.Object = r.PathValue("name")
	}
	d.Object = d.Object[:min(len(d.Object), 256)]
	if made, ok := body.(identified); ok {
		d.Object = made.sandboxID()
	}
	if err != nil {
		d.Status, d.Code = failureOf(err).Code, sandbox.CodeOf(err)
	}
	return d
}

// changing are the calls of the data plane that change something by
// themselves; what goes on with a command that was started is part of that.
var changing = []string{
	"/process.Process/Start", "/process.Process/SendSignal",
	"/filesystem.Filesystem/MakeDir", "/filesystem.Filesystem/Move", "/filesystem.Filesystem/Remove",
}

func changesData(r *http.Request) bool {
	return r.Method == http.MethodPost && (r.URL.Path == filesPath || slices.Contains(changing, r.URL.Path))
}

// notedAnswer tells the status of an answer when that begins.
type notedAnswer struct {
	http.ResponseWriter
	note func(status int)
	told bool
}

// WriteHeader tells, and begins the answer.
func (a *notedAnswer) WriteHeader(status int) {
	a.tell(status)
	a.ResponseWriter.WriteHeader(status)
}

// Write tells of an answer that begins by itself.
func (a *notedAnswer) Write(b []byte) (int, error) {
	a.tell(http.StatusOK)
	return a.ResponseWriter.Write(b)
}

func (a *notedAnswer) tell(status int) {
	if !a.told && status >= http.StatusOK {
		a.told = true
		a.note(status)
	}
}

// Unwrap lets http.ResponseController find flushing and deadlines.
func (a *notedAnswer) Unwrap() http.ResponseWriter { return a.ResponseWriter }
