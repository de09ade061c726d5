package server

import (
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// rulebook says who may call an operation.
type rulebook struct {
	public  bool        // without a key
	least   access.Role // and those with more rights
	changes bool        // it is in the audit
	lasting bool        // and on disk there before the answer
}

// rules has every operation of the document, and what else is served. Roles
// act on routes; whose an object is, is judged below (package guard).
// docs/ACCESS.md shows the same table to people.
var rules = func() map[string]rulebook {
	all := map[string]rulebook{"healthz": {public: true}}
	for _, group := range []struct {
		rule       rulebook
		operations []string
	}{
		{rulebook{least: access.RoleViewer}, []string{
			"version", "whoami", "events", "list-operations", "get-operation", "developer-status", "developer-logs",
			"list-sandboxes", "get-sandbox", "get-usage", "get-history", "get-last-output", "diff", "report-usage",
			"list-processes", "get-process", "get-output",
			"read-file", "stat-file", "list-files", "watch-files", "get-archive",
			"get-network", "explain-network", "get-network-fault", "list-sandbox-ports", "list-ports",
			"list-snapshots", "get-snapshot", "export-snapshot", "list-schedules",
			"list-images", "get-image", "list-volumes", "get-volume", "list-secrets", "list-templates", "get-template",
			"list-webhooks", "get-webhook", "list-dead-letters",
			"list-prices", "list-costs", "report-costs", "list-budgets", "get-budget",
			"list-projects", "get-project", "summarize-projects", "list-experiment-templates",
			"list-experiments", "list-evaluations", "list-promotions",
		}},
		{rulebook{least: access.RoleDeveloper, changes: true}, []string{
			"provision", "reset-developer-sandbox", "cancel-operation", "change-sandbox", "set-template", "remove-template", "run-scenario",
			"create-sandbox", "remove-sandbox", "pause-sandbox", "resume-sandbox", "stop-sandbox", "start-sandbox", "reset-sandbox",
			"pause-sandboxes", "resume-sandboxes", "stop-sandboxes", "start-sandboxes", "remove-sandboxes",
			"create-snapshot", "remove-snapshot", "import-snapshot", "fork-snapshot", "fork-sandbox", "rollback-sandbox", "undo-sandbox",
			"create-schedule", "remove-schedule",
			"run", "run-stream", "exec", "exec-stream", "start-process", "signal-process", "attach",
			"write-file", "remove-file", "make-dir", "move-file", "chmod-file", "put-archive",
			"set-network", "set-network-fault", "clear-network-fault",
			"publish-port", "unpublish-port", "set-port-token", "remove-port-token", "connect-port",
			"import-image", "build-image", "pull-image", "push-image", "export-image", "tag-image", "remove-image",
			"create-volume", "change-volume", "remove-volume", "set-secret", "remove-secret",
			"create-webhook", "remove-webhook", "test-webhook", "retry-dead-letters",
			"add-cost", "add-revenue", "cancel-entry", "set-budget", "remove-budget",
			"create-project", "change-project", "remove-project", "kill-project", "enter-money",
			"deploy-agent", "set-agent", "remove-agent", "start-experiment", "complete-experiment", "evaluate-project",
		}},
		{rulebook{least: access.RoleDeveloper}, []string{servedMCP}}, // the calls of tools are noted one by one
		{rulebook{least: access.RoleOperator}, []string{"doctor", "pool", "get-build-cache", "list-production-agents", servedMetrics, servedProduction}},
		{rulebook{least: access.RoleOperator, changes: true}, []string{"prune-images", "prune-build-cache", "release-host-name", "promote-project"}},
		{rulebook{least: access.RoleAdmin}, []string{"list-keys", "list-owners", "get-owner", "list-audit", "verify-audit"}},
		{rulebook{least: access.RoleAdmin, changes: true, lasting: true}, []string{"create-key", "revoke-key", "set-owner", "remove-owner"}},
	} {
		for _, op := range group.operations {
			all[op] = group.rule
		}
	}
	return all
}()

func errForLooking() error {
	return sandbox.Errorf(sandbox.ErrForbidden, "production_read_only", "nothing can be run in the production world, nor connected to: it is for looking")
}

// authorize is permit as the framework calls it, before it reads anything of
// the request.
func (s *server) authorize(ctx huma.Context, next func(huma.Context)) {
	req := requestOf(ctx.Context())
	operation := ctx.Operation().OperationID
	err := s.permit(ctx.Context(), operation, objectOf(ctx))
	if err == nil && s.world != "" && ctx.Method() == http.MethodGet && rules[operation].changes { // WebSockets
		err = errForLooking()
	}
	if err != nil {
		s.refuse(req.w, req.r, err)
		return
	}
	next(ctx)
}
