package e2b

import (
	"encoding/json"
	"maps"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Labels of ours are no metadata of the user's.
const (
	ownLabels     = sandbox.ReservedLabels
	noteLabel     = ownLabels + "e2b"      // what the dialect must remember beside the spec
	templateLabel = ownLabels + "template" // as the caller named it
)

// note is the value of its label, short enough for one.
type note struct {
	Private    bool   `json:"p,omitempty"` // its ports ask for a token
	AutoResume bool   `json:"r,omitempty"` // traffic wakes it
	Internet   *bool  `json:"i,omitempty"` // as the caller said, if so
	Host       string `json:"h,omitempty"` // the Host its servers see
}

// noteOf reads the note in labels; the zero note where there is none, as of
// sandboxes made by other means.
func noteOf(labels map[string]string) (n note) {
	if json.Unmarshal([]byte(labels[noteLabel]), &n) != nil {
		return note{}
	}
	return n
}

// labelsOf returns metadata with the note and the template's name. Keys that
// are ours are of class ErrInvalid.
func labelsOf(metadata map[string]string, template string, n note) (map[string]string, error) {
	for k := range metadata {
		if strings.HasPrefix(k, ownLabels) {
			return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_metadata", "metadata key %.80q: names that begin with %q are the daemon's own", k, ownLabels)
		}
	}
	text, err := json.Marshal(n)
	if err != nil {
		return nil, err
	}
	out := maps.Clone(metadata)
	if out == nil {
		out = map[string]string{}
	}
	out[noteLabel], out[templateLabel] = string(text), template
	return out, nil
}

// metadataOf returns the labels that are the user's.
func metadataOf(labels map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range labels {
		if !strings.HasPrefix(k, ownLabels) {
			out[k] = v
		}
	}
	return out
}
