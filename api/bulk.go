package api

import "github.com/sandboxd/sandboxd/sandbox"

// MaxBulk is the most sandboxes one bulk request takes.
const MaxBulk = 1000

// BulkResult is what became of the sandboxes a selector chose.
type BulkResult struct {
	DryRun bool       `json:"dry_run" doc:"Nothing was changed."`
	Items  []BulkItem `json:"items" doc:"Newest first."`
	Failed int        `json:"failed" doc:"How many could not be done."`
	More   bool       `json:"more" doc:"The selector chooses more than one request takes: repeat it."`
}

// BulkItem is one sandbox of a bulk request.
type BulkItem struct {
	ID     sandbox.ID     `json:"id"`
	Name   string         `json:"name,omitempty"`
	Status sandbox.Status `json:"status" doc:"Afterwards; of a dry run, now."`
	Error  *Problem       `json:"error,omitempty" doc:"Why it could not be done."`
}

// ProvisionRequest asks for the caller's developer sandbox.
type ProvisionRequest struct {
	Spec sandbox.Spec `json:"spec,omitempty" doc:"Of a new one."`
}

// Provisioned is a developer sandbox.
type Provisioned struct {
	Sandbox sandbox.Sandbox `json:"sandbox"`
	Created bool            `json:"created" doc:"It was made by this request."`
}

// DeveloperReset says what of a developer sandbox to reset.
type DeveloperReset struct {
	Sandbox  string   `json:"sandbox,omitempty" maxLength:"63" doc:"Another one than the caller's own."`
	Only     []string `json:"only,omitempty" maxItems:"1000" doc:"Absolute paths to give their first content again, while processes go on."`
	Snapshot string   `json:"snapshot,omitempty" maxLength:"63" doc:"Put it back on this snapshot. With neither, everything is as at the beginning."`
}

// DeveloperStatus is a developer sandbox at a glance.
type DeveloperStatus struct {
	Sandbox   sandbox.Sandbox    `json:"sandbox"`
	Usage     sandbox.Usage      `json:"usage" doc:"Read now."`
	Processes []sandbox.Process  `json:"processes" doc:"Those that run."`
	Snapshots []sandbox.Snapshot `json:"snapshots" doc:"The newest ten."`
}
