package server

import (
	"context"
	"encoding/json"
	"reflect"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/access"
)

// maxObject bounds what the audit says an operation was about.
const maxObject = 200

// note is what the audit will say of a request.
type note struct {
	operation, object string
	lasting           bool // the answer waits for it
}

// audited has the request noted when its answer begins.
func (s *server) audited(ctx context.Context, operation, object string, lasting bool) {
	if s.audit == nil {
		return
	}
	requestOf(ctx).note = &note{operation: s.world + operation, object: clip(object, maxObject), lasting: lasting}
}

// answered writes the note; status is that of the answer, 0 where there is
// none. It comes before the first byte of the answer: nobody learns that
// something was done which the audit may never know of.
func (s *server) answered(req *request, status int) {
	n := req.note
	if n == nil || req.r == nil {
		return
	}
	req.note = nil
	c, _ := access.Of(req.r.Context())
	e := access.AuditRow{
		Time: time.Now(), Owner: c.Owner, Key: c.Key, Role: c.Role, From: c.From,
		Operation: n.operation, Object: n.object, Status: status, Request: req.id,
	}
	if status >= 400 {
		e.Code = req.code
	}
	if !n.lasting {
		s.audit.Note(e)
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(req.r.Context()), 5*time.Second)
	defer cancel()
	if err := s.audit.NoteNow(ctx, e); err != nil {
		s.log.ErrorContext(ctx, "the audit is not on disk yet", "request", req.id, "operation", e.Operation, "error", err)
	}
}

// made notes the id of what an operation made.
func made(ctx context.Context, out any) {
	n := requestOf(ctx).note
	if n == nil || n.object != "" {
		return
	}
	v := reflect.Indirect(reflect.ValueOf(out))
	if v.Kind() != reflect.Struct {
		return
	}
	if body := v.FieldByName("Body"); body.Kind() == reflect.Struct {
		if inner := body.FieldByName("Sandbox"); inner.Kind() == reflect.Struct { // as of provision
			body = inner
		}
		for _, field := range []string{"ID", "Name"} {
			if f := body.FieldByName(field); f.Kind() == reflect.String && f.Len() > 0 {
				n.object = clip(f.String(), maxObject)
				return
			}
		}
	}
}

// objectOf joins the path parameters of a request.
func objectOf(ctx huma.Context) (object string) {
	for _, p := range ctx.Operation().Parameters {
		if p.In != "path" {
			continue
		}
		if object != "" {
			object += "/"
		}
		object += ctx.Param(p.Name)
	}
	return object
}

// toolOf names the tool that a message to agents' tools calls; false for the
// messages that call none.
func toolOf(body []byte) (tool string, calls bool) {
	var m struct {
		Method string `json:"method"`
		Params struct {
			Name string `json:"name"`
		} `json:"params"`
	}
	if err := json.Unmarshal(body, &m); err != nil {
		return "several", true // a batch, or nothing good
	}
	return m.Params.Name, m.Method == "tools/call"
}
