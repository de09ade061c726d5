package e2b

import (
	"net/http"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type snapshotInfo struct {
	SnapshotID string   `json:"snapshotID"`
	Names      []string `json:"names"`
}

// snapshot freezes a sandbox's files; a name becomes a template of them.
func (s *Server) snapshot(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	var req struct {
		Name string `json:"name"`
	}
	if err := read(w, r, &req); err != nil {
		return 0, nil, err
	}
	box, err := s.boxOf(r)
	if err != nil {
		return 0, nil, err
	}
	if req.Name != "" {
		req.Name = strings.TrimSuffix(req.Name, ":default")
		if err := sandbox.ValidateTemplateName(req.Name); err != nil {
			return 0, nil, err
		}
	}
	snap, err := s.m.Snapshot(r.Context(), string(box.ID), sandbox.SnapshotRequest{Kind: sandbox.SnapshotManual, Sync: true, Actor: actor})
	if err != nil {
		return 0, nil, gone(err)
	}
	info := infoOf(snap, nil)
	if req.Name == "" {
		return http.StatusCreated, info, nil
	}
	_, err = s.m.SetTemplate(r.Context(), sandbox.TemplateRequest{Name: req.Name, Source: string(snap.ID), Limits: box.Spec.Limits, Private: true, Actor: actor})
	info.Names = append(info.Names, req.Name)
	return http.StatusCreated, info, err
}

// infoOf is a snapshot with the names it has, of its own and as a template.
func infoOf(snap sandbox.Snapshot, named []sandbox.BaseTemplate) snapshotInfo {
	info := snapshotInfo{SnapshotID: string(snap.ID), Names: []string{}}
	if snap.Name != "" {
		info.Names = append(info.Names, snap.Name)
	}
	for _, t := range named {
		if t.Snapshot == snap.ID && t.Name != snap.Name {
			info.Names = append(info.Names, t.Name)
		}
	}
	return info
}

// listSnapshots is one page of those that were asked for, newest first.
func (s *Server) listSnapshots(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	q := r.URL.Query()
	limit, err := pageSize(q)
	if err != nil {
		return 0, nil, err
	}
	of := q.Get("sandboxID")
	if _, err := sandbox.ParseID(of); of != "" && err != nil {
		return http.StatusOK, []snapshotInfo{}, nil
	}
	all, err := s.m.Snapshots(r.Context(), of, sandbox.SnapshotManual)
	if sandbox.CodeOf(err) == "sandbox_not_found" {
		return http.StatusOK, []snapshotInfo{}, nil
	}
	if err != nil {
		return 0, nil, err
	}
	named, err := s.m.Templates(r.Context(), actor)
	if err != nil {
		return 0, nil, err
	}
	out := []snapshotInfo{}
	for _, snap := range all {
		if info := infoOf(snap, named); q.Get("name") == "" || slices.Contains(info.Names, q.Get("name")) {
			out = append(out, info)
		}
	}
	if after := q.Get("nextToken"); after != "" {
		i := slices.IndexFunc(out, func(v snapshotInfo) bool { return v.SnapshotID == after })
		if i < 0 {
			return 0, nil, bad("invalid_cursor", "nextToken %.40q: no such page any more; begin again", after)
		}
		out = out[i+1:]
	}
	if len(out) > limit {
		out = out[:limit]
		w.Header().Set(nextHeader, out[limit-1].SnapshotID)
	}
	return http.StatusOK, out, nil
}

// maxForks is how many sandboxes one call makes.
const maxForks = 100

type forkResult struct {
	Sandbox *entry   `json:"sandbox,omitempty"`
	Error   *failure `json:"error,omitempty"`
}

// fork makes sandboxes of a sandbox's files.
func (s *Server) fork(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	var req struct {
		Count   *int   `json:"count"`
		Timeout *int64 `json:"timeout"`
	}
	if err := read(w, r, &req); err != nil {
		return 0, nil, err
	}
	count := 1
	if req.Count != nil {
		count = *req.Count
	}
	if count < 1 || count > maxForks {
		return 0, nil, bad("invalid_count", "count %d: use 1 to %d", count, maxForks)
	}
	ttl, err := lifetime(req.Timeout)
	if err != nil {
		return 0, nil, err
	}
	box, err := s.boxOf(r)
	if err != nil {
		return 0, nil, err
	}
	made, err := s.m.Fork(r.Context(), string(box.ID), sandbox.ForkRequest{Count: count, TTL: &ttl, ForkOf: sandbox.ForkOfSandbox, Actor: actor})
	if err != nil {
		return 0, nil, gone(err)
	}
	out := make([]forkResult, len(made))
	for i, f := range made {
		if f.Sandbox == nil {
			out[i].Error = &failure{Code: statusOf(f.Code), Message: f.Error, ErrorCode: f.Code}
			continue
		}
		a := s.accessTo(r.Context(), *f.Sandbox)
		out[i].Sandbox = &a
	}
	return http.StatusCreated, out, nil
}

// statusOf is the status of an error of which only the code is known.
func statusOf(code string) int {
	switch code {
	case "slots_exhausted", "quota_exceeded", "budget_exhausted":
		return http.StatusTooManyRequests
	case api.CodeInternal, "":
		return http.StatusInternalServerError
	}
	return http.StatusConflict
}
