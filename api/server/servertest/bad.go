package servertest

import (
	"fmt"
	"strings"
)

// BadInput is a request that must be refused.
type BadInput struct {
	Method, Path, Body string
	Header             map[string]string
	Status             int
	Code               string
}

// BadInputs returns requests that any daemon must refuse, with the status and
// code it must refuse them with. They need one running sandbox named "box",
// in which /tmp is a directory and /tmp/f a file.
func BadInputs() []BadInput {
	var all []BadInput
	add := func(method, path, body string, status int, code string) {
		all = append(all, BadInput{Method: method, Path: path, Body: body, Status: status, Code: code})
	}
	bad := func(method, path, body string) { add(method, path, body, 400, "invalid_request") }

	// Bodies of create that are not what they should be.
	bad("POST", "/v1/sandboxes", "")
	for _, body := range []string{
		"{", "[]", "null", "true", "7", `"x"`, "{}{}", "{} x", `{"name":}`, `{'name':'x'}`, "\x00", "\xff\xfe", `{"name":"x",}`,
		strings.Repeat("[", 20000), `{"limits":` + strings.Repeat(`{"limits":`, 5000),
		`{"nme":"x"}`, `{"Name":"x"}`, `{"NAME":"x"}`, `{"spec":{}}`, `{"limits":{"memory":1}}`, `{"network":{"mod":"off"}}`, `{"limits":{"Memory_bytes":9999999}}`,
	} {
		bad("POST", "/v1/sandboxes", body)
	}
	// Each field with values of wrong types.
	for field, wrong := range map[string][]string{
		"name": {"1", "true", "[]", "{}"}, "image": {"1", "[]", "{}"}, "hostname": {"1", "{}"}, "env": {"1", `"A=b"`, `["A=b"]`, `{"A":1}`, `{"A":null}`, `{"A":{}}`},
		"workdir": {"1", "[]"}, "user": {"0", "[]"}, "capabilities": {"1", `"all"`, `"Root"`, `["root"]`},
		"limits": {"1", "[]", `"none"`}, "network": {"1", `"off"`, "[]"}, "ttl_seconds": {`"60"`, "1.5", "true", "-1", "31536001", "1e30"},
		"idle_timeout_seconds": {`"60"`, "1.5", "-1", "31536001"}, "labels": {"1", "[]", `{"a":1}`, `{"a":null}`},
	} {
		for _, v := range wrong {
			bad("POST", "/v1/sandboxes", fmt.Sprintf(`{%q:%s}`, field, v))
		}
	}
	for field, wrong := range map[string][]string{
		"cpus": {`"2"`, "-1", "4097", "true"}, "cpu_weight": {"-1", "10001", "1.5", `"1"`}, "memory_bytes": {"-1", `"512m"`, "1.5", "1e40"},
		"pids": {"-1", "4194305", `"1"`}, "io_read_bps": {"-1", `"1"`, "0.5"}, "io_write_bps": {"-1", `"1"`}, "io_read_iops": {"-1", "[]"}, "io_write_iops": {"-1", "{}"},
		"open_files": {"-1", "1048577", `"1"`}, "disk_bytes": {"-1", `"2g"`}, "disk_inodes": {"-1", `"1"`},
	} {
		for _, v := range wrong {
			bad("POST", "/v1/sandboxes", fmt.Sprintf(`{"limits":{%q:%s}}`, field, v))
		}
	}
	bad("POST", "/v1/sandboxes", `{"network":{"mode":"bridge"}}`)
	bad("POST", "/v1/sandboxes", `{"network":{"dns":["nine"]}}`)
	bad("POST", "/v1/sandboxes", `{"network":{"dns":[1]}}`)
	bad("POST", "/v1/sandboxes", `{"network":{"dns":["1.1.1.1","1.1.1.2","1.1.1.3","1.1.1.4"]}}`)
	bad("POST", "/v1/sandboxes", `{"name":"`+strings.Repeat("a", 64)+`"}`)
	bad("POST", "/v1/sandboxes", `{"image":"`+strings.Repeat("a", 513)+`"}`)
	// What has the right form and cannot be.
	for body, code := range map[string]string{
		`{"name":"Box"}`: "invalid_name", `{"name":"-x"}`: "invalid_name", `{"name":"a b"}`: "invalid_name", `{"name":"../x"}`: "invalid_name",
		`{"name":"sbaaaaaaaaaaaa"}`: "invalid_name", `{"name":"é"}`: "invalid_name", `{"image":"A/B"}`: "invalid_image_name", `{"image":"../host"}`: "invalid_image_name",
		`{"image":"a:"}`: "invalid_image_name", `{"image":"/"}`: "invalid_image_name", `{"hostname":"-a"}`: "invalid_hostname", `{"hostname":"a_b"}`: "invalid_hostname",
		`{"env":{"":"x"}}`: "invalid_env", `{"env":{"A=B":"x"}}`: "invalid_env", `{"env":{"A":"\u0000"}}`: "invalid_env",
		`{"workdir":"tmp"}`: "invalid_workdir", `{"workdir":"./x"}`: "invalid_workdir", `{"user":"a/b"}`: "invalid_user", `{"user":"1:2:3"}`: "invalid_user", `{"user":"a b"}`: "invalid_user",
		`{"limits":{"memory_bytes":1}}`: "invalid_limits", `{"limits":{"cpus":0.001}}`: "invalid_limits", `{"limits":{"disk_bytes":10}}`: "invalid_limits",
		`{"limits":{"open_files":1}}`: "invalid_limits", `{"limits":{"disk_inodes":1}}`: "invalid_limits",
		`{"labels":{"":"x"}}`: "invalid_labels", `{"labels":{"a=b":"x"}}`: "invalid_labels", `{"labels":{"a":"x\ny"}}`: "invalid_labels",
	} {
		add("POST", "/v1/sandboxes", body, 400, code)
	}
	add("POST", "/v1/sandboxes", `{"name":"box"}`, 409, "name_taken")
	badVolumes(bad, add)
	badSecrets(bad, add)
	add("POST", "/v1/sandboxes", `{"image":"nope"}`, 404, "image_not_found")
	add("POST", "/v1/sandboxes", `{"name":"`+strings.Repeat("a", 1<<20)+`"}`, 413, "body_too_large")
	add("POST", "/v1/sandboxes/box/processes", `{"argv":["`+strings.Repeat("a", 1<<20)+`"]}`, 413, "body_too_large")
	all = append(all,
		BadInput{"POST", "/v1/sandboxes", "<x/>", map[string]string{"Content-Type": "text/xml"}, 400, "unsupported_media_type"},
		BadInput{"POST", "/v1/sandboxes", "{}", map[string]string{"Content-Type": "application/cbor"}, 400, "unsupported_media_type"},
		BadInput{"POST", "/v1/sandboxes", "{}", map[string]string{"Idempotency-Key": strings.Repeat("k", 256)}, 400, "invalid_request"})

	// Lists.
	for _, q := range []string{"limit=0", "limit=-1", "limit=1001", "limit=many", "limit=1.5", "all=perhaps", "cursor=" + strings.Repeat("c", 257), "nonsense=1", "Limit=5", "name=" + strings.Repeat("n", 64)} {
		bad("GET", "/v1/sandboxes?"+q, "")
	}
	add("GET", "/v1/sandboxes?status=dead", "", 400, "invalid_status")
	add("GET", "/v1/sandboxes?status=running,dead", "", 400, "invalid_status")
	add("GET", "/v1/sandboxes?status=Running", "", 400, "invalid_status")
	add("GET", "/v1/sandboxes?label=x", "", 400, "invalid_label")
	add("GET", "/v1/sandboxes?label==x", "", 400, "invalid_label")
	add("GET", "/v1/sandboxes?cursor=nonsense", "", 400, "invalid_cursor")

	// Refs: of a form no sandbox can have, and of none that is.
	for _, ref := range []string{"Box", "a b", "%00", "-x", ".", "..x", "a\nb", "é", strings.Repeat("a", 64), "a;b", "a'b", "a*"} {
		if ref != "." {
			bad("GET", "/v1/sandboxes/"+ref, "")
		}
		if ref != "." {
			bad("DELETE", "/v1/sandboxes/"+ref, "")
		}
	}
	for _, tail := range []string{"", "/usage", "/processes", "/processes/p1", "/processes/p1/output", "/output", "/files?path=/x", "/files/stat?path=/x", "/files/list?path=/x", "/files/archive?path=/x", "/files/watch?path=/x"} {
		add("GET", "/v1/sandboxes/absent"+tail, "", 404, "sandbox_not_found")
		add("GET", "/v1/sandboxes/sbaaaaaaaaaaaa"+tail, "", 404, "sandbox_not_found")
	}
	for _, verb := range []string{"pause", "resume", "stop", "start", "reset"} {
		add("POST", "/v1/sandboxes/absent/"+verb, "", 404, "sandbox_not_found")
		add("GET", "/v1/sandboxes/box/"+verb, "", 405, "method_not_allowed")
	}
	add("DELETE", "/v1/sandboxes/absent", "", 404, "sandbox_not_found")
	add("POST", "/v1/sandboxes/box/resume2", "", 404, "no_such_route")
	add("PUT", "/v1/sandboxes/box", "", 405, "method_not_allowed")
	for _, body := range []string{"", "[]", `{"ttl_seconds":-1}`, `{"ttl_seconds":1.5}`, `{"ttl_seconds":31536001}`, `{"on_deadline":"explode"}`, `{"actor":"x"}`, `{"hold":true}`} {
		bad("PATCH", "/v1/sandboxes/box", body)
	}
	add("PATCH", "/v1/sandboxes/box", "{}", 400, "invalid_deadline")
	add("PATCH", "/v1/sandboxes/absent", `{"ttl_seconds":60}`, 404, "sandbox_not_found")
	add("PATCH", "/v1/sandboxes", "", 405, "method_not_allowed")
	add("DELETE", "/v1/sandboxes", "", 405, "method_not_allowed")
	for _, p := range []string{"/", "/v2/sandboxes", "/v1", "/v1/sandbox", "/favicon.ico", "/v1/sandboxes/box/x/y", "/openapi"} {
		add("GET", p, "", 404, "no_such_route")
	}

	// Processes.
	const procs, exec = "/v1/sandboxes/box/processes", "/v1/sandboxes/box/exec"
	for _, body := range []string{"", "{}", `{"argv":[]}`, `{"argv":"ls"}`, `{"argv":[1]}`, `{"cmd":["ls"]}`, `{"argv":["ls"],"tty":true}`, `{"argv":["ls"],"tty":{"cols":-1,"rows":1}}`, `{"argv":["ls"],"tty":{"cols":70000,"rows":1}}`, `{"argv":["ls"],"timeout_seconds":-1}`, `{"argv":["ls"],"output_bytes":67108865}`, `{"argv":["ls"],"stdin":"yes"}`, `{"argv":["ls"],"tag":"` + strings.Repeat("t", 64) + `"}`} {
		bad("POST", procs, body)
		bad("POST", exec, body)
		bad("POST", "/v1/run", `{"process":`+body+`}`)
	}
	for body, code := range map[string]string{`{"argv":[""]}`: "invalid_argv", `{"argv":null}`: "invalid_argv", `{"argv":["a\u0000b"]}`: "invalid_argv", `{"argv":["ls"],"workdir":"x"}`: "invalid_workdir", `{"argv":["ls"],"user":"a/b"}`: "invalid_user", `{"argv":["ls"],"env":{"":"x"}}`: "invalid_env", `{"argv":["ls"],"timeout_seconds":1e12}`: "invalid_timeout"} {
		add("POST", procs, body, 400, code)
		add("POST", exec, body, 400, code)
		add("POST", "/v1/run", `{"sandbox":{},"process":`+body+`}`, 400, code)
	}
	for path, form := range map[string]string{exec: "%s", "/v1/run": `{"process":%s}`} {
		for _, body := range []string{`{"argv":["cat"],"input":1}`, `{"argv":["cat"],"input":[1]}`, `{"argv":["cat"],"input":"no base64"}`, `{"argv":["cat"],"input":"YQ"}`, `{"argv":["cat"],"Input":"YQ=="}`, `{"argv":["cat"]}{}`} {
			bad("POST", path, fmt.Sprintf(form, body))
		}
		add("POST", path, fmt.Sprintf(form, `{"argv":["cat"],"stdin":true}`), 400, "invalid_stdin")
		add("POST", path, fmt.Sprintf(form, `{"argv":["cat"],"input":"`+strings.Repeat("YWFh", 1<<20/3+1)+`"}`), 413, "input_too_large")
		add("POST", path, fmt.Sprintf(form, `{"argv":["cat"],"input":"`+strings.Repeat("YWFh", 1<<20)+`"}`), 413, "body_too_large")
		add("POST", path, fmt.Sprintf(form, `{"argv":["nope"]}`), 400, "command_not_found")
	}
	for _, body := range []string{"", "{}", "[]", `{"process":[]}`, `{"argv":["echo"]}`, `{"process":{"argv":["echo"]},"sandbox":"box"}`, `{"process":{"argv":["echo"]},"sandbox":{"nme":"x"}}`, `{"process":{"argv":["echo"]},"sandbox":{"limits":{"pids":-1}}}`, `{"process":{"argv":["echo"]},"name":"x"}`} {
		bad("POST", "/v1/run", body)
	}
	add("POST", "/v1/run", `{"process":{"argv":["echo"]},"sandbox":{"name":"Box"}}`, 400, "invalid_name")
	add("POST", "/v1/run", `{"process":{"argv":["echo"]},"sandbox":{"name":"box"}}`, 409, "name_taken")
	add("POST", "/v1/run", `{"process":{"argv":["echo"]},"sandbox":{"image":"nope"}}`, 404, "image_not_found")
	add("GET", "/v1/run", "", 400, "not_a_websocket")
	add("DELETE", "/v1/run", "", 405, "method_not_allowed")
	all = append(all,
		BadInput{"POST", "/v1/run", `{"process":{"argv":["echo"]}}`, map[string]string{"Idempotency-Key": strings.Repeat("k", 256)}, 400, "invalid_request"},
		BadInput{"POST", exec, `{"argv":["echo"]}`, map[string]string{"Content-Type": "text/plain"}, 400, "unsupported_media_type"})
	bad("POST", "/v1/sandboxes/Box/exec", `{"argv":["echo"]}`)
	add("POST", "/v1/sandboxes/absent/exec", `{"argv":["echo"]}`, 404, "sandbox_not_found")
	add("POST", procs, `{"argv":["nope"]}`, 400, "command_not_found")
	add("POST", "/v1/sandboxes/absent/processes", `{"argv":["echo"]}`, 404, "sandbox_not_found")
	for _, pid := range []string{"1", "p", "px", "P1", "p-1", "p1x", strings.Repeat("p1", 20)} {
		bad("GET", procs+"/"+pid, "")
	}
	add("GET", procs+"/p99", "", 404, "process_not_found")
	add("GET", procs+"/p99/output", "", 404, "process_not_found")
	add("POST", procs+"/p99/signal", `{"signal":"SIGTERM"}`, 404, "process_not_found")
	for _, body := range []string{"", "{}", `{"signal":""}`, `{"signal":9}`, `{"signal":"` + strings.Repeat("S", 17) + `"}`, `{"sig":"SIGTERM"}`} {
		bad("POST", procs+"/p1/signal", body)
	}
	for _, q := range []string{"offset=x", "offset=-2", "offset=99999999999999999999", "stream=both", "follow=maybe", "tail=5"} {
		bad("GET", procs+"/p1/output?"+q, "")
	}
	add("GET", "/v1/sandboxes/box/exec", "", 400, "not_a_websocket")
	add("GET", procs+"/p1/attach", "", 400, "not_a_websocket")
	bad("GET", procs+"/p1/attach?offset=-2", "")

	// Files.
	const files = "/v1/sandboxes/box/files"
	bad("POST", files+"/mkdir", "{\"path\":\"/a\xff\"}")
	bad("POST", files+"/chmod", `{"path":"/a\ud800","mode":"600"}`)
	bad("POST", "/v1/sandboxes/box/processes", `{"argv":["rm","/a\udfff"]}`)
	bad("POST", "/v1/sandboxes/box/exec", "{\"argv\":[\"sh\"],\"env\":{\"X\":\"\xff\"}}")
	for _, tail := range []string{"", "/stat", "/list", "/archive", "/watch"} {
		bad("GET", files+tail, "")
		bad("GET", files+tail+"?path=/a%FE", "")
		add("GET", files+tail+"?path=/a%EF%BF%BD", "", 400, "invalid_path")
		bad("GET", files+tail+"?path=", "")
		bad("GET", files+tail+"?path=/"+strings.Repeat("a", 4096), "")
		add("GET", files+tail+"?path=relative", "", 400, "invalid_path")
		add("GET", files+tail+"?path=..%2Fetc", "", 400, "invalid_path")
		add("GET", files+tail+"?path=/a%00b", "", 400, "invalid_path")
		add("GET", files+tail+"?path=/absent", "", 404, "file_not_found")
	}
	bad("GET", files+"/list?path=/&depth=0", "")
	bad("GET", files+"/list?path=/&depth=65", "")
	bad("PUT", files+"?path=/x&mode=999", "x")
	bad("PUT", files+"?path=/x&mode=rw", "x")
	bad("PUT", files, "x")
	add("PUT", files+"?path=x", "x", 400, "invalid_path")
	add("PUT", files+"/archive?path=/", "not a tar", 400, "bad_archive")
	add("DELETE", files+"?path=/absent", "", 404, "file_not_found")
	add("DELETE", files+"?path=/", "", 409, "file_busy")
	add("GET", files+"?path=/tmp", "", 400, "is_a_directory")
	for _, body := range []string{"", "{}", `{"path":""}`, `{"path":"/x","mode":"9"}`, `{"path":"/x","mode":755}`, `{"path":"/x","recursive":true}`} {
		bad("POST", files+"/mkdir", body)
	}
	for _, body := range []string{"{}", `{"from":"/a"}`, `{"to":"/a"}`, `{"from":"/a","to":""}`} {
		bad("POST", files+"/move", body)
	}
	add("POST", files+"/move", `{"from":"a","to":"/b"}`, 400, "invalid_path")
	add("POST", files+"/move", `{"from":"/a","to":"b"}`, 400, "invalid_path")
	add("POST", files+"/move", `{"from":"/a","to":"/b"}`, 404, "file_not_found")
	bad("POST", files+"/chmod", `{"path":"/x"}`)
	add("POST", files+"/chmod", `{"path":"/x","mode":"0644"}`, 404, "file_not_found")
	for _, r := range []string{"bytes=", "bytes=-5", "bytes=5-1", "lines=0-1", "bytes=0-1,3-4", "0-5", "bytes=a-b", "bytes=99999999999999999999-"} {
		all = append(all, BadInput{"GET", files + "?path=/tmp/f", "", map[string]string{"Range": r}, 400, "invalid_range"})
	}

	// Images and events.
	add("POST", "/v1/images", "x", 400, "image_name_missing")
	for _, name := range []string{"A", "..", "a%20b", "a//b", "a:"} {
		add("POST", "/v1/images?name="+name, "x", 400, "invalid_image_name")
	}
	add("GET", "/v1/images/absent", "", 404, "image_not_found")
	add("GET", "/v1/images/deb/ian:12", "", 404, "image_not_found")
	add("GET", "/v1/images/UPPER", "", 400, "invalid_image_name")
	add("DELETE", "/v1/images/absent", "", 404, "image_not_found")
	for _, verb := range []string{"pull", "push", "export", "tag", "prune"} {
		for _, body := range []string{"", "[]", "1", `{"nope":1}`} {
			bad("POST", "/v1/images/"+verb, body)
		}
	}
	for _, body := range []string{`{}`, `{"reference":""}`, `{"reference":1}`, `{"reference":"x","auth":"me"}`, `{"reference":"x","auth":{"user":"me"}}`, `{"reference":"x","plain_http":1}`} {
		bad("POST", "/v1/images/pull", body)
	}
	for _, ref := range []string{"UPPER", "a//b", "a:", "a@sha256:12", "-x.example/a", "host:port/a", "https://x.example/a", "../a", "a b"} {
		add("POST", "/v1/images/pull", `{"reference":"`+ref+`"}`, 400, "invalid_image_name")
	}
	add("POST", "/v1/images/pull", `{"reference":"a","platform":"linux"}`, 400, "invalid_platform")
	add("POST", "/v1/images/pull", `{"reference":"a","name":"A"}`, 400, "invalid_image_name")
	for _, verb := range []string{"push", "export"} {
		add("POST", "/v1/images/"+verb, `{"source":"absent"}`, 404, "image_not_found")
	}
	bad("POST", "/v1/images/export", `{"source":"host","format":"zip"}`)
	bad("POST", "/v1/images/prune", `{"until_seconds":-1}`)
	add("POST", "/v1/images/tag", `{"source":"absent","name":"x"}`, 404, "image_not_found")
	add("POST", "/v1/images/tag", `{"source":"absent","name":"X"}`, 400, "invalid_image_name")
	for _, q := range []string{"after=x", "after=-2", "limit=0", "limit=1001", "since=yesterday", "since=2026-13-01T00:00:00Z", "type=x"} {
		bad("GET", "/v1/events?"+q, "")
	}
	add("GET", "/v1/events?sandbox=absent", "", 404, "sandbox_not_found")
	all = append(all,
		BadInput{"GET", "/v1/events", "", map[string]string{"Last-Event-ID": "x"}, 400, "invalid_event_id"},
		BadInput{"GET", "/v1/events", "", map[string]string{"Last-Event-ID": "-1"}, 400, "invalid_event_id"})
	return all
}

// badVolumes adds requests about volumes.
func badVolumes(bad func(method, path, body string), add func(method, path, body string, status int, code string)) {
	for _, body := range []string{
		"", "{}", `{"name":""}`, `{"name":1}`, `{"name":"a","size_bytes":-1}`, `{"name":"a","size_bytes":"1g"}`, `{"name":"a","inodes":1.5}`,
		`{"name":"a","owner":"uid:0"}`, `{"name":"a","actor":"uid:0"}`, `{"name":"a","used_bytes":1}`, `{"name":"a","labels":[]}`,
	} {
		bad("POST", "/v1/volumes", body)
	}
	for body, code := range map[string]string{
		`{"name":"A"}`: "invalid_name", `{"name":"../x"}`: "invalid_name", `{"name":"sbaaaaaaaaaaaa"}`: "invalid_name",
		`{"name":"a","size_bytes":1}`: "invalid_limits", `{"name":"a","inodes":1}`: "invalid_limits", `{"name":"a","labels":{"a=b":""}}`: "invalid_labels",
	} {
		add("POST", "/v1/volumes", body, 400, code)
	}
	for _, method := range []string{"GET", "DELETE"} {
		add(method, "/v1/volumes/nope", "", 404, "volume_not_found")
		bad(method, "/v1/volumes/Nope", "")
		bad(method, "/v1/volumes/..%2f..", "")
	}
	add("PATCH", "/v1/volumes/nope", `{"size_bytes":1048576}`, 404, "volume_not_found")
	add("PATCH", "/v1/volumes/nope", `{"size_bytes":1}`, 400, "invalid_limits")
	bad("PATCH", "/v1/volumes/nope", `{"size_bytes":-1}`)
	bad("PATCH", "/v1/volumes/nope", `{"name":"other"}`)
	add("PUT", "/v1/volumes/nope", `{}`, 405, "method_not_allowed")

	for _, mounts := range []string{"1", "{}", `["a:/a"]`, `[{"volume":"a"}]`, `[{"path":1}]`, `[{"volume":"a","path":"/a","mode":"ro"}]`, `[{"volume":"a","path":"/a","read_only":"yes"}]`} {
		bad("POST", "/v1/sandboxes", `{"volumes":`+mounts+`}`)
	}
	for mounts, code := range map[string]string{
		`[{"path":"/a"}]`: "invalid_volumes", `[{"volume":"a","host_path":"/a","path":"/a"}]`: "invalid_volumes",
		`[{"volume":"a","path":"/"}]`: "invalid_volumes", `[{"volume":"a","path":"/a/../b"}]`: "invalid_volumes", `[{"volume":"a","path":"/proc/x"}]`: "invalid_volumes",
		`[{"volume":"../a","path":"/a"}]`: "invalid_name", `[{"host_path":"/srv/../etc","path":"/a"}]`: "invalid_volumes", `[{"host_path":"/","path":"/a"}]`: "invalid_volumes",
	} {
		add("POST", "/v1/sandboxes", `{"volumes":`+mounts+`}`, 400, code)
	}
	add("POST", "/v1/sandboxes", `{"volumes":[{"volume":"nope","path":"/a"}]}`, 404, "volume_not_found")
	add("POST", "/v1/sandboxes", `{"volumes":[{"host_path":"/etc","path":"/a"}]}`, 403, "bind_denied")
}

// badSecrets adds requests about secrets.
func badSecrets(bad func(method, path, body string), add func(method, path, body string, status int, code string)) {
	for _, body := range []string{"", "{}", `{"value":""}`, `{"value":1}`, `{"value":"a","hosts":"b"}`, `{"value":"a","name":"b"}`, `{"value":"a","actor":"uid:0"}`} {
		bad("PUT", "/v1/secrets/a", body)
	}
	for _, body := range []string{`{"value":"a\nb"}`, `{"value":" a"}`, `{"value":"a\u0000"}`, `{"value":"a","hosts":["*"]}`, `{"value":"a","hosts":["A.com"]}`} {
		add("PUT", "/v1/secrets/a", body, 400, "invalid_secret")
	}
	add("PUT", "/v1/secrets/sbaaaaaaaaaaaa", `{"value":"a"}`, 400, "invalid_name")
	bad("PUT", "/v1/secrets/A", `{"value":"a"}`)
	add("DELETE", "/v1/secrets/nope", "", 404, "secret_not_found")
	bad("DELETE", "/v1/secrets/..%2f..", "")
	add("GET", "/v1/secrets/nope", "", 405, "method_not_allowed")
}
