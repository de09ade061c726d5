package e2b

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"path"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// writtenFile is what an upload answers for each file.
type writtenFile struct {
	Path     string            `json:"path"`
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

const (
	metadataPrefix = "X-Metadata-"
	// The bounds of metadata are those of the kernel's: xattr(7).
	maxMetadataKey  = 246
	maxMetadata     = 4096
	maxParts        = 10_000 // files of one upload
	statusNoStorage = http.StatusInsufficientStorage
)

// files reads or writes whole files.
func (c *call) files() {
	var err error
	switch c.r.Method {
	case http.MethodGet, http.MethodHead:
		err = c.download()
	case http.MethodPost:
		err = c.upload()
	default:
		c.w.Header().Set("Allow", "GET, HEAD, POST")
		c.w.WriteHeader(http.StatusMethodNotAllowed)
	}
	if err != nil {
		status, message := fileFault(err)
		if status == http.StatusBadGateway {
			noSandbox(c.w, c.ref)
			return
		}
		writeFault(c.w, status, message)
	}
}

// fileFault words an error for plain HTTP.
func fileFault(err error) (status int, message string) {
	switch sandbox.CodeOf(err) {
	case "disk_full":
		return statusNoStorage, err.Error()
	case codeUnknownUser:
		return http.StatusUnauthorized, err.Error()
	}
	e := asRPC(err)
	switch e.Code {
	case codeUnavailable:
		return http.StatusBadGateway, e.Message
	case codeFailedPrecondition, codeInvalidArgument, codeAlreadyExists:
		return http.StatusBadRequest, e.Message
	}
	if status = codeStatus[e.Code]; status == 0 {
		status = http.StatusInternalServerError
	}
	return status, e.Message
}

// subject is the file a request is about.
func (c *call) subject() (*agent, string, error) {
	q := c.r.URL.Query()
	a, err := c.agent(q.Get("username"))
	if err != nil {
		return nil, "", err
	}
	if q.Get("path") == "" {
		return a, "", nil
	}
	p, err := c.absolute(a.named, q.Get("path"))
	return a, p, err
}

func (c *call) download() error {
	a, p, err := c.subject()
	if err != nil {
		return err
	}
	if p == "" {
		return rpcErrorf(codeInvalidArgument, "name a file: ?path=…")
	}
	// Opened once, at its beginning: most are read from there to their end.
	info, body, err := a.Read(c.ctx(), a.as, p, 0, -1)
	if err != nil {
		return err
	}
	f := &remoteFile{ctx: c.ctx(), a: a, path: p, size: info.Size, body: body}
	defer f.Close()
	h := c.w.Header()
	h.Set("Content-Type", typeOf(p))
	h.Set("Vary", "Accept-Encoding")
	if c.wantsGzip(info.Size) {
		h.Set("Content-Encoding", "gzip")
		return c.sendGzip(body)
	}
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": path.Base(p)}))
	if first := make([]byte, 1); info.Size == 0 { // a file of the kernel's says so, and has content
		if n, err := io.ReadFull(body, first); n > 0 {
			if _, err := io.Copy(c.w, io.MultiReader(bytes.NewReader(first), body)); err != nil {
				panic(http.ErrAbortHandler) // as below
			}
			return nil
		} else if !errors.Is(err, io.EOF) {
			return err
		}
	}
	http.ServeContent(c.w, c.r, "", info.ModTime, f)
	if f.err != nil {
		panic(http.ErrAbortHandler) // what was promised cannot be sent
	}
	return nil
}

func typeOf(p string) string {
	if t := mime.TypeByExtension(path.Ext(p)); t != "" {
		return t
	}
	return "application/octet-stream"
}

// wantsGzip tells whether the client asked for it, and not merely would take
// it: packing costs more than a short way does.
func (c *call) wantsGzip(size int64) bool {
	const least = 512
	return size >= least && c.r.Method == http.MethodGet && c.r.Header.Get("Range") == "" &&
		strings.EqualFold(strings.TrimSpace(c.r.Header.Get("Accept-Encoding")), "gzip")
}

func (c *call) sendGzip(body io.Reader) error {
	z := gzip.NewWriter(c.w)
	_, err := io.Copy(z, body)
	if err = errors.Join(err, z.Close()); err != nil {
		panic(http.ErrAbortHandler) // the head is out: a whole-looking answer would lie
	}
	return nil
}

// remoteFile is a file of a sandbox as http.ServeContent wants it. A read at
// another place opens it anew there.
type remoteFile struct {
	ctx  context.Context //nolint:containedctx // io.ReadSeeker takes none; this lives as long as its request
	a    *agent
	path string
	size int64
	at   int64
	body io.ReadCloser // at the place where it stands; nil if none is open
	from int64         // where body stands
	err  error         // of the stream, not of the client
}

func (f *remoteFile) Read(p []byte) (int, error) {
	if f.at >= f.size {
		return 0, io.EOF
	}
	if f.body == nil || f.from != f.at {
		f.Close()
		_, body, err := f.a.Read(f.ctx, f.a.as, f.path, f.at, f.size-f.at)
		if err != nil {
			f.err = err
			return 0, err
		}
		f.body, f.from = body, f.at
	}
	n, err := f.body.Read(p)
	f.at += int64(n)
	f.from += int64(n)
	if err != nil && f.at < f.size {
		f.err = err // it has become shorter, or the sandbox went
	}
	return n, err
}

// Seek moves to another place.
func (f *remoteFile) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.at
	case io.SeekEnd:
		offset += f.size
	}
	if offset < 0 {
		return 0, fmt.Errorf("seek to %d", offset)
	}
	f.at = offset
	return offset, nil
}

// Close lets go of what is open.
func (f *remoteFile) Close() {
	if f.body != nil {
		_ = f.body.Close()
		f.body = nil
	}
}

// upload writes the files of the body: one as it is, or those of a form.
func (c *call) upload() error {
	a, p, err := c.subject()
	if err != nil {
		return err
	}
	meta, err := headerMetadata(c.r.Header)
	if err != nil {
		return err
	}
	body, err := c.plainBody()
	if err != nil {
		return err
	}
	kind, params, _ := mime.ParseMediaType(c.r.Header.Get("Content-Type"))
	var written []writtenFile
	switch {
	case kind == "application/octet-stream" && p == "":
		return rpcErrorf(codeInvalidArgument, "name the file: ?path=…")
	case kind == "application/octet-stream":
		var f writtenFile
		f, err = c.writeFile(a, p, body, meta)
		written = append(written, f)
	case strings.HasPrefix(kind, "multipart/"):
		written, err = c.writeForm(a, p, body, params["boundary"], meta)
	default:
		return rpcErrorf(codeInvalidArgument, "content type %.60q: send multipart/form-data or application/octet-stream", kind)
	}
	if err != nil {
		return err
	}
	answer(c.w, http.StatusOK, written)
	return nil
}

// plainBody is the request's body, unpacked.
func (c *call) plainBody() (io.Reader, error) {
	switch enc := strings.ToLower(c.r.Header.Get("Content-Encoding")); enc {
	case "", "identity":
		return c.r.Body, nil
	case "gzip":
		z, err := gzip.NewReader(c.r.Body)
		if err != nil {
			return nil, rpcErrorf(codeInvalidArgument, "the body is not gzip: %v", err)
		}
		return z, nil
	default:
		return nil, rpcErrorf(codeInvalidArgument, "content encoding %.20q: use gzip, or none", enc)
	}
}

func (c *call) writeFile(a *agent, p string, body io.Reader, meta map[string]string) (writtenFile, error) {
	info, err := a.Write(c.ctx(), a.as, p, 0o644, body)
	if err != nil {
		if sandbox.ClassOf(err) == nil { // of the body
			err = rpcErrorf(codeInvalidArgument, "the upload broke off: %v", err)
		}
		return writtenFile{}, err
	}
	if len(meta) > 0 {
		if a.attrs == nil {
			return writtenFile{}, rpcErrorf(codeUnimplemented, "this daemon keeps no metadata of files")
		}
		attrs := map[string]string{}
		for key, value := range meta {
			attrs[attrPrefix+key] = value
		}
		if err := a.attrs.SetAttrs(c.ctx(), p, attrs); err != nil {
			return writtenFile{}, err
		}
	}
	return writtenFile{Path: p, Name: path.Base(info.Path), Type: "file", Metadata: meta}, nil
}

// writeForm writes the parts called file. One needs no file name if the URL
// has the path; a file name may have folders, which the library strips.
func (c *call) writeForm(a *agent, p string, body io.Reader, boundary string, meta map[string]string) ([]writtenFile, error) {
	if boundary == "" {
		return nil, rpcErrorf(codeInvalidArgument, "the form has no boundary")
	}
	form := multipart.NewReader(body, boundary)
	written := []writtenFile{}
	seen := map[string]bool{}
	for range maxParts {
		part, err := form.NextPart()
		if errors.Is(err, io.EOF) {
			return written, nil
		}
		if err != nil {
			return nil, rpcErrorf(codeInvalidArgument, "reading the form: %v", err)
		}
		if part.FormName() != "file" {
			continue
		}
		to := p
		if to == "" {
			name := fileNameOf(part.Header)
			if name == "" {
				return nil, rpcErrorf(codeInvalidArgument, "a part has no file name, and the URL no path")
			}
			if to, err = c.absolute(a.named, name); err != nil {
				return nil, err
			}
		}
		if seen[to] {
			return nil, rpcErrorf(codeInvalidArgument, "two parts are for %.200q: only the first was written", to)
		}
		seen[to] = true
		f, err := c.writeFile(a, to, part, meta)
		if err != nil {
			return nil, err
		}
		written = append(written, f)
	}
	return nil, rpcErrorf(codeInvalidArgument, "a form has at most %d parts", maxParts)
}

// fileNameOf is the file name of a part as it was sent.
func fileNameOf(h textproto.MIMEHeader) string {
	_, params, err := mime.ParseMediaType(h.Get("Content-Disposition"))
	if err != nil {
		return ""
	}
	// How browsers and the fetch standard write what a quoted string cannot hold.
	return strings.NewReplacer("%22", `"`, "%0D", "\r", "%0A", "\n").Replace(params["filename"])
}

// headerMetadata reads what a request says about the files it brings.
func headerMetadata(h http.Header) (map[string]string, error) {
	meta := map[string]string{}
	size := 0
	for name, values := range h {
		key, ok := strings.CutPrefix(name, metadataPrefix)
		if !ok || len(values) == 0 {
			continue
		}
		key = strings.ToLower(key)
		if key == "" || len(key) > maxMetadataKey || !printable(key) || !printable(values[0]) {
			return nil, rpcErrorf(codeInvalidArgument, "metadata %.60q: keys of 1 to %d and values, of printable ASCII", key, maxMetadataKey)
		}
		meta[key] = values[0]
		size += len(attrPrefix) + len(key) + len(values[0])
	}
	if size > maxMetadata {
		return nil, rpcErrorf(codeInvalidArgument, "metadata of %d bytes: at most %d together", size, maxMetadata)
	}
	if len(meta) == 0 {
		return nil, nil
	}
	return meta, nil
}

func printable(s string) bool {
	for _, b := range []byte(s) {
		if b < 0x20 || b > 0x7e {
			return false
		}
	}
	return true
}
