// Compiles, or not: what the types must permit and refuse.
import { Sandboxd } from "../src/index.js";

export async function uses(d: Sandboxd): Promise<string> {
  const sb = await d.create({ name: "a", limits: { memory_bytes: 1 << 28 } });
  const { data } = await d.api.GET("/v1/sandboxes/{ref}", { params: { path: { ref: sb.id } } });
  const run = await d.exec(sb.id, ["true"], { timeout_seconds: 5 });
  // @ts-expect-error no such route
  await d.api.GET("/v1/nothing");
  // @ts-expect-error no such field
  await d.create({ nme: "a" });
  return `${data?.status} ${run.exit.code}`;
}
