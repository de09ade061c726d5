package server

import (
	"encoding/base64"
	"regexp"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Selector chooses sandboxes. It is exported, as DryInput and PageInput are,
// because the framework looks only there.
type Selector struct {
	Status []string `query:"status" maxItems:"8" doc:"Only these statuses, separated by commas."`
	Label  []string `query:"label,explode" maxItems:"64" doc:"key=value or key!=value, several separated by commas or repeated; all must hold. A comma that no further key follows belongs to the value."`
	Name   string   `query:"name" maxLength:"63"`
}

// DryInput asks what would happen.
type DryInput struct {
	DryRun bool `query:"dry_run" doc:"Change nothing: check, and answer with the object as it is."`
}

// PageInput asks for a page of a list.
type PageInput struct {
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" doc:"At most this many; all when absent."`
	Cursor string `query:"cursor" maxLength:"1024" doc:"next of the page before."`
}

// empty reports whether everything is chosen.
func (in Selector) empty() bool { return len(in.Status) == 0 && len(in.Label) == 0 && in.Name == "" }

// filter reads the selector.
func (in Selector) filter() (sandbox.Filter, error) {
	f := sandbox.Filter{Name: in.Name}
	for _, word := range in.Status {
		status := sandbox.Status(word)
		if !status.Valid() {
			return f, sandbox.Errorf(sandbox.ErrInvalid, "invalid_status", "status %.40q: use %s", word, statusWords())
		}
		f.Statuses = append(f.Statuses, status)
	}
	for _, group := range in.Label {
		for _, label := range splitLabels(group) {
			key, value, ok := strings.Cut(label, "=")
			to := &f.Labels
			if k, unlike := strings.CutSuffix(key, "!"); unlike {
				key, to = k, &f.Unlike
			}
			if !ok || key == "" {
				return f, sandbox.Errorf(sandbox.ErrInvalid, "invalid_label", "label %.80q: use key=value or key!=value", label)
			}
			if *to == nil {
				*to = map[string]string{}
			}
			if had, twice := (*to)[key]; twice && had != value {
				return f, sandbox.Errorf(sandbox.ErrInvalid, "invalid_label", "label %.80q: the key is there twice; ask twice", label)
			}
			(*to)[key] = value
		}
	}
	return f, nil
}

// nextLabel is a comma that another requirement follows.
var nextLabel = regexp.MustCompile(`,[A-Za-z0-9][A-Za-z0-9._/-]*!?=`)

func splitLabels(s string) []string {
	var all []string
	for {
		at := nextLabel.FindStringIndex(s)
		if at == nil {
			return append(all, s)
		}
		all = append(all, s[:at[0]])
		s = s[at[0]+1:]
	}
}

// pageOf returns one page of a whole list, and the cursor of the next. What
// came since before the cursor is on no later page; where the object that the
// cursor names has gone, the list has to be begun anew.
func pageOf[T any](in PageInput, all []T, key func(T) string) (items []T, next string, err error) {
	if in.Cursor != "" {
		last, err := base64.RawURLEncoding.DecodeString(in.Cursor)
		at := slices.IndexFunc(all, func(v T) bool { return key(v) == string(last) })
		if err != nil || at < 0 {
			return nil, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_cursor", "cursor %.40q: use next of a page; if it was that, what it names has gone: begin anew", in.Cursor)
		}
		all = all[at+1:]
	}
	if in.Limit > 0 && len(all) > in.Limit {
		all = all[:in.Limit]
		next = base64.RawURLEncoding.EncodeToString([]byte(key(all[in.Limit-1])))
	}
	return orEmpty(all), next, nil
}
