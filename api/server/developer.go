package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// labelDeveloper marks the sandbox of a developer: its value is who that is.
const labelDeveloper = "sandboxd.developer"

type (
	provisionInput struct{ Body *api.ProvisionRequest }
	devResetInput  struct{ Body *api.DeveloperReset }
	devTarget      struct {
		Sandbox string `query:"sandbox" maxLength:"63" doc:"Another one than the caller's own."`
	}
	devLogsInput struct {
		Sandbox string `query:"sandbox" maxLength:"63" doc:"Another one than the caller's own."`
		Process string `query:"process" maxLength:"24" pattern:"^p[0-9]+$" patternDescription:"a process id as p1" doc:"Of this process; of the newest when absent."`
		Offset  int64  `query:"offset" default:"-1" minimum:"-1" doc:"First byte wanted; -1 means the oldest kept."`
		Follow  bool   `query:"follow" doc:"Wait for more until the process ends."`
	}
	scenarioInput struct {
		ID string `path:"id" maxLength:"63" doc:"Of the scenario."`
	}
)

// developerRoutes are the verbs of a developer with one sandbox, who need not
// name it. Each is a call or two of what /v1 does.
func (s *server) developerRoutes() {
	tags := []string{"developer"}
	register(s, huma.Operation{
		OperationID: "provision", Method: http.MethodPost, Path: "/sandbox/provision", DefaultStatus: http.StatusOK,
		Summary: "The caller's developer sandbox, running: the one there is, or a new one", Tags: tags,
	}, s.provision)
	register(s, huma.Operation{
		OperationID: "reset-developer-sandbox", Method: http.MethodPost, Path: "/sandbox/reset", DefaultStatus: http.StatusOK,
		Summary: "Reset the developer sandbox: whole, some paths, or to a snapshot", Tags: tags,
	}, s.developerReset)
	register(s, huma.Operation{
		OperationID: "developer-status", Method: http.MethodGet, Path: "/sandbox/status",
		Summary: "The developer sandbox, what it uses now and what runs in it", Tags: tags,
	}, s.developerStatus)
	register(s, huma.Operation{
		OperationID: "run-scenario", Method: http.MethodPost, Path: "/sandbox/scenario/{id}", DefaultStatus: http.StatusOK,
		Summary: "Play a scenario in the developer sandbox; not available yet", Tags: tags, Errors: []int{http.StatusNotImplemented},
	}, func(_ context.Context, in *scenarioInput) (*empty, error) {
		return nil, sandbox.Errorf(sandbox.ErrUnsupported, "scenarios_not_available", "scenario %.63q: this daemon plays none; a snapshot and /sandbox/reset put a sandbox into a known state", in.ID)
	})
	register(s, huma.Operation{
		OperationID: "developer-logs", Method: http.MethodGet, Path: "/sandbox/logs",
		Summary: "What a process of the developer sandbox printed", Tags: tags,
		Responses: map[string]*huma.Response{"200": {
			Description: "The output", Content: map[string]*huma.MediaType{
				"application/octet-stream": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}},
			},
		}},
	}, s.developerLogs)
}

// developerSandbox finds the caller's, or the one that is named.
func (s *server) developerSandbox(ctx context.Context, named string) (sandbox.Sandbox, error) {
	if named != "" {
		return s.m.Sandbox(ctx, named)
	}
	page, err := s.m.List(ctx, sandbox.Filter{Owner: actorOf(ctx), Labels: map[string]string{labelDeveloper: actorOf(ctx)}, Limit: 1})
	if err == nil && len(page.Items) == 0 {
		err = sandbox.Errorf(sandbox.ErrNotFound, "not_provisioned", "you have no developer sandbox: POST /sandbox/provision makes one")
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return page.Items[0], nil
}

func (s *server) provision(ctx context.Context, in *provisionInput) (*result[api.Provisioned], error) {
	s.provisioning.Lock() // two requests at once make one sandbox
	defer s.provisioning.Unlock()
	sb, err := s.developerSandbox(ctx, "")
	switch {
	case sandbox.CodeOf(err) == "not_provisioned":
		spec := sandbox.Spec{}
		if in.Body != nil {
			spec = in.Body.Spec.Clone()
		}
		if spec.Labels == nil {
			spec.Labels = map[string]string{}
		}
		if err := spec.ValidateAsked(); err != nil {
			return nil, err
		}
		spec.Labels[labelDeveloper] = actorOf(ctx)
		sb, err = s.m.Create(ctx, sandbox.CreateRequest{Spec: spec, Actor: actorOf(ctx)})
		return wrap(api.Provisioned{Sandbox: sb, Created: true}, err)
	case err != nil:
		return nil, err
	case sb.Status == sandbox.StatusStopped:
		sb, err = s.m.Start(ctx, string(sb.ID), actorOf(ctx))
	case sb.Status == sandbox.StatusPaused:
		sb, err = s.m.Resume(ctx, string(sb.ID), actorOf(ctx))
	}
	return wrap(api.Provisioned{Sandbox: sb}, err)
}

func (s *server) developerReset(ctx context.Context, in *devResetInput) (*result[sandbox.Sandbox], error) {
	var req api.DeveloperReset
	if in.Body != nil {
		req = *in.Body
	}
	if req.Snapshot != "" && len(req.Only) > 0 {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_reset", "give either only, some paths, or a snapshot")
	}
	sb, err := s.developerSandbox(ctx, req.Sandbox)
	if err != nil {
		return nil, err
	}
	ref, actor := string(sb.ID), actorOf(ctx)
	switch {
	case req.Snapshot != "":
		return wrap(s.m.Rollback(ctx, ref, req.Snapshot, actor))
	case len(req.Only) > 0:
		return wrap(s.m.ResetPaths(ctx, ref, req.Only, actor))
	}
	return wrap(s.m.Reset(ctx, ref, actor))
}

func (s *server) developerStatus(ctx context.Context, in *devTarget) (*result[api.DeveloperStatus], error) {
	sb, err := s.developerSandbox(ctx, in.Sandbox)
	if err != nil {
		return nil, err
	}
	out := api.DeveloperStatus{Sandbox: sb, Usage: sb.Usage, Processes: []sandbox.Process{}}
	ref := string(sb.ID)
	if sb.Status == sandbox.StatusRunning {
		if out.Usage, err = s.m.Usage(ctx, ref); err != nil {
			return nil, err
		}
		all, err := s.m.Processes(ctx, ref)
		if err != nil {
			return nil, err
		}
		for _, p := range all {
			if p.Exit == nil {
				out.Processes = append(out.Processes, p)
			}
		}
	}
	const newest = 10
	snaps, err := s.m.Snapshots(ctx, ref)
	out.Snapshots = orEmpty(snaps[:min(len(snaps), newest)])
	return wrap(out, err)
}

func (s *server) developerLogs(ctx context.Context, in *devLogsInput) (*huma.StreamResponse, error) {
	sb, err := s.developerSandbox(ctx, in.Sandbox)
	if err != nil {
		return nil, err
	}
	ref := string(sb.ID)
	if in.Process == "" && sb.Status == sandbox.StatusRunning {
		all, err := s.m.Processes(ctx, ref)
		if err != nil {
			return nil, err
		}
		if len(all) == 0 {
			return rawBytes(nil), nil
		}
		in.Process = string(all[len(all)-1].ID)
	}
	if in.Process == "" {
		kept, err := s.m.KeptOutput(ctx, ref, "")
		if err != nil {
			return nil, err
		}
		return rawBytes(kept), nil
	}
	return s.output(ctx, &outputInput{ProcessTarget: ProcessTarget{Target{ref}, in.Process}, Offset: in.Offset, Follow: in.Follow})
}
