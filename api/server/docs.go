package server

import (
	"bytes"
	"cmp"
	"html/template"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"
)

// docsPath is the page for people; it needs nothing but itself.
const docsPath = "/docs"

// docs serves the OpenAPI document as a page: no script, no other file.
func (s *server) docs() http.Handler {
	page := sync.OnceValues(func() ([]byte, error) {
		var b bytes.Buffer
		err := docsTemplate.Execute(&b, docsOf(s.huma.OpenAPI()))
		return b.Bytes(), err
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := page()
		if err != nil {
			writeProblem(w, s.problemOf(r.Context(), err))
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write(b) // the client may be gone
	})
}

type (
	docsPage struct {
		Title, Version, About string
		Groups                []docsGroup
		Schemas               []docsSchema
	}
	docsGroup struct {
		Name       string
		Operations []docsOperation
	}
	docsOperation struct {
		ID, Method, Path, Summary string
		Fields                    []docsField // of path, query and header
		Body                      []docsBody
		Answers                   []docsBody
	}
	docsBody struct {
		Status, What, Media string
		Type                docsType
	}
	docsField struct {
		Name, In, Doc string
		Required      bool
		Type          docsType
	}
	docsSchema struct {
		Name, Doc string
		Fields    []docsField
	}
	// docsType is a type in words, with the schema it leads to.
	docsType struct{ Word, Schema string }
)

// docsOf arranges the document by tags, in the order of the paths.
func docsOf(doc *huma.OpenAPI) docsPage {
	page := docsPage{Title: doc.Info.Title, Version: doc.Info.Version, About: doc.Info.Description}
	groups := map[string]*docsGroup{}
	for _, path := range slices.Sorted(maps.Keys(doc.Paths)) {
		item := doc.Paths[path]
		for _, m := range []struct {
			method string
			op     *huma.Operation
		}{
			{"GET", item.Get}, {"POST", item.Post}, {"PUT", item.Put}, {"PATCH", item.Patch}, {"DELETE", item.Delete},
		} {
			if m.op == nil {
				continue
			}
			tag := "other"
			if len(m.op.Tags) > 0 {
				tag = m.op.Tags[0]
			}
			if groups[tag] == nil {
				groups[tag] = &docsGroup{Name: tag}
			}
			groups[tag].Operations = append(groups[tag].Operations, docsOperationOf(m.method, path, m.op))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		page.Groups = append(page.Groups, *groups[name])
	}
	all := doc.Components.Schemas.Map()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		page.Schemas = append(page.Schemas, docsSchema{Name: name, Doc: all[name].Description, Fields: docsFieldsOf(all[name])})
	}
	return page
}

func docsOperationOf(method, path string, op *huma.Operation) docsOperation {
	out := docsOperation{ID: op.OperationID, Method: method, Path: path, Summary: op.Summary}
	for _, p := range op.Parameters {
		doc := p.Description
		if doc == "" && p.Schema != nil {
			doc = p.Schema.Description
		}
		out.Fields = append(out.Fields, docsField{Name: p.Name, In: p.In, Doc: doc, Required: p.Required, Type: docsTypeOf(p.Schema)})
	}
	if op.RequestBody != nil {
		out.Body = docsBodies("", op.RequestBody.Description, op.RequestBody.Content)
	}
	for _, status := range slices.Sorted(maps.Keys(op.Responses)) {
		r := op.Responses[status]
		if len(r.Content) == 0 {
			out.Answers = append(out.Answers, docsBody{Status: status, What: r.Description})
			continue
		}
		out.Answers = append(out.Answers, docsBodies(status, r.Description, r.Content)...)
	}
	return out
}

func docsBodies(status, what string, content map[string]*huma.MediaType) []docsBody {
	var all []docsBody
	for _, media := range slices.Sorted(maps.Keys(content)) {
		all = append(all, docsBody{Status: status, What: what, Media: media, Type: docsTypeOf(content[media].Schema)})
	}
	return all
}

func docsFieldsOf(s *huma.Schema) []docsField {
	var all []docsField
	for name, p := range s.Properties {
		all = append(all, docsField{Name: name, Doc: p.Description, Required: slices.Contains(s.Required, name), Type: docsTypeOf(p)})
	}
	slices.SortFunc(all, func(a, b docsField) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

func docsTypeOf(s *huma.Schema) docsType {
	switch {
	case s == nil:
		return docsType{}
	case s.Ref != "":
		name := s.Ref[strings.LastIndexByte(s.Ref, '/')+1:]
		return docsType{Word: name, Schema: name}
	case s.Items != nil:
		t := docsTypeOf(s.Items)
		return docsType{Word: "list of " + t.Word, Schema: t.Schema}
	case len(s.Enum) > 0:
		words := make([]string, len(s.Enum))
		for i, v := range s.Enum {
			words[i], _ = v.(string)
		}
		return docsType{Word: strings.Join(words, " | ")}
	}
	if more, ok := s.AdditionalProperties.(*huma.Schema); ok {
		t := docsTypeOf(more)
		return docsType{Word: "map to " + t.Word, Schema: t.Schema}
	}
	if s.Format != "" {
		return docsType{Word: s.Type + " (" + s.Format + ")"}
	}
	return docsType{Word: s.Type}
}

var docsTemplate = template.Must(template.New("docs").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{{.Title}} API {{.Version}}</title>
<style>
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;margin:0;display:grid;grid-template-columns:minmax(11rem,16rem) 1fr}
nav{position:sticky;top:0;height:100vh;overflow:auto;padding:1rem;box-sizing:border-box;border-right:1px solid #8884;font-size:13px}
nav a{display:block;text-decoration:none;padding:1px 0}
main{padding:1rem 2rem;max-width:62rem;min-width:0}
code,.path{font:13px ui-monospace,monospace;overflow-wrap:anywhere}
details{border:1px solid #8884;border-radius:6px;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}
.m{display:inline-block;min-width:4.2rem;font:bold 12px ui-monospace,monospace}
.GET{color:#2a7}.POST{color:#27c}.PUT,.PATCH{color:#b70}.DELETE{color:#c33}
table{border-collapse:collapse;width:100%;font-size:13px;margin:.3rem 0}
td,th{text-align:left;vertical-align:top;padding:2px 8px 2px 0;border-top:1px solid #8883}
h2{margin-top:2rem}
@media(max-width:50rem){body{display:block}nav{position:static;height:auto;border:0}}
</style></head><body>
<nav><b>{{.Title}} {{.Version}}</b>{{range .Groups}}<a href="#tag-{{.Name}}">{{.Name}}</a>{{end}}<a href="#schemas">schemas</a><a href="/openapi.json">openapi.json</a></nav>
<main><h1>{{.Title}} API {{.Version}}</h1><p>{{.About}}</p>
{{define "type"}}{{if .Schema}}<a href="#schema-{{.Schema}}"><code>{{.Word}}</code></a>{{else}}<code>{{.Word}}</code>{{end}}{{end}}
{{define "fields"}}<table>{{range .}}<tr><td><code>{{.Name}}</code>{{if .Required}} *{{end}}</td><td>{{.In}}</td><td>{{template "type" .Type}}</td><td>{{.Doc}}</td></tr>{{end}}</table>{{end}}
{{range .Groups}}<h2 id="tag-{{.Name}}">{{.Name}}</h2>
{{range .Operations}}<details id="{{.ID}}"><summary><span class="m {{.Method}}">{{.Method}}</span> <span class="path">{{.Path}}</span><br>{{.Summary}}</summary>
{{if .Fields}}<h4>Parameters</h4>{{template "fields" .Fields}}{{end}}
{{if .Body}}<h4>Body</h4><table>{{range .Body}}<tr><td><code>{{.Media}}</code></td><td>{{template "type" .Type}}</td><td>{{.What}}</td></tr>{{end}}</table>{{end}}
<h4>Answers</h4><table>{{range .Answers}}<tr><td>{{.Status}}</td><td><code>{{.Media}}</code></td><td>{{template "type" .Type}}</td><td>{{.What}}</td></tr>{{end}}</table>
</details>{{end}}{{end}}
<h2 id="schemas">schemas</h2>
{{range .Schemas}}<details id="schema-{{.Name}}"><summary><code>{{.Name}}</code> {{.Doc}}</summary>{{template "fields" .Fields}}</details>{{end}}
</main></body></html>
`))
