import type { Client } from "openapi-fetch";
import type { components, paths } from "./schema.js";

export type { components, paths };
type Schemas = components["schemas"];

export interface Options {
  /** unix:///path.sock, http://… or https://…; SANDBOX_HOST, or the daemon's socket, when absent. */
  host?: string;
  /** SANDBOX_API_KEY when absent. */
  apiKey?: string;
  /** Certificate of the authority that signed the daemon's, PEM. */
  ca?: string | Buffer;
  /** How often what may be repeated is repeated; 3 when absent. */
  retries?: number;
}

export class SandboxdError extends Error {
  status: number;
  code: string;
  /** Of sandbox_ended and sandbox_stopped: why it ended or stopped. */
  reason?: string;
  requestId?: string;
  /** Seconds. */
  retryAfter?: number;
}

export type Message =
  | { type: "started"; process: Schemas["Process"] }
  | { type: "output"; stream: "stdout" | "stderr"; offset: number; data: Buffer }
  | { type: "dropped"; bytes: number; offset: number }
  | { type: "exit"; exit: Schemas["ExitStatus"] };

export interface Result {
  stdout: string;
  stderr: string;
  exit: Schemas["ExitStatus"];
  process: Schemas["Process"];
}

interface Run {
  input?: string | Uint8Array;
  idempotencyKey?: string;
  signal?: AbortSignal;
}

export class Sandboxd {
  constructor(options?: Options);
  /** Every route, typed. An error response is thrown as SandboxdError. */
  readonly api: Client<paths>;
  close(): Promise<void>;
  create(spec?: Partial<Schemas["Spec"]>, options?: { idempotencyKey?: string }): Promise<Schemas["Sandbox"]>;
  remove(ref: string): Promise<Schemas["Sandbox"]>;
  stream(ref: string, process: Partial<Schemas["ProcessSpec"]> & { argv: string[] }, options?: Run): AsyncGenerator<Message>;
  exec(ref: string, argv: string[], options?: Run & Partial<Schemas["ProcessSpec"]>): Promise<Result>;
  readFile(ref: string, path: string): Promise<ReadableStream<Uint8Array>>;
  readText(ref: string, path: string): Promise<string>;
  writeFile(ref: string, path: string, content: string | Uint8Array | ReadableStream, options?: { mode?: number }): Promise<Schemas["FileInfo"]>;
  events(options?: { after?: number; sandbox?: string; signal?: AbortSignal }): AsyncGenerator<Schemas["Event"]>;
}
