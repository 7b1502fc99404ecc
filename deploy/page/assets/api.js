// The service's API: every request carries the key in a header, every failure becomes one plain sentence.

import { eventsOf } from "./sse.js";

const STORED = "d1.key";

/** The key of this tab. It is in no cookie and in no request's URL, and the browser forgets it with the tab. */
export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => sessionStorage.setItem(STORED, value),
  forget: () => sessionStorage.removeItem(STORED),
};

/** A failure that the reader is told about. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

const listeners = [];

/** Call `listener` whenever the service refuses the key. */
export function onRefusedKey(listener) {
  listeners.push(listener);
}

/** A GET as JSON. */
export async function get(path, signal) {
  return answerOf(await send(path, { signal }));
}

/** The events of a stream: of a GET, or of a POST of `body`. */
export async function* stream(path, { body, headers = {}, signal } = {}) {
  const request = body ? posting(body) : {};
  const response = await send(path, { ...request, signal, headers: { ...request.headers, ...headers, accept: "text/event-stream" } });
  yield* guarded(eventsOf(response));
}

function posting(body) {
  return { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } };
}

async function answerOf(response) {
  try {
    return await response.json();
  } catch (error) {
    throw unreachable(error);
  }
}

async function* guarded(events) {
  try {
    yield* events;
  } catch (error) {
    throw unreachable(error);
  }
}

async function send(path, { headers = {}, ...rest }) {
  if (!/^[\x21-\x7e]+$/.test(key.get())) {
    for (const listener of listeners) {
      listener();
    }
    throw new ApiError(key.get() ? "A key has no spaces and no special characters." : "The service asks for an API key.", { status: 401 });
  }
  let response;
  try {
    response = await fetch(path, {
      ...rest,
      headers: { authorization: `Bearer ${key.get()}`, ...headers },
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    throw unreachable(error);
  }
  if (!response.ok) {
    throw await refusal(response);
  }
  return response;
}

function unreachable(error) {
  if (error.name === "AbortError" || error instanceof ApiError) {
    return error;
  }
  return new ApiError("The connection to the service broke.", { code: "unreachable" });
}

async function refusal(response) {
  const { message, code = null, param = null } = await errorOf(response);
  const about = { status: response.status, code, param };
  if (response.status === 401 || response.status === 403) {
    for (const listener of listeners) {
      listener();
    }
    return new ApiError("The service does not accept this key.", about);
  }
  if (response.status === 429) {
    const seconds = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
    const when = Number.isFinite(seconds) ? `in ${seconds} s` : "in a moment";
    return new ApiError(`The service is busy; try again ${when}.`, about);
  }
  if (response.status >= 500) {
    return new ApiError(`The service failed (${response.status}). ${message ?? "Its log says why."}`, about);
  }
  return new ApiError(message ?? `The service refused this (${response.status}).`, about);
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return typeof error?.message === "string" ? error : {};
  } catch {
    return {};
  }
}
