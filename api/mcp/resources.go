package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The addresses of resources.
const (
	scheme       = "sandbox"
	allURI       = "sandbox://sandboxes"
	filesURI     = "sandbox://{sandbox}/files{+path}"
	logsURI      = "sandbox://{sandbox}/logs"
	processURI   = "sandbox://{sandbox}/logs/{process}"
	plainText    = "text/plain"
	jsonDocument = "application/json"
	anyBytes     = "application/octet-stream"
)

func (t *tools) resources(s *sdk.Server) {
	s.AddResource(&sdk.Resource{URI: allURI, Name: "sandboxes", Title: "Sandboxes", Description: "The living sandboxes, newest first", MIMEType: jsonDocument}, t.reading(t.allResource))
	for _, r := range []struct {
		uri, name, title, what, kind string
		read                         reader
	}{
		{filesURI, "file", "A file", "A file of a sandbox: sandbox://ID/files/etc/hosts. A directory is a list of its entries.", "", t.fileResource},
		{logsURI, "logs", "Output", "What the newest command of a sandbox printed; of one that stopped or ended, what was kept.", plainText, t.logResource},
		{processURI, "process-logs", "Output of a command", "What one command printed", plainText, t.logResource},
	} {
		s.AddResourceTemplate(&sdk.ResourceTemplate{URITemplate: r.uri, Name: r.name, Title: r.title, Description: r.what, MIMEType: r.kind}, t.reading(r.read))
	}
}

// reader returns the contents of a resource.
type reader func(ctx context.Context, uri *url.URL) ([]*sdk.ResourceContents, error)

// reading gives a reader the context of its call, and its errors their words.
func (t *tools) reading(read reader) sdk.ResourceHandler {
	return func(ctx context.Context, req *sdk.ReadResourceRequest) (*sdk.ReadResourceResult, error) {
		ctx, cancel := t.begin(ctx)
		defer cancel()
		uri, err := url.Parse(req.Params.URI)
		if err != nil || uri.Scheme != scheme {
			return nil, sdk.ResourceNotFoundError(req.Params.URI)
		}
		out, err := read(ctx, uri)
		if err == nil {
			err = context.Cause(t.request)
		}
		switch {
		case errors.Is(err, sandbox.ErrNotFound):
			return nil, sdk.ResourceNotFoundError(req.Params.URI)
		case err != nil:
			return nil, t.fault(ctx, err)
		}
		for _, c := range out {
			if c.URI == "" {
				c.URI = req.Params.URI
			}
		}
		return &sdk.ReadResourceResult{Contents: out}, nil
	}
}

// note is a part of a resource that says what another part leaves out.
func note(text string) *sdk.ResourceContents {
	return &sdk.ResourceContents{MIMEType: plainText, Text: "[" + text + "]", Meta: sdk.Meta{"cut": text}}
}

func (t *tools) allResource(ctx context.Context, _ *url.URL) ([]*sdk.ResourceContents, error) {
	out, _, err := t.list(ctx, listArgs{Limit: maxItems})
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(out)
	if err != nil {
		return nil, err
	}
	return []*sdk.ResourceContents{{MIMEType: jsonDocument, Text: string(b)}}, nil
}

func (t *tools) fileResource(ctx context.Context, uri *url.URL) ([]*sdk.ResourceContents, error) {
	path := strings.TrimPrefix(uri.Path, "/files")
	files, err := t.d.Files(ctx, uri.Host)
	if err != nil {
		return nil, err
	}
	if err := sandbox.ValidateFilePath(path); err != nil {
		return nil, err
	}
	info, err := files.Stat(ctx, "", path)
	if err != nil {
		return nil, err
	}
	if info.Type == sandbox.FileDir {
		list, _, err := t.listFiles(ctx, listFilesArgs{Sandbox: uri.Host, Path: path, Limit: maxItems})
		if err != nil {
			return nil, err
		}
		b, err := json.Marshal(list)
		if err != nil {
			return nil, err
		}
		return []*sdk.ResourceContents{{MIMEType: jsonDocument, Text: string(b)}}, nil
	}
	in := readArgs{Sandbox: uri.Host, Path: path}
	c, err := t.fileContent(ctx, in, maxBytes)
	if err != nil {
		return nil, err
	}
	one := &sdk.ResourceContents{MIMEType: plainText, Text: c.Content}
	if c.Encoding == asBase64 {
		one = &sdk.ResourceContents{MIMEType: anyBytes, Blob: c.raw}
	}
	out := []*sdk.ResourceContents{one}
	if c.Cut != "" {
		out = append(out, note(c.Cut))
	}
	return out, nil
}

func (t *tools) logResource(ctx context.Context, uri *url.URL) ([]*sdk.ResourceContents, error) {
	id := sandbox.ProcessID(strings.Trim(strings.TrimPrefix(uri.Path, "/logs"), "/"))
	sb, err := t.d.Sandbox(ctx, uri.Host)
	if err != nil {
		return nil, err
	}
	if id == "" && (sb.Status == sandbox.StatusStopped || sb.Status.Terminal()) {
		kept, err := t.d.LastOutput(ctx, uri.Host)
		if err != nil {
			return nil, err
		}
		out := []*sdk.ResourceContents{{MIMEType: plainText, Text: strings.ToValidUTF8(string(kept[max(0, len(kept)-maxBytes):]), "\uFFFD")}}
		if len(kept) > maxBytes {
			out = append(out, note(fmt.Sprintf("the first %d bytes are left out: 'sandbox logs' prints all", len(kept)-maxBytes)))
		}
		return out, nil
	}
	if id == "" {
		all, err := t.d.Processes(ctx, uri.Host)
		if err != nil {
			return nil, err
		}
		if len(all) == 0 {
			return []*sdk.ResourceContents{{MIMEType: plainText, Text: ""}}, nil
		}
		id = all[len(all)-1].ID
	}
	part, err := t.part(ctx, uri.Host, id, 0, maxBytes, 0)
	if err != nil {
		return nil, err
	}
	out := []*sdk.ResourceContents{{MIMEType: plainText, Text: part.Text}}
	if part.More {
		out = append(out, note(fmt.Sprintf("there is more: read_output with process %s and offset %d returns it", id, part.NextOffset)))
	}
	return out, nil
}
