package e2b

import (
	"encoding/json"
	"maps"
)

// noteLabel holds what the dialect must remember of a sandbox beside its spec.
// It is no metadata of the user's.
const noteLabel = "sandboxd.e2b"

// note is the value of that label, short enough for one.
type note struct {
	Template   string `json:"t,omitempty"` // as the caller named it
	Private    bool   `json:"p,omitempty"` // its ports ask for a token
	AutoResume bool   `json:"r,omitempty"` // traffic wakes it
	OnTimeout  string `json:"o,omitempty"` // what the caller asked for, while something else is in force
	Internet   *bool  `json:"i,omitempty"` // as the caller said, if so
}

// noteOf reads the note in labels; the zero note where there is none, as of
// sandboxes made by other means.
func noteOf(labels map[string]string) (n note) {
	if json.Unmarshal([]byte(labels[noteLabel]), &n) != nil {
		return note{}
	}
	return n
}

// labelsOf returns metadata with the note.
func labelsOf(metadata map[string]string, n note) (map[string]string, error) {
	text, err := json.Marshal(n)
	if err != nil {
		return nil, err
	}
	out := maps.Clone(metadata)
	if out == nil {
		out = map[string]string{}
	}
	out[noteLabel] = string(text)
	return out, nil
}

// metadataOf returns the labels that are the user's.
func metadataOf(labels map[string]string) map[string]string {
	out := maps.Clone(labels)
	if out == nil {
		out = map[string]string{}
	}
	delete(out, noteLabel)
	return out
}
