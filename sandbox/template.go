package sandbox

import (
	"strings"
	"time"
)

// BaseTemplate is a name for what sandboxes are made of: an image or a snapshot,
// with the limits they have unless they ask for others.
type BaseTemplate struct {
	Name      string     `json:"name"`
	Owner     string     `json:"owner"`
	Private   bool       `json:"private,omitempty" doc:"Its owner's alone; others everybody sees."`
	Image     string     `json:"image,omitempty" doc:"Made of this image, or"`
	Snapshot  SnapshotID `json:"snapshot,omitempty" doc:"of this snapshot."`
	Limits    Limits     `json:"limits,omitempty"`
	CreatedAt time.Time  `json:"created_at"`
	UpdatedAt time.Time  `json:"updated_at"`
}

// TemplateRequest makes a template, or changes one.
type TemplateRequest struct {
	Name    string `json:"-"`
	Source  string `json:"source" minLength:"1" maxLength:"512" doc:"An image's name, or a snapshot's name or id."`
	Limits  Limits `json:"limits,omitempty" doc:"Those that are left out are the daemon's defaults."`
	Private bool   `json:"private,omitempty" doc:"For its owner alone; those of developers always are."`
	Actor   string `json:"-"`
}

// Validate checks what can be judged without the source. Class ErrInvalid.
func (r TemplateRequest) Validate() error {
	if err := ValidateTemplateName(r.Name); err != nil {
		return err
	}
	if r.Source == "" {
		return Errorf(ErrInvalid, "invalid_template", "no source: name an image or a snapshot")
	}
	return r.Limits.Validate()
}

// ValidateTemplateName checks a template's name: that of a sandbox, which may
// have a tag.
func ValidateTemplateName(name string) error {
	head, tag, tagged := strings.Cut(name, ":")
	if len(name) > 63 || !nameForm(head) || tagged && !nameForm(tag) {
		return Errorf(ErrInvalid, "invalid_name", "template name %.70q: use 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit, and :TAG after it if you like", name)
	}
	_, asBox := ParseID(name)
	_, asSnapshot := ParseSnapshotID(name)
	if asBox == nil || asSnapshot == nil {
		return Errorf(ErrInvalid, "invalid_name", "template name %q has the form of an id: choose another", name)
	}
	return nil
}
