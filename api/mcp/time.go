package mcp

import (
	"context"
	"fmt"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// maxForks bounds the sandboxes one call makes.
const maxForks = 16

type (
	snapshotArgs struct {
		Sandbox string `json:"sandbox" jsonschema:"id, name, or unique beginning of an id"`
		Name    string `json:"name,omitempty" jsonschema:"unique among snapshots"`
		Comment string `json:"comment,omitempty" jsonschema:"for people"`
	}
	frozen struct {
		ID        string `json:"id" jsonschema:"use it, or the name, as snapshot in other calls"`
		Name      string `json:"name,omitempty"`
		Sandbox   string `json:"sandbox,omitempty" jsonschema:"whose files these are"`
		Kind      string `json:"kind"`
		Comment   string `json:"comment,omitempty"`
		CreatedAt string `json:"created_at"`
		SizeBytes int64  `json:"size_bytes" jsonschema:"of what was written; 0 until counted"`
	}
	snapshotsArgs struct {
		Sandbox string `json:"sandbox,omitempty" jsonschema:"of this one only"`
		Limit   int    `json:"limit,omitempty" jsonschema:"at most so many: 50 when absent, up to 500"`
	}
	snapshotList struct {
		Snapshots []frozen `json:"snapshots"`
		Cut       string   `json:"cut,omitempty" jsonschema:"what was left out, and how to get it"`
	}
	rollbackArgs struct {
		Sandbox  string `json:"sandbox" jsonschema:"id, name, or unique beginning of an id"`
		Snapshot string `json:"snapshot" jsonschema:"id or name of a snapshot of the same image"`
	}
	forkArgs struct {
		From   string            `json:"from" jsonschema:"a snapshot, or a living sandbox as it is now"`
		Count  int               `json:"count,omitempty" jsonschema:"how many: 1 when absent, at most 16"`
		Name   string            `json:"name,omitempty" jsonschema:"of the new sandbox; of several NAME-1, NAME-2, …"`
		Env    map[string]string `json:"env,omitempty" jsonschema:"added to the environment"`
		Labels map[string]string `json:"labels,omitempty"`
	}
	forked struct {
		Sandbox *brief `json:"sandbox,omitempty"`
		Error   string `json:"error,omitempty" jsonschema:"why this one could not be made"`
	}
	forks struct {
		Forks []forked `json:"forks"`
	}
)

func (t *tools) timeTools(s *sdk.Server) {
	add(t, s, tool{
		"snapshot", "Take a snapshot",
		"Freeze the files of a sandbox, to come back to or to fork. It goes on meanwhile; memory and processes are no part of it.", makes,
	}, func(ctx context.Context, in snapshotArgs) (frozen, string, error) {
		req := sandbox.SnapshotRequest{Name: in.Name, Comment: in.Comment}
		if err := req.Validate(); err != nil {
			return frozen{}, "", err
		}
		sn, err := t.d.Snapshot(ctx, in.Sandbox, req)
		return frozenOf(sn), "", err
	})
	add(t, s, tool{"list_snapshots", "List snapshots", "The snapshots there are, newest first.", looks}, t.listSnapshots)
	add(t, s, tool{
		"rollback", "Roll a sandbox back",
		"Put a sandbox back on the files of a snapshot, in place: every process is killed, and what was written since is lost. Id, name and address stay.", repeat,
	}, func(ctx context.Context, in rollbackArgs) (brief, string, error) {
		return one(t.d.Rollback(ctx, in.Sandbox, in.Snapshot))
	})
	add(t, s, tool{
		"fork", "Fork sandboxes", "Make new sandboxes that begin with the files of a snapshot, or of a sandbox as it is now, which goes on.", makes,
	}, t.fork)
}

func frozenOf(sn sandbox.Snapshot) frozen {
	return frozen{
		ID: string(sn.ID), Name: sn.Name, Sandbox: string(sn.Sandbox), Kind: string(sn.Kind), Comment: sn.Comment,
		CreatedAt: sn.CreatedAt.UTC().Format(time.RFC3339), SizeBytes: sn.SizeBytes,
	}
}

func (t *tools) listSnapshots(ctx context.Context, in snapshotsArgs) (snapshotList, string, error) {
	limit, err := bounded("limit", in.Limit, defaultItems, maxItems)
	if err != nil {
		return snapshotList{}, "", err
	}
	all, err := t.d.Snapshots(ctx, in.Sandbox)
	if err != nil {
		return snapshotList{}, "", err
	}
	out := snapshotList{Snapshots: []frozen{}}
	for _, sn := range all[:min(len(all), limit)] {
		out.Snapshots = append(out.Snapshots, frozenOf(sn))
	}
	if more := len(all) - len(out.Snapshots); more > 0 {
		out.Cut = fmt.Sprintf("%d older ones are left out: name a sandbox, or give a limit up to %d", more, maxItems)
	}
	return out, "", nil
}

func (t *tools) fork(ctx context.Context, in forkArgs) (forks, string, error) {
	count, err := bounded("count", in.Count, 1, maxForks)
	if err != nil {
		return forks{}, "", err
	}
	made, err := t.d.Fork(ctx, in.From, sandbox.ForkRequest{Count: count, Name: in.Name, Env: in.Env, Labels: in.Labels})
	if err != nil {
		return forks{}, "", err
	}
	out := forks{Forks: []forked{}}
	for _, f := range made {
		one := forked{Error: f.Error}
		if f.Sandbox != nil {
			b := briefOf(*f.Sandbox)
			one.Sandbox = &b
		}
		out.Forks = append(out.Forks, one)
	}
	return out, "", nil
}
