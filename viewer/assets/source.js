// Receives snapshots: the server-sent events of /api/v1/watch. They are read with `fetch`, because
// `EventSource` can't send a token.

const TOKEN = "gradwire-token";

/** The longest time between two snapshots, in milliseconds. */
const SILENCE = 10_000;

/** How long to wait before the next attempt, in milliseconds. */
const AGAIN = 2_000;

/** Keeps the token as long as the tab is open. */
export function keepToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

/** Why the job can't be seen. `isFinal`: trying again won't help. */
class Refused extends Error {
  constructor(message, { needsToken = false, isFinal = false } = {}) {
    super(message);
    Object.assign(this, { needsToken, isFinal });
  }
}

async function request(path, signal) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  if (answer.ok) return answer;
  const { error, hint } = await answer.json();
  const needsToken = answer.status === 401;
  const isFinal = needsToken || [403, 421, 503].includes(answer.status);
  throw new Refused(needsToken ? error : `${error}: ${hint}`, { needsToken, isFinal });
}

/** The JSON at a path of the API. */
export async function ask(path) {
  const answer = await request(path, AbortSignal.timeout(SILENCE));
  return answer.json();
}

/** The events of a stream of bytes, one after the other: `{name, data}`. */
async function* events(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const fields = part.split("\n").map((line) => /^(\w+): ?(.*)$/.exec(line)).filter(Boolean);
      const of = (name) => fields.filter((it) => it[1] === name).map((it) => it[2]).join("\n");
      yield { name: of("event"), data: JSON.parse(of("data") || "null") };
    }
  }
}

/** Shows snapshots until the connection ends. Returns the server's reason, if it gave one. */
async function watchOnce(show) {
  const abort = new AbortController();
  let timer;
  const heard = () => {
    clearTimeout(timer);
    const silent = new Error(`the coordinator has been silent for ${SILENCE / 1000} s`);
    timer = setTimeout(() => abort.abort(silent), SILENCE);
  };
  heard();
  try {
    const { body } = await request("/api/v1/watch", abort.signal);
    for await (const { name, data } of events(body, heard)) {
      if (name === "status") show.status(data);
      if (name === "end") return data.reason;
    }
  } finally {
    clearTimeout(timer);
    abort.abort();
  }
  throw new Error("the connection to the coordinator was lost");
}

/**
 * Watches the job until it is over. `show` has `status(snapshot)`, `lost(why)` before the connection
 * is made again, and `over(why)` and `token(why)` for the end.
 */
export async function watch(show) {
  for (;;) {
    try {
      return show.over(await watchOnce(show));
    } catch (error) {
      if (error.needsToken) return show.token(error.message);
      if (error.isFinal) return show.over(error.message);
      show.lost(error instanceof TypeError ? "the coordinator does not answer" : error.message);
    }
    await new Promise((resume) => setTimeout(resume, AGAIN));
  }
}
