// A hidden page sends no requests.

/** Resolves as soon as the page is visible. */
export function whenVisible() {
  if (document.visibilityState === "visible") {
    return Promise.resolve();
  }
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", () => resolve(), { once: true });
  });
}

/** A signal that is aborted when the page is hidden; `release` removes its listener. */
export function untilHidden() {
  const abort = new AbortController();
  const check = () => document.visibilityState === "hidden" && abort.abort();
  document.addEventListener("visibilitychange", check);
  return { signal: abort.signal, abort: () => abort.abort(), release: () => document.removeEventListener("visibilitychange", check) };
}
