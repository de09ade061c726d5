// Runs against the daemon that SANDBOX_HOST names.
import assert from "node:assert/strict";
import { after, test } from "node:test";
import { Sandboxd, SandboxdError } from "../src/index.js";

const d = new Sandboxd();
const made = [];
after(async () => {
  for (const id of made) await d.remove(id);
  await d.close();
});

const create = async (spec, options) => {
  const sb = await d.create(spec, options);
  made.push(sb.id);
  return sb;
};

test("a sandbox from nothing to gone", async () => {
  const sb = await create({ name: "js", labels: { from: "js" } }, { idempotencyKey: "js-1" });
  assert.equal(sb.status, "running");
  assert.equal((await d.create({ name: "js", labels: { from: "js" } }, { idempotencyKey: "js-1" })).id, sb.id);
  const run = await d.exec("js", ["sh", "-c", "read x; echo got $x; echo no >&2; exit 3"], { input: "this\n" });
  assert.deepEqual([run.stdout, run.stderr, run.exit.code], ["got this\n", "no\n", 3]);

  const { data: list } = await d.api.GET("/v1/sandboxes", { params: { query: { label: ["from=js"] } } });
  assert.deepEqual(list.items.map((i) => i.id), [sb.id]);
  const { data: none } = await d.api.GET("/v1/sandboxes", { params: { query: { label: ["from!=js"] } } });
  assert.ok(!none.items.some((i) => i.id === sb.id));

  const text = "ä€".repeat(100_000);
  assert.equal((await d.writeFile("js", "/srv/a b.txt", text, { mode: 0o640 })).mode, 0o640);
  assert.equal(await d.readText("js", "/srv/a b.txt"), text);

  const { data: snap } = await d.api.POST("/v1/sandboxes/{ref}/snapshots", { params: { path: { ref: "js" } }, body: { name: "js-clean" } });
  await d.exec("js", ["rm", "/srv/a b.txt"]);
  await d.api.POST("/v1/sandboxes/{ref}/rollback", { params: { path: { ref: "js" } }, body: { snapshot: snap.id } });
  assert.equal(await d.readText("js", "/srv/a b.txt"), text);
});

test("long output comes whole", async () => {
  const sb = await create();
  let bytes = 0;
  for await (const m of d.stream(sb.id, { argv: ["sh", "-c", "head -c 3000000 /dev/zero"], output_bytes: 4 << 20 })) {
    if (m.type === "output") {
      assert.equal(m.offset, bytes);
      bytes += m.data.length;
    }
  }
  assert.equal(bytes, 3_000_000);
});

test("errors have codes", async () => {
  await assert.rejects(d.api.GET("/v1/sandboxes/{ref}", { params: { path: { ref: "absent" } } }), (e) => {
    assert.ok(e instanceof SandboxdError);
    assert.deepEqual([e.status, e.code], [404, "sandbox_not_found"]);
    assert.ok(e.requestId && e.message);
    return true;
  });
  await assert.rejects(d.exec("absent", ["true"]), { code: "sandbox_not_found" });
});

test("events from a seq on", async () => {
  const { data: before } = await d.api.GET("/v1/events", { params: { query: { limit: 1000 } } });
  const sb = await create();
  const stop = new AbortController();
  const seen = [];
  for await (const e of d.events({ after: before.next, signal: stop.signal })) {
    if (e.sandbox === sb.id) seen.push(e.seq);
    if (e.sandbox === sb.id && e.type === "sandbox.running") stop.abort();
  }
  assert.ok(seen.length > 0);
  assert.deepEqual(seen, seen.toSorted((a, b) => a - b));
});

test("an exec with a key runs once", async () => {
  const sb = await create();
  const argv = ["sh", "-c", "echo x >> /root/count; wc -l < /root/count"];
  const a = await d.exec(sb.id, argv, { idempotencyKey: "once" });
  const b = await d.exec(sb.id, argv, { idempotencyKey: "once" });
  assert.deepEqual([a.stdout.trim(), b.stdout.trim(), a.process.id === b.process.id], ["1", "1", true]);
});
