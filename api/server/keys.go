package server

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// KeyTarget is the path of one API key.
type KeyTarget struct {
	ID string `path:"key" maxLength:"20" pattern:"^key_[a-z0-9]{16}$" patternDescription:"the id of a key"`
}

// OwnerTarget is the path of one owner.
type OwnerTarget struct {
	Name string `path:"owner" maxLength:"63" pattern:"^[a-z0-9][a-z0-9._:-]*$" patternDescription:"the name of an owner, or uid:N"`
}

type (
	keyInput  struct{ Body api.KeyRequest }
	keysInput struct {
		Owner string `query:"owner" maxLength:"63" doc:"Only of this owner."`
	}
	ownerInput struct {
		OwnerTarget
		Body api.OwnerChange
	}
	auditInput struct {
		Owner  string `query:"owner" maxLength:"63" doc:"Only what this owner did."`
		Object string `query:"object" maxLength:"200" doc:"Only what was about this, as its caller named it."`
		Before int64  `query:"before" minimum:"0" doc:"next of the page before."`
		Limit  int    `query:"limit" minimum:"1" maximum:"1000" doc:"At most this many; 100 when absent."`
	}
	verifyInput struct {
		Seq  int64  `query:"seq" minimum:"0" doc:"A row whose hash is known from elsewhere."`
		Hash string `query:"hash" maxLength:"64" doc:"That hash."`
	}
)

func (s *server) accessRoutes() {
	register(s, huma.Operation{
		OperationID: "whoami", Method: http.MethodGet, Path: "/v1/whoami",
		Summary: "Who the daemon takes you for, and what bounds you", Tags: []string{"access"},
	}, func(ctx context.Context, _ *empty) (*result[api.Whoami], error) {
		c, _ := access.Of(ctx)
		q, err := s.office.Quota(ctx, c.Owner)
		return wrap(api.Whoami{Owner: c.Owner, Role: c.Role, Key: c.Key, From: c.From, Quota: api.QuotaOf(q)}, err)
	})
	register(s, huma.Operation{
		OperationID: "create-key", Method: http.MethodPost, Path: "/v1/keys", DefaultStatus: http.StatusCreated,
		Summary: "Make an API key; the answer alone has its secret", Tags: []string{"access"},
	}, func(ctx context.Context, in *keyInput) (*result[access.Key], error) {
		req := access.KeyRequest{Owner: in.Body.Owner, Role: in.Body.Role, Name: in.Body.Name}
		if in.Body.ExpiresAt != nil {
			req.Expires = *in.Body.ExpiresAt
		}
		return wrap(s.office.CreateKey(ctx, req))
	})
	register(s, huma.Operation{
		OperationID: "list-keys", Method: http.MethodGet, Path: "/v1/keys",
		Summary: "List the API keys, revoked ones too", Tags: []string{"access"},
	}, func(_ context.Context, in *keysInput) (*result[api.KeyList], error) {
		return wrap(api.KeyList{Items: orEmpty(s.office.Keys(in.Owner))}, nil)
	})
	register(s, huma.Operation{
		OperationID: "revoke-key", Method: http.MethodDelete, Path: "/v1/keys/{key}",
		Summary: "Make a key work no more, at once and for good; what is in flight with it is cut", Tags: []string{"access"},
	}, func(ctx context.Context, in *KeyTarget) (*result[access.Key], error) {
		return wrap(s.office.RevokeKey(ctx, in.ID))
	})
	s.ownerRoutes()
	s.auditRoutes()
}

func (s *server) ownerRoutes() {
	register(s, huma.Operation{
		OperationID: "list-owners", Method: http.MethodGet, Path: "/v1/owners",
		Summary: "List the owners", Tags: []string{"access"},
	}, func(context.Context, *empty) (*result[api.OwnerList], error) {
		list := api.OwnerList{Items: []api.Owner{}}
		for _, w := range s.office.Owners() {
			list.Items = append(list.Items, s.shown(w))
		}
		return wrap(list, nil)
	})
	register(s, huma.Operation{
		OperationID: "get-owner", Method: http.MethodGet, Path: "/v1/owners/{owner}",
		Summary: "One owner", Tags: []string{"access"},
	}, func(_ context.Context, in *OwnerTarget) (*result[api.Owner], error) {
		w, err := s.office.Owner(in.Name)
		return wrap(s.shown(w), err)
	})
	register(s, huma.Operation{
		OperationID: "set-owner", Method: http.MethodPut, Path: "/v1/owners/{owner}",
		Summary: "Change an owner, or make one (not by disabled); what is absent stays as it is", Tags: []string{"access"},
	}, func(ctx context.Context, in *ownerInput) (*result[api.Owner], error) {
		change := access.OwnerChange{Disabled: in.Body.Disabled}
		if in.Body.Role != "" {
			change.Role = &in.Body.Role
		}
		if in.Body.Quota != nil {
			change.Quota = in.Body.Quota.Apply
		}
		w, err := s.office.SetOwner(ctx, in.Name, change)
		return wrap(s.shown(w), err)
	})
	register(s, huma.Operation{
		OperationID: "remove-owner", Method: http.MethodDelete, Path: "/v1/owners/{owner}", DefaultStatus: http.StatusNoContent,
		Summary: "Forget an owner and revoke its keys; what it has stays, for whoever gets the name next", Tags: []string{"access"},
	}, func(ctx context.Context, in *OwnerTarget) (*empty, error) {
		return nil, s.office.RemoveOwner(ctx, in.Name)
	})
}

// shown is an owner as the API shows it.
func (s *server) shown(w access.Owner) api.Owner {
	out := api.Owner{Name: w.Name, Role: w.Role, Quota: api.QuotaOf(w.Quota), CreatedAt: w.CreatedAt, Disabled: w.Disabled}
	for _, k := range s.office.Keys(w.Name) {
		if k.RevokedAt == nil && (k.ExpiresAt == nil || time.Now().Before(*k.ExpiresAt)) {
			out.Keys++
		}
	}
	return out
}

func (s *server) auditRoutes() {
	if s.audit == nil {
		return
	}
	register(s, huma.Operation{
		OperationID: "list-audit", Method: http.MethodGet, Path: "/v1/audit",
		Summary: "Who changed what, the newest first", Tags: []string{"access"},
	}, func(ctx context.Context, in *auditInput) (*result[api.AuditList], error) {
		limit := in.Limit
		if limit == 0 {
			limit = 100
		}
		rows, err := s.audit.Audit(ctx, access.AuditQuery{Owner: in.Owner, Object: in.Object, Before: in.Before, Limit: limit})
		list := api.AuditList{Items: orEmpty(rows)}
		if n := len(rows); n == limit && rows[n-1].Seq > 1 {
			list.Next = rows[n-1].Seq
		}
		return wrap(list, err)
	})
	register(s, huma.Operation{
		OperationID: "verify-audit", Method: http.MethodGet, Path: "/v1/audit/verify",
		Summary: "Compute the chain of the audit anew, and tell the first row that is not as it was written", Tags: []string{"access"},
	}, func(ctx context.Context, in *verifyInput) (*result[access.AuditCheck], error) {
		var want access.Sum
		if (in.Seq == 0) != (in.Hash == "") {
			return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_hash", "give both the number of a row and its hash, or neither")
		}
		if in.Hash != "" {
			if err := want.UnmarshalText([]byte(in.Hash)); err != nil {
				return nil, err
			}
		}
		return wrap(s.audit.VerifyAudit(ctx, in.Seq, want))
	})
}
