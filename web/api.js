// Requests to the daemon. A token, where one is needed, is kept for this tab alone and never in an address.

const KEY = "tapline-token";
/** After so many milliseconds without a word a stream of events is given up. */
const SILENCE = 60000;

/** Why the daemon has refused something, or cannot be reached. */
export class Problem extends Error {
  constructor(problem, status) {
    super(problem.detail || "the daemon has not said why");
    this.advice = problem.advice || "";
    this.code = problem.code || "";
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (secret) => (secret ? sessionStorage.setItem(KEY, secret) : sessionStorage.removeItem(KEY)),
};

function headers(more) {
  const secret = token.get();
  return secret ? { ...more, Authorization: `Bearer ${secret}` } : more;
}

async function problemOf(response) {
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    problem = { detail: `the answer has the status ${response.status} and is not the daemon's` };
  }
  return new Problem(problem, response.status);
}

/** A response whose status is good. `signal` may end it; an answer that takes longer than `seconds` is none. */
async function fetched(path, options, seconds, signal) {
  const timeout = seconds ? AbortSignal.timeout(seconds * 1000) : null;
  const signals = [timeout, signal].filter(Boolean);
  let response;
  try {
    response = await fetch(path, {
      ...options,
      headers: headers(options.headers || {}),
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
      signal: signals.length ? AbortSignal.any(signals) : undefined,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    const why = error.name === "TimeoutError" ? `it has not answered for ${seconds} s` : "no connection";
    throw new Problem({ code: "unreachable", detail: `The daemon cannot be reached: ${why}.` }, 0);
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

export async function get(path, { signal, seconds = 10 } = {}) {
  return (await fetched(`/v1${path}`, {}, seconds, signal)).json();
}

/** The text of an answer that is no JSON. */
export const getText = async (path) => (await fetched(`/v1${path}`, {}, 10)).text();

/** A request that changes something; a key makes sure that it is done once. */
export async function change(method, path, body) {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  const key = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  const options = { method, headers: { "Idempotency-Key": key } };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const response = await fetched(`/v1${path}`, options, 60);
  return response.status === 204 ? null : response.json();
}

/** Sends bytes to where each belongs at one place only, so that no key is needed. */
export async function post(path, bytes, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: bytes };
  return (await fetched(`/v1${path}`, options, 120, signal)).json();
}

/**
 * Follows the events after a number: `on(name, id, data)` for each, until it returns false, or the stream ends or is
 * aborted. Returns whether the stream has ended by itself.
 */
export async function follow(after, on, signal) {
  // The daemon says something every 20 seconds: what says nothing is a connection that has been lost.
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE);
  const response = await fetched(`/v1/events?after=${after}`, {}, 0, AbortSignal.any([signal, silence.signal]));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return true;
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE);
      text += value;
      const pieces = text.split("\n\n");
      text = pieces.pop();
      for (const piece of pieces) {
        const fields = Object.fromEntries(piece.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
        if (fields.event && on(fields.event, fields.id, fields.data) === false) return false;
      }
    }
  } finally {
    clearTimeout(timer);
    // Without this the connection would stay.
    reader.cancel().catch(() => {});
  }
}
