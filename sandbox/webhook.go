package sandbox

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Webhook is somebody outside who is told of events by HTTP.
type Webhook struct {
	ID        string        `json:"id"`
	URL       string        `json:"url"`
	Owner     string        `json:"owner,omitempty" doc:"Whose it is."`
	Project   string        `json:"project,omitempty" doc:"Set by a project's settings, and removed with them: told of that project's events alone."`
	Filter    WebhookFilter `json:"filter,omitzero" doc:"Which events it wants; nothing: all."`
	CreatedAt time.Time     `json:"created_at"`
	Secret    string        `json:"secret,omitempty" doc:"Key of the signatures; shown by the creation alone."`

	Cursor      int64      `json:"cursor" doc:"Events up to this seq are done with."`
	Waiting     int        `json:"waiting" doc:"Events known to be due, at most a few hundred."`
	Failures    int        `json:"failures" doc:"Attempts in a row that failed."`
	LastError   string     `json:"last_error,omitempty" doc:"What the last failed attempt said."`
	DeliveredAt *time.Time `json:"delivered_at,omitempty" doc:"When this daemon last delivered an event."`
	Dead        int        `json:"dead" doc:"Events given up and kept."`
}

// WebhookFilter chooses events. What it names must all hold.
type WebhookFilter struct {
	Events  []string          `json:"events,omitempty" maxItems:"32" doc:"Types, with * for any characters: sandbox.*, process.exited."`
	Sandbox ID                `json:"sandbox,omitempty" maxLength:"14" doc:"Only of this sandbox."`
	Owner   string            `json:"owner,omitempty" maxLength:"128" doc:"Only of sandboxes of this owner."`
	Labels  map[string]string `json:"labels,omitempty" maxProperties:"16" doc:"Only of sandboxes with these labels."`
}

// WebhookRequest asks for a webhook.
type WebhookRequest struct {
	URL    string        `json:"url" minLength:"8" maxLength:"2000" doc:"http:// or https://; redirects are not followed."`
	Secret string        `json:"secret,omitempty" maxLength:"200" doc:"Key of the signatures; without one it is drawn."`
	Filter WebhookFilter `json:"filter,omitzero"`
	Owner  string        `json:"-"`
	Actor  string        `json:"-"`
}

// String keeps the secret out of whatever prints a request.
func (r WebhookRequest) String() string { return "webhook " + r.URL }

// GoString does what String does for %#v.
func (r WebhookRequest) GoString() string { return r.String() }

// Validate checks what can be judged without the daemon. Class ErrInvalid.
func (r WebhookRequest) Validate() error {
	if err := ValidateWebhookURL(r.URL); err != nil {
		return err
	}
	bad := func(format string, args ...any) error { return Errorf(ErrInvalid, "invalid_webhook", format, args...) }
	if len(r.Secret) > 200 || r.Secret != "" && len(r.Secret) < 8 {
		return bad("the secret of a webhook has 8 to 200 bytes")
	}
	f := r.Filter
	if len(f.Events) > 32 || len(f.Labels) > 16 {
		return bad("a webhook's filter has at most 32 patterns of events and 16 labels")
	}
	if f.Owner != "" {
		if err := ValidateOwner(f.Owner); err != nil {
			return err
		}
	}
	for _, p := range f.Events {
		if p == "" || len(p) > 64 || strings.Trim(p, "abcdefghijklmnopqrstuvwxyz0123456789_.-*?") != "" {
			return bad("event pattern %.70q: use a type, with * for any characters, as sandbox.*", p)
		}
	}
	if f.Sandbox != "" {
		if _, err := ParseID(string(f.Sandbox)); err != nil {
			return err
		}
	}
	return nil
}

// ValidateWebhookURL checks the form of a URL. Class ErrInvalid.
func ValidateWebhookURL(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil || len(s) > 2000 || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https":
		return Errorf(ErrInvalid, "invalid_webhook", "webhook %.80q: use an http:// or https:// URL of at most 2000 bytes", s)
	case u.User != nil || u.Fragment != "":
		return Errorf(ErrInvalid, "invalid_webhook", "the URL of a webhook has no user, password or fragment: the signature shows who sends")
	}
	return nil
}

// WantsType reports whether a filter asks for a type of event.
func (f WebhookFilter) WantsType(kind string) bool {
	return len(f.Events) == 0 || slices.ContainsFunc(f.Events, func(p string) bool {
		ok, err := path.Match(p, kind) // no type has a slash, the one character a * would stop at
		return ok && err == nil
	})
}

// OfSandbox reports whether the record of an event's sandbox must be looked
// at to judge it.
func (f WebhookFilter) OfSandbox() bool { return f.Owner != "" || len(f.Labels) > 0 }

// WantsSandbox judges the record of an event's sandbox.
func (f WebhookFilter) WantsSandbox(owner string, labels map[string]string) bool {
	if f.Owner != "" && f.Owner != owner {
		return false
	}
	for k, v := range f.Labels {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// WebhookMessage is the body of a delivery.
type WebhookMessage struct {
	ID      string            `json:"id" doc:"The same each time this is sent to this webhook: drop what you have seen."`
	Webhook string            `json:"webhook"`
	Type    string            `json:"type" doc:"The event's; or webhook.gap, webhook.test."`
	Time    time.Time         `json:"time"`
	Seq     int64             `json:"seq,omitempty"`
	Sandbox ID                `json:"sandbox,omitempty"`
	Actor   string            `json:"actor,omitempty"`
	Data    map[string]string `json:"data,omitempty"`
}

// The types of messages that are no events.
const (
	WebhookGap  = "webhook.gap"  // events after data.after up to data.upto were deleted before they could be sent
	WebhookTest = "webhook.test" // somebody asked for it
)

// Delivery is one attempt to deliver.
type Delivery struct {
	ID       string    `json:"id"`
	Type     string    `json:"type"`
	OK       bool      `json:"ok"`
	Status   int       `json:"status,omitempty" doc:"HTTP status of the answer; 0: there was none."`
	Error    string    `json:"error,omitempty"`
	TookMS   int64     `json:"took_ms"`
	At       time.Time `json:"at"`
	Attempts int       `json:"attempts"`
}

// DeadLetter is an event whose delivery was given up.
type DeadLetter struct {
	Webhook  string    `json:"webhook"`
	Event    Event     `json:"event"`
	Attempts int       `json:"attempts"`
	Error    string    `json:"error"`
	At       time.Time `json:"at" doc:"When it was given up."`
}

// Headers of a delivery.
const (
	WebhookSignatureHeader = "Sandboxd-Signature" // t=SECONDS,v1=HEX
	WebhookIDHeader        = "Sandboxd-Event-Id"
	WebhookTypeHeader      = "Sandboxd-Event"
	WebhookHeader          = "Sandboxd-Webhook"
	WebhookAttemptHeader   = "Sandboxd-Attempt"
)

// SignWebhook returns the signature of a body sent at a time: the HMAC-SHA256
// of "SECONDS.BODY" under the webhook's secret (RFC 2104).
func SignWebhook(secret string, at time.Time, body []byte) string {
	t := strconv.FormatInt(at.Unix(), 10)
	return "t=" + t + ",v1=" + hex.EncodeToString(webhookMAC(secret, t, body))
}

func webhookMAC(secret, t string, body []byte) []byte {
	h := hmac.New(sha256.New, []byte(secret))
	h.Write([]byte(t + "."))
	h.Write(body)
	return h.Sum(nil)
}

// VerifyWebhook checks a signature, and that it is at most tolerance old or
// early at now; a tolerance of 0 lets any age pass. Class ErrForbidden.
func VerifyWebhook(secret, signature string, body []byte, now time.Time, tolerance time.Duration) error {
	var t string
	var macs []string
	for part := range strings.SplitSeq(signature, ",") {
		switch k, v, _ := strings.Cut(strings.TrimSpace(part), "="); k {
		case "t":
			t = v
		case "v1":
			macs = append(macs, v)
		}
	}
	seconds, err := strconv.ParseInt(t, 10, 64)
	want := webhookMAC(secret, t, body)
	good := err == nil && slices.ContainsFunc(macs, func(m string) bool {
		got, err := hex.DecodeString(m)
		return err == nil && hmac.Equal(got, want)
	})
	if !good {
		return Errorf(ErrForbidden, "bad_signature", "the signature is not that of this body under this secret")
	}
	if age := now.Sub(time.Unix(seconds, 0)).Abs(); tolerance > 0 && age > tolerance {
		return Errorf(ErrForbidden, "old_signature", "the signature is %s away from now: it may be a repetition", age.Round(time.Second))
	}
	return nil
}

// NewWebhookID returns a fresh id: "wh" and 12 characters.
func NewWebhookID() string { return "wh" + randomName() }

// NewWebhookSecret returns a fresh secret of 180 random bits.
func NewWebhookSecret() string { return "whsec_" + randomName() + randomName() + randomName() }
