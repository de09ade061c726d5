package mcp

import (
	"context"
	"fmt"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of lists.
const (
	defaultItems = 50
	maxItems     = 500
)

// brief is what a model needs to know of a sandbox.
type brief struct {
	ID        string            `json:"id" jsonschema:"use it, or the name, as sandbox in other calls"`
	Name      string            `json:"name,omitempty"`
	Status    string            `json:"status"`
	Reason    string            `json:"reason,omitempty" jsonschema:"why it ended or stopped"`
	Image     string            `json:"image,omitempty"`
	Address   string            `json:"address,omitempty"`
	CreatedAt string            `json:"created_at"`
	Deadline  string            `json:"deadline,omitempty" jsonschema:"it is ended then"`
	Labels    map[string]string `json:"labels,omitempty"`
}

func briefOf(sb sandbox.Sandbox) brief {
	b := brief{
		ID: string(sb.ID), Name: sb.Spec.Name, Status: string(sb.Status), Reason: string(sb.Reason), Image: sb.Spec.Image,
		CreatedAt: sb.CreatedAt.UTC().Format(time.RFC3339), Labels: sb.Spec.Labels,
	}
	if sb.Address.IsValid() {
		b.Address = sb.Address.String()
	}
	if sb.Deadline != nil {
		b.Deadline = sb.Deadline.UTC().Format(time.RFC3339)
	}
	return b
}

type (
	createArgs struct {
		Name           string            `json:"name,omitempty" jsonschema:"unique among living sandboxes: lower case letters, digits, dashes"`
		Image          string            `json:"image,omitempty" jsonschema:"what it begins with; the daemon's default when empty"`
		Snapshot       string            `json:"snapshot,omitempty" jsonschema:"id of a snapshot to begin with, in place of an image"`
		CPUs           float64           `json:"cpus,omitempty" jsonschema:"processors, as 0.5 or 2"`
		MemoryMiB      int64             `json:"memory_mib,omitempty"`
		DiskMiB        int64             `json:"disk_mib,omitempty" jsonschema:"what it may write"`
		TTLSeconds     int64             `json:"ttl_seconds,omitempty" jsonschema:"it is ended after this long"`
		Network        string            `json:"network,omitempty" jsonschema:"off (the default), allow (only what the allow list names) or open (the public internet)"`
		Allow          []string          `json:"allow,omitempty" jsonschema:"with network allow: destinations, as pypi.org:443, *.github.com or 203.0.113.0/24:80"`
		Env            map[string]string `json:"env,omitempty"`
		Labels         map[string]string `json:"labels,omitempty"`
		IdempotencyKey string            `json:"idempotency_key,omitempty" jsonschema:"a repeated call with the same key returns the sandbox of the first"`
	}
	target struct {
		Sandbox string `json:"sandbox" jsonschema:"id, name, or unique beginning of an id"`
	}
	listArgs struct {
		Labels map[string]string `json:"labels,omitempty" jsonschema:"only those that have all of these"`
		All    bool              `json:"all,omitempty" jsonschema:"ended ones too"`
		Limit  int               `json:"limit,omitempty" jsonschema:"at most so many, up to 500; 50 when absent"`
		Cursor string            `json:"cursor,omitempty" jsonschema:"next of the answer before"`
	}
	listing struct {
		Sandboxes []brief `json:"sandboxes"`
		Next      string  `json:"next,omitempty" jsonschema:"there are more: call again with this as cursor"`
	}
	costArgs struct {
		Sandbox string `json:"sandbox,omitempty" jsonschema:"of this one only"`
		Project string `json:"project,omitempty" jsonschema:"of this project only"`
		By      string `json:"by,omitempty" jsonschema:"sandbox, owner, project, image or label:KEY; one line for all when empty"`
		From    string `json:"from,omitempty" jsonschema:"RFC 3339; the beginning when empty"`
		To      string `json:"to,omitempty" jsonschema:"RFC 3339; now when empty"`
	}
	costLine struct {
		Key       string `json:"key,omitempty"`
		Sandboxes int64  `json:"sandboxes"`
		Usage     string `json:"usage"`
		Outside   string `json:"outside" jsonschema:"costs entered from outside, as model tokens"`
		Cost      string `json:"cost"`
		Revenue   string `json:"revenue"`
		Profit    string `json:"profit"`
	}
	costs struct {
		Currency string     `json:"currency,omitempty"`
		Lines    []costLine `json:"lines"`
		Total    costLine   `json:"total"`
		Cut      string     `json:"cut,omitempty" jsonschema:"what was left out, and how to get it"`
	}
)

func (t *tools) sandboxTools(s *sdk.Server) {
	add(t, s, tool{
		"create_sandbox", "Create a sandbox",
		"Make a sandbox: a Linux machine of its own. Answers when it runs. It stays until it is removed or its time is over.", makes,
	}, t.create)
	add(t, s, tool{"list_sandboxes", "List sandboxes", "The sandboxes there are, newest first.", looks}, t.list)
	add(t, s, tool{"get_sandbox", "Look at a sandbox", "One sandbox, living or ended.", looks},
		func(ctx context.Context, in target) (brief, string, error) {
			return one(t.d.Sandbox(ctx, in.Sandbox))
		})
	add(t, s, tool{"start_sandbox", "Start a sandbox", "Run a stopped sandbox again, with the files it had.", hints{}},
		func(ctx context.Context, in target) (brief, string, error) {
			return one(t.d.Start(ctx, in.Sandbox))
		})
	add(t, s, tool{"stop_sandbox", "Stop a sandbox", "End every process of a sandbox; its files stay. start_sandbox goes on.", spoils},
		func(ctx context.Context, in target) (brief, string, error) {
			return one(t.d.Stop(ctx, in.Sandbox))
		})
	add(t, s, tool{"remove_sandbox", "Remove a sandbox", "End a sandbox and delete its files, for good. Snapshots of it stay. Repeating it does nothing.", repeat},
		func(ctx context.Context, in target) (brief, string, error) {
			return one(t.d.Remove(ctx, in.Sandbox))
		})
	add(t, s, tool{"cost", "What it cost", "What sandboxes used, cost and earned in a span of time. Amounts are decimal numbers in the currency.", looks}, t.cost)
}

func one(sb sandbox.Sandbox, err error) (brief, string, error) {
	if err != nil {
		return brief{}, "", err
	}
	return briefOf(sb), "", nil
}

func (t *tools) create(ctx context.Context, in createArgs) (brief, string, error) {
	spec := sandbox.Spec{
		Name: in.Name, Image: in.Image, Snapshot: sandbox.SnapshotID(in.Snapshot), TTLSeconds: in.TTLSeconds, Env: in.Env, Labels: in.Labels,
		Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkMode(in.Network), Allow: in.Allow},
		Limits:  sandbox.Limits{CPUs: in.CPUs, MemoryBytes: in.MemoryMiB << 20, DiskBytes: in.DiskMiB << 20},
	}
	const most = 1 << 30 // MiB: what is beyond would wrap around
	if in.MemoryMiB < 0 || in.MemoryMiB > most || in.DiskMiB < 0 || in.DiskMiB > most {
		return brief{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_limits", "memory_mib %d, disk_mib %d: use 0 to %d", in.MemoryMiB, in.DiskMiB, most)
	}
	if err := spec.ValidateAsked(); err != nil {
		return brief{}, "", err
	}
	return one(t.d.Create(ctx, spec, in.IdempotencyKey))
}

func (t *tools) list(ctx context.Context, in listArgs) (listing, string, error) {
	limit, err := bounded("limit", in.Limit, defaultItems, maxItems)
	if err != nil {
		return listing{}, "", err
	}
	page, err := t.d.List(ctx, sandbox.Filter{Labels: in.Labels, All: in.All, Limit: limit, Cursor: in.Cursor})
	if err != nil {
		return listing{}, "", err
	}
	out := listing{Sandboxes: make([]brief, 0, len(page.Items)), Next: page.Next}
	for _, sb := range page.Items {
		out.Sandboxes = append(out.Sandboxes, briefOf(sb))
	}
	return out, "", nil
}

func (t *tools) cost(ctx context.Context, in costArgs) (costs, string, error) {
	q := cost.StatementQuery{Sandbox: in.Sandbox, Project: in.Project, By: in.By}
	for _, at := range []struct {
		name, text string
		to         *time.Time
	}{{"from", in.From, &q.From}, {"to", in.To, &q.To}} {
		if at.text == "" {
			continue
		}
		var err error
		if *at.to, err = time.Parse(time.RFC3339, at.text); err != nil {
			return costs{}, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_time", "%s %.40q: use RFC 3339, as 2026-05-01T00:00:00Z", at.name, at.text)
		}
	}
	st, err := t.d.Statement(ctx, q)
	if err != nil {
		return costs{}, "", err
	}
	out := costs{Currency: st.Currency, Lines: []costLine{}, Total: costLineOf(st.Total)}
	for _, l := range st.Lines[:min(len(st.Lines), maxItems)] {
		out.Lines = append(out.Lines, costLineOf(l))
	}
	if more := len(st.Lines) - len(out.Lines); more > 0 {
		out.Cut = fmt.Sprintf("%d more lines are left out, though they are in the total: ask for a shorter span, one project, or one sandbox", more)
	}
	return out, "", nil
}

func costLineOf(l cost.StatementLine) costLine {
	return costLine{
		Key: l.Key, Sandboxes: l.Sandboxes, Usage: l.Usage.String(), Outside: l.Outside.String(), Cost: l.Cost.String(),
		Revenue: l.Revenue.String(), Profit: l.Profit.String(),
	}
}

// bounded returns a count within its bounds, or the default for 0.
func bounded(name string, n, def, most int) (int, error) {
	switch {
	case n == 0:
		return def, nil
	case n < 0 || n > most:
		return 0, sandbox.Errorf(sandbox.ErrInvalid, "invalid_"+name, "%s %d: use 1 to %d", name, n, most)
	}
	return n, nil
}
