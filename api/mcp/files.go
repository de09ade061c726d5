package mcp

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// maxContent bounds what one call writes, in bytes.
const maxContent = 2 << 20

// How content is written down.
const (
	asText   = "utf-8"
	asBase64 = "base64"
)

type (
	readArgs struct {
		Sandbox  string `json:"sandbox" jsonschema:"id, name, or unique beginning of an id"`
		Path     string `json:"path" jsonschema:"absolute"`
		Offset   int64  `json:"offset,omitempty" jsonschema:"from this byte on"`
		MaxBytes int    `json:"max_bytes,omitempty" jsonschema:"32768 when absent, at most 262144"`
		User     string `json:"user,omitempty" jsonschema:"whose rights count; the sandbox's user when empty"`
	}
	content struct {
		Path       string `json:"path"`
		Size       int64  `json:"size" jsonschema:"of the whole file"`
		Offset     int64  `json:"offset"`
		NextOffset int64  `json:"next_offset" jsonschema:"ask from here on for the rest"`
		Encoding   string `json:"encoding" jsonschema:"utf-8, or base64 of what is no text"`
		Content    string `json:"content"`
		Cut        string `json:"cut,omitempty" jsonschema:"what was left out, and how to get it"`

		raw []byte
	}
	writeArgs struct {
		Sandbox  string `json:"sandbox" jsonschema:"id, name, or unique beginning of an id"`
		Path     string `json:"path" jsonschema:"absolute; missing directories are made"`
		Content  string `json:"content" jsonschema:"the whole new content: at most 2 MiB"`
		Encoding string `json:"encoding,omitempty" jsonschema:"utf-8 (the default) or base64"`
		Mode     string `json:"mode,omitempty" jsonschema:"octal permission bits: 644 when absent, 755 for a program"`
		User     string `json:"user,omitempty" jsonschema:"whose file it will be; the sandbox's user when empty"`
	}
	listFilesArgs struct {
		Sandbox string `json:"sandbox" jsonschema:"id, name, or unique beginning of an id"`
		Path    string `json:"path" jsonschema:"an absolute directory"`
		Depth   int    `json:"depth,omitempty" jsonschema:"levels: 1 when absent, at most 8"`
		Limit   int    `json:"limit,omitempty" jsonschema:"at most so many entries: 50 when absent, up to 500"`
		User    string `json:"user,omitempty" jsonschema:"whose rights count; the sandbox's user when empty"`
	}
	entry struct {
		Path     string `json:"path"`
		Type     string `json:"type" jsonschema:"file, dir, symlink or other"`
		Size     int64  `json:"size"`
		Mode     string `json:"mode"`
		User     string `json:"user,omitempty"`
		Modified string `json:"modified"`
		Target   string `json:"target,omitempty" jsonschema:"of a symbolic link"`
	}
	entries struct {
		Entries []entry `json:"entries"`
		Cut     string  `json:"cut,omitempty" jsonschema:"what was left out, and how to get it"`
	}
)

func (t *tools) fileTools(s *sdk.Server) {
	add(t, s, tool{"read_file", "Read a file", "Content of a file in a sandbox, from an offset on.", looks}, t.readFile)
	add(t, s, tool{"write_file", "Write a file", "Make a file in a sandbox, or replace it as a whole.", repeat}, t.writeFile)
	add(t, s, tool{"list_files", "List a directory", "The entries of a directory in a sandbox.", looks}, t.listFiles)
}

func (t *tools) readFile(ctx context.Context, in readArgs) (content, string, error) {
	most, err := bounded("max_bytes", in.MaxBytes, defaultBytes, maxBytes)
	if err != nil {
		return content{}, "", err
	}
	if in.Offset < 0 {
		return content{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_offset", "offset %d: use 0 or more", in.Offset)
	}
	out, err := t.fileContent(ctx, in, most)
	if err != nil {
		return content{}, "", err
	}
	text := out.Content
	if out.Encoding == asBase64 {
		text = "[" + asBase64 + "] " + text
	}
	if out.Cut != "" {
		text += "\n[" + out.Cut + "]"
	}
	if text == "" {
		text = "[the file is empty]"
	}
	return out, text, nil
}

func (t *tools) fileContent(ctx context.Context, in readArgs, most int) (content, error) {
	if err := sandbox.ValidateFilePath(in.Path); err != nil {
		return content{}, err
	}
	files, err := t.d.Files(ctx, in.Sandbox)
	if err != nil {
		return content{}, err
	}
	info, body, err := files.Read(ctx, in.User, in.Path, in.Offset, int64(most))
	if err != nil {
		return content{}, err
	}
	b, err := io.ReadAll(io.LimitReader(body, int64(most)))
	if err := errors.Join(err, body.Close()); err != nil {
		return content{}, err
	}
	out := content{Path: in.Path, Size: info.Size, Offset: in.Offset, Encoding: asText}
	if in.Offset+int64(len(b)) < info.Size {
		b = whole(b)
	}
	out.NextOffset = in.Offset + int64(len(b))
	if utf8.Valid(b) {
		out.Content = string(b)
	} else {
		out.Encoding, out.Content, out.raw = asBase64, base64.StdEncoding.EncodeToString(b), b
	}
	if out.NextOffset < info.Size {
		out.Cut = fmt.Sprintf("bytes %d to %d of %d; read_file with offset %d returns what follows", in.Offset, out.NextOffset, info.Size, out.NextOffset)
	}
	return out, nil
}

func (t *tools) writeFile(ctx context.Context, in writeArgs) (entry, string, error) {
	if err := sandbox.ValidateFilePath(in.Path); err != nil {
		return entry{}, "", err
	}
	mode := uint64(0o644)
	if in.Mode != "" {
		var err error
		if mode, err = strconv.ParseUint(in.Mode, 8, 12); err != nil {
			return entry{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_mode", "mode %.20q: use octal, as 644", in.Mode)
		}
	}
	data := in.Content
	switch in.Encoding {
	case "", asText:
	case asBase64:
		b, err := base64.StdEncoding.DecodeString(data)
		if err != nil {
			return entry{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_content", "content is not base64: %w", err)
		}
		data = string(b)
	default:
		return entry{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_encoding", "encoding %.20q: use utf-8 or base64", in.Encoding)
	}
	if len(data) > maxContent {
		return entry{}, "", sandbox.Errorf(sandbox.ErrTooLarge, "content_too_large", "content of %d bytes: at most %d; make it inside with exec", len(data), maxContent)
	}
	files, err := t.d.Files(ctx, in.Sandbox)
	if err != nil {
		return entry{}, "", err
	}
	info, err := files.Write(ctx, in.User, in.Path, uint32(mode), strings.NewReader(data))
	if err != nil {
		return entry{}, "", err
	}
	return entryOf(info), "", nil
}

func (t *tools) listFiles(ctx context.Context, in listFilesArgs) (entries, string, error) {
	if err := sandbox.ValidateFilePath(in.Path); err != nil {
		return entries{}, "", err
	}
	depth, err := bounded("depth", in.Depth, 1, 8)
	if err != nil {
		return entries{}, "", err
	}
	limit, err := bounded("limit", in.Limit, defaultItems, maxItems)
	if err != nil {
		return entries{}, "", err
	}
	files, err := t.d.Files(ctx, in.Sandbox)
	if err != nil {
		return entries{}, "", err
	}
	out, more := entries{Entries: []entry{}}, 0
	err = files.Each(ctx, in.User, in.Path, depth, func(f sandbox.FileInfo) error {
		if len(out.Entries) < limit {
			out.Entries = append(out.Entries, entryOf(f))
		} else {
			more++
		}
		return nil
	})
	if err != nil {
		return entries{}, "", err
	}
	if more > 0 {
		out.Cut = fmt.Sprintf("%d more entries are left out: list a directory below, give a limit up to %d, or use exec with find", more, maxItems)
	}
	return out, "", nil
}

func entryOf(f sandbox.FileInfo) entry {
	return entry{
		Path: f.Path, Type: string(f.Type), Size: f.Size, Mode: strconv.FormatUint(uint64(f.Mode), 8), User: f.User,
		Modified: f.ModTime.UTC().Format(time.RFC3339), Target: f.Target,
	}
}
