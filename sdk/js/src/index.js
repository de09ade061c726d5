// Client of the sandboxd API. `api` knows every route with its types; the
// other methods are what a document cannot say: streams, events, files.
import createClient from "openapi-fetch";
import { Agent, fetch as undiciFetch } from "undici";

const defaultHost = "unix:///run/sandboxd/sandboxd.sock";

/** An error response. Decide by `code`, show `message`. */
export class SandboxdError extends Error {
  constructor(problem, response) {
    super(problem?.detail || `the server answered ${response?.status}`);
    this.name = "SandboxdError";
    this.status = response?.status ?? 0;
    this.code = problem?.code || "unknown";
    this.reason = problem?.reason;
    this.requestId = problem?.request_id;
    const after = Number(response?.headers?.get("retry-after"));
    this.retryAfter = Number.isFinite(after) && after > 0 ? after : undefined;
  }
}

const problemOf = async (response) => {
  let problem;
  try {
    problem = JSON.parse(await response.text());
  } catch {
    // not ours: a proxy's
  }
  return new SandboxdError(problem, response);
};

const sleep = (ms, signal) =>
  new Promise((resolve, reject) => {
    const end = () => (clearTimeout(timer), reject(signal.reason));
    const timer = setTimeout(() => (signal?.removeEventListener("abort", end), resolve()), ms);
    if (signal?.aborted) end();
    else signal?.addEventListener("abort", end, { once: true });
  });

const mayRepeat = (method, headers) => method === "GET" || method === "HEAD" || headers.has("idempotency-key");

export class Sandboxd {
  /** host: unix:///path.sock, http://… or https://…; apiKey, ca and retries if needed. */
  constructor({ host = process.env.SANDBOX_HOST || defaultHost, apiKey = process.env.SANDBOX_API_KEY, ca, retries = 3 } = {}) {
    const unix = host.startsWith("unix://");
    this.base = unix ? "http://sandboxd" : host.replace(/\/+$/, "");
    this.retries = retries;
    this.headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
    this.agent = new Agent({ connect: unix ? { socketPath: host.slice("unix://".length) } : { ca }, bodyTimeout: 0, headersTimeout: 0 });
    this.api = createClient({ baseUrl: this.base, fetch: (request) => this.#send(request) });
    this.api.use({
      onResponse: async ({ response }) => {
        if (!response.ok) throw await problemOf(response);
      },
    });
  }

  /** Closes the connections. */
  async close() {
    await this.agent.close();
  }

  // A request of openapi-fetch is the platform's; the agent needs undici's.
  async #send(request) {
    const body = request.body ? Buffer.from(await request.arrayBuffer()) : undefined;
    return this.#fetch(request.url, { method: request.method, headers: request.headers, body, signal: request.signal });
  }

  async #fetch(url, { method = "GET", headers = {}, ...rest } = {}) {
    const all = new Headers(headers);
    for (const [k, v] of Object.entries(this.headers)) all.set(k, v);
    for (let attempt = 0; ; attempt++) {
      const last = attempt >= this.retries || !mayRepeat(method, all);
      let wait = Math.random() * Math.min(2000, 100 * 2 ** attempt); // full jitter
      try {
        const response = await undiciFetch(url, { method, headers: Object.fromEntries(all), dispatcher: this.agent, ...rest });
        if (last || (response.status !== 429 && response.status !== 503)) return response;
        const after = Number(response.headers.get("retry-after"));
        if (after > 0) wait += Math.min(after, 60) * 1000;
        await response.arrayBuffer(); // frees the connection
      } catch (err) {
        if (last || rest.signal?.aborted) throw err;
      }
      await sleep(wait, rest.signal);
    }
  }

  async #good(path, init) {
    const response = await this.#fetch(this.base + path, init);
    if (!response.ok) throw await problemOf(response);
    return response;
  }

  #at(ref, rest) {
    return `/v1/sandboxes/${encodeURIComponent(ref)}/${rest}`;
  }

  /** Makes a sandbox; answers when it runs. */
  async create(spec = {}, { idempotencyKey } = {}) {
    const { data } = await this.api.POST("/v1/sandboxes", {
      body: spec,
      params: { header: idempotencyKey ? { "Idempotency-Key": idempotencyKey } : {} },
    });
    return data;
  }

  /** Ends a sandbox and deletes its files; repeating it is fine. */
  async remove(ref) {
    const { data } = await this.api.DELETE("/v1/sandboxes/{ref}", { params: { path: { ref } } });
    return data;
  }

  /** Runs a command and yields its messages: started, output, dropped, exit. */
  async *stream(ref, process, { input, idempotencyKey, signal } = {}) {
    const headers = { "content-type": "application/json" };
    if (idempotencyKey) headers["idempotency-key"] = idempotencyKey;
    const body = JSON.stringify({ ...process, ...(input === undefined ? {} : { input: Buffer.from(input).toString("base64") }) });
    const response = await this.#good(this.#at(ref, "exec"), { method: "POST", headers, body, signal });
    const broken = (err) => (signal?.aborted ? signal.reason : new SandboxdError({ code: "stream_broken", detail: `the stream broke off (${err.message}): attach to its process` }));
    for await (const [kind, data] of frames(response.body, broken)) {
      if (kind === 2) {
        yield { type: "output", stream: data[0] === 2 ? "stderr" : "stdout", offset: Number(data.readBigUInt64BE(1)), data: data.subarray(9) };
        continue;
      }
      const message = JSON.parse(data.toString());
      if (message.type === "exit" && !message.exit) break;
      if (message.type === "error") throw new SandboxdError(message.problem, { status: message.problem?.status });
      if (message.type !== "heartbeat") yield message;
      if (message.type === "exit") return;
    }
    throw new SandboxdError({ code: "stream_broken", detail: "the stream ended before the command did: attach to its process" });
  }

  /** Runs a command to its end: { stdout, stderr, exit, process }. */
  async exec(ref, argv, options = {}) {
    const { input, idempotencyKey, signal, ...process } = options;
    const out = { stdout: [], stderr: [] };
    let exit, started;
    for await (const m of this.stream(ref, { ...process, argv }, { input, idempotencyKey, signal })) {
      if (m.type === "output") out[m.stream].push(m.data);
      else if (m.type === "started") started = m.process;
      else if (m.type === "exit") exit = m.exit;
    }
    return { stdout: Buffer.concat(out.stdout).toString(), stderr: Buffer.concat(out.stderr).toString(), exit, process: started };
  }

  /** Content of a file, as a web stream. */
  async readFile(ref, path) {
    return (await this.#good(this.#at(ref, `files?${new URLSearchParams({ path })}`))).body;
  }

  /** Content of a file, as text. */
  async readText(ref, path) {
    return (await this.#good(this.#at(ref, `files?${new URLSearchParams({ path })}`))).text();
  }

  /** Makes or replaces a file: of text, bytes or a stream. */
  async writeFile(ref, path, content, { mode = 0o644 } = {}) {
    const query = new URLSearchParams({ path, mode: mode.toString(8).padStart(3, "0") });
    const response = await this.#good(this.#at(ref, `files?${query}`), {
      method: "PUT", body: content, duplex: "half", headers: { "content-type": "application/octet-stream" },
    });
    return response.json();
  }

  /** What happens, from now on or after a seq; a broken stream is taken up again. */
  async *events({ after, sandbox, signal } = {}) {
    let id = after === undefined ? undefined : String(after);
    for (let failures = 0; ; ) {
      try {
        const headers = { accept: "text/event-stream", ...(id === undefined ? {} : { "last-event-id": id }) };
        const query = sandbox ? `?${new URLSearchParams({ sandbox })}` : "";
        const response = await this.#good(`/v1/events${query}`, { headers, signal });
        for await (const e of serverSentEvents(response.body)) {
          failures = 0;
          if (e.id !== undefined) id = e.id;
          if (e.event === "error") throw new SandboxdError(JSON.parse(e.data), {});
          if (e.data) yield JSON.parse(e.data);
        }
      } catch (err) {
        if (signal?.aborted) return;
        if ((err instanceof SandboxdError && err.status && err.status < 500 && err.status !== 429) || ++failures > 10) throw err;
      }
      await sleep(Math.random() * Math.min(5000, 100 * 2 ** failures), signal).catch(() => {});
      if (signal?.aborted) return;
    }
  }
}

// frames cuts a process stream: kind (1 byte), length (4 bytes), message.
async function* frames(body, broken) {
  let held = Buffer.alloc(0);
  const chunks = body[Symbol.asyncIterator]();
  for (;;) {
    const { value: chunk, done } = await chunks.next().catch((err) => {
      throw broken(err);
    });
    if (done) return;
    held = held.length ? Buffer.concat([held, chunk]) : Buffer.from(chunk);
    while (held.length >= 5) {
      const length = held.readUInt32BE(1);
      if (length > 16 << 20) throw new SandboxdError({ code: "broken_answer", detail: "a frame of the stream is too long" });
      if (held.length < 5 + length) break;
      yield [held[0], held.subarray(5, 5 + length)];
      held = held.subarray(5 + length);
    }
  }
}

async function* serverSentEvents(body) {
  let held = "";
  const text = new TextDecoder();
  for await (const chunk of body) {
    held += text.decode(chunk, { stream: true });
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const e = {};
      for (const line of held.slice(0, end).split("\n")) {
        const at = line.indexOf(":");
        if (at > 0) e[line.slice(0, at)] = line.slice(at + 1).replace(/^ /, "");
      }
      if (Object.keys(e).length) yield e;
    }
  }
}
